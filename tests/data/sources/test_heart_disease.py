"""UCI's processed.*.data, made up: fourteen cells a line, "?" for what was not recorded."""

from __future__ import annotations

import zipfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedloom.data.build import federate
from fedloom.data.federation import Dataset
from fedloom.data.sources.heart_disease import COLUMNS, SITES, HeartDisease
from fedloom.errors import InputError

LINES = {
    "cleveland": "63.0,1.0,1.0,145.0,233.0,1.0,2.0,150.0,0.0,2.3,3.0,0.0,6.0,0\n"
    "67.0,1.0,4.0,160.0,286.0,0.0,2.0,108.0,1.0,1.5,2.0,3.0,3.0,2\n",
    "hungarian": "28,1,2,130,132,0,2,185,0,0,?,?,?,0\n29,0,2,140,?,0,0,170,0,0,?,?,?,4\n",
    "switzerland": "32,1,1,95,0,?,0,127,0,.7,1,?,?,1\n",
    "va": "63,1,4,140,260,0,1,112,1,3,2,?,?,2\n44,1,4,0,209,0,1,127,0,-0.5,?,?,7,0\n",
}


def hospitals(folder: Path, **other: str) -> Path:
    folder.mkdir(exist_ok=True)
    for site, lines in {**LINES, **other}.items():
        (folder / f"processed.{site}.data").write_text(lines)
    return folder


def load(path: Path, **fields: Any) -> Dataset:
    return HeartDisease(path=path, **fields).load(Path())


def column(data: Dataset, name: str) -> list[float]:
    return data.x[:, data.features.index(name)].nan_to_num(-1).tolist()


def test_a_client_is_a_hospital_and_a_patient_is_healthy_or_not(tmp_path: Path) -> None:
    data = load(hospitals(tmp_path))
    assert data.client is not None
    assert data.client.tolist() == ["cleveland"] * 2 + ["hungarian"] * 2 + ["switzerland"] + ["va"] * 2
    assert (data.y.tolist(), data.classes) == ([0, 1, 0, 1, 1, 1, 0], ("healthy", "disease"))
    assert data.features == (
        *(
            "age",
            "sex",
            "cp=1",
            "cp=2",
            "cp=3",
            "cp=4",
            "trestbps",
            "chol",
            "fbs",
            "restecg=0",
            "restecg=1",
            "restecg=2",
        ),
        *("thalach", "exang", "oldpeak", "slope=1", "slope=2", "slope=3", "ca", "thal=3", "thal=6", "thal=7"),
    )


def test_quantities_stay_and_kinds_get_a_column_each(tmp_path: Path) -> None:
    data = load(hospitals(tmp_path))
    assert column(data, "age") == [63, 67, 28, 29, 32, 63, 44]
    assert column(data, "oldpeak") == pytest.approx([2.3, 1.5, 0, 0, 0.7, 3, -0.5])
    assert column(data, "cp=4") == [0, 1, 0, 0, 0, 1, 1]


def test_what_was_not_recorded_is_missing_also_where_a_zero_says_so(tmp_path: Path) -> None:
    data = load(hospitals(tmp_path))
    assert column(data, "chol") == [233, 286, 132, -1, -1, 260, 209]
    assert column(data, "trestbps") == [145, 160, 130, 140, 95, 140, -1]
    assert column(data, "ca") == [0, 3, -1, -1, -1, -1, -1]
    for code, expected in ((3, [0, 1]), (6, [1, 0]), (7, [0, 0])):
        assert column(data, f"thal={code}") == [*expected, -1, -1, -1, -1, float(code == 7)]
    assert data.missing


def test_indicators_say_what_is_missing(tmp_path: Path) -> None:
    data = load(hospitals(tmp_path), indicators=True)
    assert len(data.features) == 32
    assert column(data, "chol missing") == [0, 0, 0, 1, 1, 0, 0]
    assert column(data, "slope missing") == [0, 0, 1, 1, 0, 0, 1]
    assert not any(name.startswith(("age m", "sex m", "cp m")) for name in data.features)


def test_patients_with_something_missing_can_be_left_out(tmp_path: Path) -> None:
    rarely = ["chol", "fbs", "slope", "ca", "thal"]
    data = load(hospitals(tmp_path), missing="drop", without=rarely)
    assert data.client is not None
    assert data.client.tolist() == ["cleveland"] * 2 + ["hungarian"] * 2 + ["switzerland", "va"]
    assert not data.missing
    assert torch.isfinite(data.x).all()
    assert len(data.features) == 22 - 9
    with pytest.raises(InputError, match=r"missing finding at hungarian, switzerland, va, so nobody is left"):
        load(tmp_path, missing="drop")


def test_some_hospitals_only(tmp_path: Path) -> None:
    (hospitals(tmp_path) / "processed.va.data").unlink()
    data = load(tmp_path, sites=["switzerland", "cleveland"])
    assert federate(data, normalize="federated").names == ["cleveland", "switzerland"]
    assert column(data, "age") == [32, 63, 67]
    with pytest.raises(
        InputError, match=r'no processed\.va\.data in .*data get heart_disease.*sites = \["cleveland"\]'
    ):
        load(tmp_path)


def test_the_zip_file_that_uci_ships(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "heart+disease.zip", "w") as archive:
        for file in sorted(hospitals(tmp_path / "files").iterdir()):
            archive.write(file, file.name)
        archive.writestr("cleveland.data", "other columns")
    torch.testing.assert_close(load(tmp_path / "heart+disease.zip").x, load(tmp_path / "files").x, equal_nan=True)


def test_of_two_files_of_one_hospital_neither_wins(tmp_path: Path) -> None:
    copy = hospitals(tmp_path / "files") / "processed.va.data"
    (tmp_path / "processed.va.data").write_bytes(copy.read_bytes())
    assert len(load(tmp_path).y) == 7  # the same file twice is no question
    copy.write_text(copy.read_text().replace("63", "64", 1))
    with pytest.raises(InputError, match=r"two files processed\.va\.data in .* differ: remove one"):
        load(tmp_path)


def test_links_that_lead_nowhere_are_no_files(tmp_path: Path) -> None:
    (hospitals(tmp_path) / "notes").symlink_to("nowhere")
    assert len(load(tmp_path).y) > 0
    (tmp_path / "processed.va.data").unlink()
    (tmp_path / "processed.va.data").symlink_to("nowhere")
    with pytest.raises(InputError, match=r"no processed\.va\.data in"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("63,1,1,145,233\n", r"Line 1 of .*processed\.va\.data has 5 cells, but must have 14: download the file again"),
        (LINES["va"] + "63,1,4,140,260,0,1,112,1,3,2,?,", r"Line 3 of .* has 13 cells, but must have 14"),
        (LINES["va"].replace("63,1,4", "63,1,5"), "Line 1 of .* has '5' for cp, which must be one of 1, 2, 3, 4"),
        (
            LINES["va"].replace("44,1,4", "old,1,4"),
            "Line 2 of .* has 'old' for age, which must be a number: download the file again",
        ),
        (LINES["va"].replace(",7,0", ",7,?"), r"Line 2 of .* has '\?' for num, which must be one of 0, 1, 2, 3, 4"),
        ("\n\n" + LINES["va"].replace(",7,0", ",7,5"), r"Line 4 of .*processed\.va\.data has '5' for num"),
        ("\n" + LINES["va"].replace("63,1,4", "63,1,5"), "Line 2 of .* has '5' for cp"),
        (LINES["va"].replace("44,1,4", "inf,1,4"), "Line 2 of .* has 'inf' for age, which must be a number"),
        (LINES["va"].replace("44,1,4", "nan,1,4"), "Line 2 of .* has 'nan' for age, which must be a number"),
        (LINES["va"].replace("44,1,4", "1e300,1,4"), "Line 2 of .* has '1e300' for age, which must be a number"),
        ("\n", "has no patients: download it again"),
        ("<!DOCTYPE html>\n<html>\n", "Line 1 of .* has 1 cells, but must have 14"),
    ],
)
def test_wrong_files_are_explained(tmp_path: Path, lines: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load(hospitals(tmp_path, va=lines))


def test_wrong_fields_are_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"'sites\.0' parameter of HeartDisease must be 'cleveland', 'hungarian'"):
        load(tmp_path, sites=["budapest"])
    with pytest.raises(InputError, match="at least one site and one column"):
        load(hospitals(tmp_path), without=COLUMNS)
    with pytest.raises(InputError, match="at least one site and one column"):
        load(tmp_path, sites=[])
    with pytest.raises(InputError, match=r"va is in 'sites' twice: its patients would be counted twice"):
        load(tmp_path, sites=["va", "cleveland", "va"])
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path))
    with pytest.raises(InputError, match="Run `fedloom data get heart_disease`"):
        HeartDisease().load(Path())


@pytest.mark.data
def test_the_real_hospitals(real: Path) -> None:
    data = load(real / "heart_disease")
    federation = federate(data, normalize="federated")
    assert federation.names == list(SITES)
    assert np.diff(federation.offsets).tolist() == [303, 294, 123, 200]
    sick = [int(federation.y[start:end].sum()) for start, end in pairwise(federation.offsets)]
    assert sick == [139, 106, 115, 149]
    lacking = dict(zip(data.features, data.x.isnan().sum(0).tolist(), strict=True))
    assert (lacking["chol"], lacking["trestbps"], lacking["ca"], lacking["thal=3"]) == (30 + 172, 60, 611, 486)
    complete = load(real / "heart_disease", missing="drop", without=["chol", "slope", "ca", "thal"])
    assert np.unique(complete.client, return_counts=True)[1].tolist() == [303, 284, 46, 133]
