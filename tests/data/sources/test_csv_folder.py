"""A folder with a table for each client."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedloom.data.sources.csv_folder import clients_of, copies, instead, not_read
from fedloom.errors import InputError


def test_a_client_has_the_name_of_its_file() -> None:
    assert clients_of([Path("d/oslo.csv"), Path("d/Köln.tsv.gz")]) == ["oslo", "Köln"]
    with pytest.raises(InputError, match=r"a\.csv and a\.csv\.gz in the folder d would both be the client a"):
        clients_of([Path("d/a.csv"), Path("d/a.csv.gz")])


def test_copies_are_named(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.csv", "a (1).csv", "b.csv")]
    for file in files:
        file.write_text("x\n2\n" if file.name == "b.csv" else "x\n1\n")
    (said,) = copies(files)
    assert said.startswith("a (1).csv is a copy of a.csv")


def test_what_a_folder_has_besides_or_instead_of_tables_is_said(tmp_path: Path) -> None:
    names = ["notes.txt", *(f"{number}.parquet" for number in range(6))]
    for name in names:
        (tmp_path / name).touch()
    found = sorted(tmp_path.iterdir())
    assert "and 2 more. Save each table as CSV" in instead(found)
    assert instead([]) == "It is empty."
    (said,) = not_read(tmp_path, found)
    assert said.endswith("and 2 more.")
