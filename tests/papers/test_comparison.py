"""The table that shows our results beside published ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedloom.errors import InputError
from fedloom.papers import comparison, published
from fedloom.papers.comparison import Planned
from fedloom.papers.published import Reproduction
from fedloom.papers.reproduce import Rerun
from tests.papers.files import SEVERAL, SMALL


def test_the_quick_version_is_labelled_and_shorter(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(SMALL)
    found = published.load(str(tmp_path / "small.toml"))
    planned = Rerun(found, quick=True).plan()
    assert [(one.row.name, one.experiment.rounds) for one in planned] == [("fast", 3)]
    table = comparison.table(found, planned, quick=True)
    assert table.title.endswith("(quick)")
    assert table.note.startswith("QUICK: 1 of 2 rows, at most 3 rounds")
    assert [one.row.name for one in Rerun(found).plan(["s*"])] == ["slow"]
    with pytest.raises(InputError, match=r"No row is called x\. Known: fast; slow"):
        Rerun(found).plan(["x"])


def planned(text: str, ours: dict[str, list[float | None]], tmp_path: Path) -> tuple[Reproduction, list[Planned]]:
    (tmp_path / "file.toml").write_text(text)
    found = published.load(str(tmp_path / "file.toml"))
    rows = [Planned(row, Rerun(found).experiment(row), 0.0) for row in found.row]
    rows[0].ours = ours
    return found, rows


def test_one_measure_is_a_line_with_its_difference_to_the_first_source(tmp_path: Path) -> None:
    table = comparison.table(*planned(SMALL, {"": [3.0, 5.0]}, tmp_path))
    assert table.columns == ("row", "ours", "over seeds", "paper", "difference", "ours / paper", "other")
    assert table.rows[0] == ("fast", 4.0, "3 – 5", 4, 0.0, 1.0, 2)
    assert table.rows[1] == ("slow", "not run yet", None, 7, None, None, None)
    assert table.note == "Sources: paper: nobody; other: nobody else. Ours: mean of 2 seeds."


def test_a_seed_that_does_not_reach_the_target_leaves_no_mean_and_is_counted(tmp_path: Path) -> None:
    table = comparison.table(*planned(SMALL, {"": [3.0, None]}, tmp_path))
    assert table.rows[0] == ("fast", "> 9", "3 – 3, 1 not reached", 4, None, None, 2)


def test_several_numbers_of_a_row_are_columns_with_the_sources_below(tmp_path: Path) -> None:
    found, rows = planned(SEVERAL, {"lowest before": [10.0, 30.0], "crossing": [None, None]}, tmp_path)
    table = comparison.table(found, rows)
    assert table.columns[:3] == ("row", "whose", "lowest before")
    lines = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    assert [line["whose"] for line in lines[:3]] == ["ours", "over seeds", "paper"]
    assert [line["lowest before"] for line in lines[:3]] == [20.0, "10 – 30", 20.0]
    assert [line["crossing"] for line in lines[:3]] == ["> 3", None, "-"]


def test_changed_keys_are_named_first_except_the_folder_of_the_data(tmp_path: Path) -> None:
    found, rows = planned(SMALL, {}, tmp_path)
    changed = {"train.lr": "0.1", "data.path": "here"}
    assert comparison.table(found, rows, changed=changed).note.startswith("CHANGED: train.lr = 0.1. Sources")
    assert comparison.table(found, rows, changed={"data.path": "here"}).note.startswith("Sources")
