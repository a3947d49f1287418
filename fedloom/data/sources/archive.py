"""Read files in folders, in archives, and in archives inside archives, as datasets are shipped."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TextIO

from fedloom.errors import InputError

OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.xz", ".tar.bz2")
UNREADABLE = (OSError, EOFError, zlib.error, lzma.LZMAError, tarfile.TarError, zipfile.BadZipFile, RuntimeError)
NOT_TEXT = (*UNREADABLE, UnicodeError)  # what reading a text file may raise
SAVE_AS_CSV = "save the sheet as CSV (in Excel: CSV UTF-8)"
WORKBOOKS = {  # by their first bytes, because the ending may say .csv
    b"PK\x03\x04": f"an Excel workbook or a zip archive: {SAVE_AS_CSV}, or unpack the archive,",
    b"\xd0\xcf\x11\xe0": f"an Excel workbook: {SAVE_AS_CSV}",
}


@contextmanager
def readable(
    problem: str, advice: str = "download it again", errors: tuple[type[Exception], ...] = UNREADABLE
) -> Iterator[None]:
    """Turn errors while reading into one that says what cannot be read, why, and what to do."""
    try:
        yield
    except errors as error:
        raise InputError(f"{problem} ({error}): {advice}.") from None


def files(path: Path, keep: Collection[str] = ()) -> Iterator[tuple[str, IO[bytes]]]:
    """Yield the name (without folders) and the content of every file, in order of names.

    Archives are opened, except those whose name is in `keep`. Hidden files and broken links are left out. A stream is
    valid until you ask for the next file.
    """
    if path.is_dir():
        for inner in sorted(path.iterdir()):
            if visible(inner.name):
                yield from files(inner, keep)
    elif path.is_file():
        with path.open("rb") as stream:
            yield from _members(path.name, stream, path, keep)


def contents(path: Path, wanted: Callable[[str], object]) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the whole content of every file whose name is wanted."""
    for name, stream in files(path):
        if wanted(name):
            with readable(f"The file {name} in {path} cannot be read"):
                content = stream.read()
            yield name, content


def open_text(file: Path | IO[bytes], name: str, encoding: str | None = None) -> TextIO:
    """Open a text file, without an encoding in UTF-8, decompressed if its name ends in .gz, .xz or .bz2.

    If its first bytes say that it is in UTF-16 or UTF-32, it is read so whatever the encoding. A workbook is refused.
    """
    opener = OPENERS.get(Path(name).suffix.lower(), open)
    if encoding is not None and isinstance(file, Path) and _has_one_byte_characters(encoding):
        with opener(file, "rb") as content:
            encoding = None if _is_utf_8(content) else encoding
    is_open = opener is open and not isinstance(file, Path)
    buffered: io.BufferedReader[Any] = io.BufferedReader(file if is_open else opener(file, "rb"))
    try:
        first = buffered.peek(4)
        if workbook := WORKBOOKS.get(first[:4]):
            raise InputError(f"The file {name} is {workbook} and give that file.")
    except BaseException:  # such as of a damaged archive
        buffered.close()
        raise
    return io.TextIOWrapper(buffered, encoding=_marked_encoding(first) or encoding or "utf-8-sig", newline="")


def _marked_encoding(first: bytes) -> str | None:
    """Return the encoding that the first bytes of a file name by a mark, if it is not UTF-8.

    >>> _marked_encoding("age".encode("utf-16")), _marked_encoding("age".encode("utf-32")), _marked_encoding(b"age")
    ('utf-16', 'utf-32', None)
    """
    marks = {"utf-32": (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE), "utf-16": (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)}
    return next((name for name, some in marks.items() if first.startswith(some)), None)


def _has_one_byte_characters(encoding: str) -> bool:
    every = bytes(range(256))
    return len(every.decode(encoding, "replace")) == len(every)


def _is_utf_8(content: IO[bytes]) -> bool:
    """Whether a file is UTF-8 beyond doubt: it has characters of several bytes, which no latin text has by chance.

    Of the files in a folder, one may be in another encoding, and the key that names it is for all of them.
    """
    decoder, plain = codecs.getincrementaldecoder("utf-8")(), True
    try:
        while block := content.read(1 << 20):
            plain = decoder.decode(block).isascii() and plain
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return not plain


def known_encoding(name: str | None, shown: str) -> str | None:
    """Return the name of an encoding, or raise an error that quotes where it stands."""
    try:
        "".encode(name or "utf-8")
    except LookupError:
        raise InputError(f"{shown} is not known. Use such as 'utf-8', 'latin-1', 'cp1252' or 'utf-16'.") from None
    return name


def visible(name: str) -> bool:
    """Return whether a file or folder belongs to the data; programs leave others, such as .DS_Store and ~$a.csv."""
    return not name.startswith((".", "__MACOSX", "~$"))


def _members(name: str, stream: IO[bytes], path: Path, keep: Collection[str]) -> Iterator[tuple[str, IO[bytes]]]:
    if name in keep or not name.lower().endswith(ARCHIVES):
        yield name, stream
        return
    with readable(f"The archive {name} in {path} cannot be read"):
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
