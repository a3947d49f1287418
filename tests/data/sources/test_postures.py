"""UCI's Postures.csv, made up: the same columns, the same marks, the same record of zeros."""

from __future__ import annotations

import gzip
import io
import lzma
import zipfile
from pathlib import Path

import numpy as np
import pytest

from fedloom.data.build import federate
from fedloom.data.federation import Dataset
from fedloom.data.sources.postures import FEATURES, Postures
from fedloom.errors import InputError

HEADER = "Class,User," + ",".join(f"{axis}{marker}" for marker in range(12) for axis in "XYZ")
DUMMY = ",".join(["0"] * 38)


def record(posture: str, user: str, *seen: float) -> str:
    return ",".join([posture, user, *(str(value) for value in seen), *["?"] * (36 - len(seen))])


RECORDS = [record("5", "10", 1.5, -2.25, 3), record("1", "2", 4, 5, 6, 7, 8, 9.5), record("3", "10", 0, 0, 0)]
TEXT = "\n".join([HEADER, DUMMY, *RECORDS, ""])


def zipped(name: str, content: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(f"__MACOSX/._{name}", b"leftovers")
        archive.writestr("Readme.txt", b"Motion capture")
        archive.writestr(name, content)
    return buffer.getvalue()


def load(path: Path) -> Dataset:
    return Postures(path=path).load(Path())


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("Postures.csv", TEXT.encode()),
        ("Postures.csv.gz", gzip.compress(TEXT.encode())),
        ("Postures.csv.xz", lzma.compress(TEXT.encode())),
        ("Postures.zip", zipped("Postures.csv", TEXT.encode())),
        ("mocap+hand+postures.zip", zipped("Postures.zip", zipped("Postures.csv", TEXT.encode()))),
    ],
)
def test_the_file_is_read_as_it_is_shipped(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    for path in (tmp_path / name, tmp_path):
        data = load(path)
        assert data.x.shape == (3, 36)
        assert data.x[0, :4].tolist() == [1.5, -2.25, 3.0, 0.0]
        assert data.x[1, 5:7].tolist() == [9.5, 0.0]
        assert data.y.tolist() == [4, 0, 2]
        assert data.classes == ("fist", "stop", "point1", "point2", "grab")
        assert data.features == FEATURES
        assert federate(data).names == ["2", "10"]


def test_only_a_record_of_zeros_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text("\n".join([HEADER, *RECORDS]))
    assert len(load(tmp_path / "p.csv").y) == 3
    (tmp_path / "p.csv").write_text("\n".join([HEADER, record("0", "0", 1, 2, 3), *RECORDS]))
    with pytest.raises(InputError, match=r"p\.csv has a record of class 0: classes must be 1 to 5"):
        load(tmp_path / "p.csv")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TEXT.replace("Class", "Label"), "has no column 'Class'"),
        (TEXT.replace("Z11", "Z12"), r"is not UCI's Postures\.csv: its columns must be Class, User, X0"),
        (TEXT.replace("5,10,", "6,10,"), "has a record of class 6: classes must be 1 to 5"),
        (TEXT.replace("5,10,", "1.5,10,"), r"has a record of class 1\.5"),
        (TEXT.replace("-2.25", "x"), "Line 3 of .* has 'x' in column 'Y0'.* is damaged: download it again"),
        (TEXT[:-40], "Line 5 of .* has 19 cells, but there are 38 columns"),
        (f"{HEADER}\n{DUMMY}\n", "no postures besides the record of zeros"),
        (HEADER, "has no examples"),
    ],
)
def test_wrong_files_are_explained(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "Postures.csv").write_text(text)
    with pytest.raises(InputError, match=message):
        load(tmp_path / "Postures.csv")


def test_damaged_and_missing_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.csv.xz").write_bytes(lzma.compress(TEXT.encode())[:-30])
    with pytest.raises(InputError, match=r"a\.csv\.xz cannot be read as CSV"):
        load(tmp_path / "a.csv.xz")
    (tmp_path / "b.zip").write_bytes(zipped("Postures.csv", TEXT.encode())[:-30])
    with pytest.raises(InputError, match=r"archive b\.zip in .* cannot be read .*: download it again"):
        load(tmp_path / "b.zip")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"no CSV file in .*empty: it must be, or hold, UCI's Postures\.csv"):
        load(tmp_path / "empty")
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path))
    with pytest.raises(InputError, match="Run `fedloom data get postures`, or set 'path'"):
        Postures().load(Path())
    (tmp_path / "postures").mkdir()
    (tmp_path / "postures" / "Postures.csv").write_text(TEXT)
    assert len(Postures().load(Path()).y) == 3


@pytest.mark.data
def test_real_postures(real: Path) -> None:
    data = load(real / "mocap_hand_postures_partial" / "Postures_users0-2.csv.xz")
    assert data.x.shape == (11_022, 36)
    assert data.y.bincount(minlength=5).tolist() == [4377, 3105, 3540, 0, 0]
    assert data.x[0, [0, 1, 2, 15]].tolist() == np.float32([54.26387995, 71.46677614, -64.80770878, 0]).tolist()
    assert federate(data).names == ["0", "1", "2"]
