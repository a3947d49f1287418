from __future__ import annotations

import bz2
import gzip
import io
import lzma
import tarfile
import zipfile
from pathlib import Path

import pytest

from fedloom.data.sources.archive import contents, files, open_text
from fedloom.errors import InputError


def zipped(**members: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, content in members.items():
            archive.writestr(name.replace("__", "."), content)
    return stream.getvalue()


def names(path: Path, keep: tuple[str, ...] = ()) -> list[str]:
    return [name for name, _ in files(path, keep)]


def test_archives_inside_archives_are_opened_and_hidden_files_are_not(tmp_path: Path) -> None:
    (tmp_path / ".hidden").write_bytes(b"")
    (tmp_path / "b.txt").write_bytes(b"b")
    (tmp_path / "a.zip").write_bytes(zipped(inner__zip=zipped(deep__txt=b"deep"), c__txt=b"c", __MACOSX=b""))
    assert [(name, stream.read()) for name, stream in files(tmp_path)] == [
        ("c.txt", b"c"),
        ("deep.txt", b"deep"),
        ("b.txt", b"b"),
    ]
    assert names(tmp_path, keep=("inner.zip",)) == ["c.txt", "inner.zip", "b.txt"]


def test_a_tar_file_is_opened_too(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a")
    with tarfile.open(tmp_path / "all.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "a.txt", "folder/a.txt")
    assert list(contents(tmp_path / "all.tar.gz", lambda name: True)) == [("a.txt", b"a")]
    assert list(contents(tmp_path / "all.tar.gz", lambda name: name == "b.txt")) == []


def test_a_damaged_archive_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(zipped(a__txt=b"a")[:-20])
    with pytest.raises(InputError, match=r"The archive a\.zip in .* cannot be read .*: download it again"):
        names(tmp_path)


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".xz", lzma.compress), (".bz2", bz2.compress)])
def test_text_is_decompressed_by_its_suffix(tmp_path: Path, suffix: str, pack: object) -> None:
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(pack("\ufeffgrün".encode()))  # type: ignore[operator]
    for file in (path, io.BytesIO(path.read_bytes())):
        with open_text(file, path.name) as text:
            assert text.read() == "grün"
    with open_text(io.BytesIO(b"plain"), "a.txt") as text:
        assert text.read() == "plain"
