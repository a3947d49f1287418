"""Files in folders, in archives, and in archives inside of those, as datasets are shipped."""

from __future__ import annotations

import bz2
import gzip
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import IO, Any

from fedloom.errors import InputError

PACKED: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.xz", ".tar.bz2")
UNREADABLE = (OSError, EOFError, zlib.error, lzma.LZMAError, tarfile.TarError, zipfile.BadZipFile, RuntimeError)


def files(path: Path, keep: Collection[str] = ()) -> Iterator[tuple[str, IO[bytes]]]:
    """The name, without folders, and the content of every file, in order of names; files of the system are left out.

    Archives whose name is in `keep` are not looked into. A stream is good until the next file is asked for. Links that
    lead nowhere are no files.
    """
    if path.is_dir():
        for inner in sorted(path.iterdir()):
            if visible(inner.name):
                yield from files(inner, keep)
        return
    if path.is_file():
        with path.open("rb") as stream:
            yield from _members(path.name, stream, path, keep)


def contents(path: Path, wanted: Callable[[str], object]) -> Iterator[tuple[str, bytes]]:
    """The name and the whole content of every file whose name is wanted."""
    for name, stream in files(path):
        if wanted(name):
            try:
                content = stream.read()
            except UNREADABLE as error:
                raise InputError(f"The file {name} in {path} cannot be read ({error}): fetch it again.") from None
            yield name, content


def unpacked(name: str, stream: IO[bytes]) -> IO[bytes]:
    """A stream as it is, or decompressed where its name ends in .gz, .xz or .bz2."""
    opener = PACKED.get(Path(name).suffix)
    content: IO[bytes] = stream if opener is None else opener(stream, "rb")
    return content


def visible(name: str) -> bool:
    """Whether a file or folder is no leftover of somebody's operating system."""
    return not name.startswith((".", "__MACOSX"))


def _members(name: str, stream: IO[bytes], path: Path, keep: Collection[str]) -> Iterator[tuple[str, IO[bytes]]]:
    if name in keep or not name.lower().endswith(ARCHIVES):
        yield name, stream
        return
    try:
        if name.lower().endswith(".zip"):
            with zipfile.ZipFile(stream) as archive:
                for inner in sorted(archive.namelist()):
                    if not inner.endswith("/") and visible(Path(inner).name):
                        with archive.open(inner) as member:
                            yield from _members(Path(inner).name, member, path, keep)
        else:
            with tarfile.open(fileobj=stream) as archive:
                for entry in archive:
                    content = archive.extractfile(entry)
                    if content is not None and visible(Path(entry.name).name):
                        yield from _members(Path(entry.name).name, content, path, keep)
    except UNREADABLE as error:
        raise InputError(f"The archive {name} in {path} cannot be read ({error}): fetch it again.") from None
