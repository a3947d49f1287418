"""A folder with a table for each client: which of its files are read, and what is said about the others."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from fedloom.data.csv_text import composed
from fedloom.data.sources.archive import WORKBOOKS
from fedloom.errors import InputError
from fedloom.files import sha256

TABLE = re.compile(r"(.+)\.[ct]sv(\.gz|\.xz|\.bz2)?", re.IGNORECASE)  # not a copy such as berlin.csv.bak


def clients_of(files: list[Path]) -> list[str]:
    """Return the client of each file of a folder. Two files of one client may be an export and an older one."""
    owner: dict[str, Path] = {}
    for file in files:
        # some systems write ö as o and a mark
        name = composed(TABLE.sub(r"\1", file.name)).strip()
        if name in owner:
            raise InputError(
                f"{owner[name].name} and {file.name} in the folder {file.parent} would both be the client {name}: "
                "keep one of them there."
            )
        owner[name] = file
    return [*owner]


def copies(files: list[Path]) -> Iterator[str]:
    """Name files that are copies of others: a download with "(1)" in its name would be another client."""
    first: dict[str, Path] = {}
    for file in files:
        other = first.setdefault(sha256(file), file)
        if other is not file:
            yield f"{file.name} is a copy of {other.name} and counts as another client: keep one of them in the folder."


def instead(found: list[Path]) -> str:
    """Say what a folder has instead of tables, and what to do with it."""
    if not found:
        return "It is empty."
    shown = f"It has {_some([file.name + '/' * file.is_dir() for file in found])}."
    if all(file.is_dir() for file in found):
        return f"{shown} Name one of its folders, or put their files into one: folders in it are not read."
    for file in (file for file in found if file.is_file()):
        with file.open("rb") as stream:
            if workbook := WORKBOOKS.get(stream.read(4)):
                return f"{shown} The file {file.name} is {workbook} and put that file there."
    return f"{shown} Save each table as CSV, under a name that ends in .csv or .tsv."


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def not_read(folder: Path, found: list[Path]) -> Iterator[str]:
    """Name what a folder has besides tables: it may be a client's file under another ending."""
    others = [file.name for file in found if not TABLE.fullmatch(file.name)]
    if others:
        yield (
            f"In the folder {folder}, only files that end in .csv or .tsv, also compressed (.gz, .xz, .bz2), are read. "
            f"Left out: {_some(others)}."
        )
