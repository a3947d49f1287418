"""UCI's MoCap Hand Postures: where the markers on a glove were, by twelve users who made five postures."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import IO

import numpy as np
import torch

from fedloom.data.federation import Dataset
from fedloom.data.sources.archive import files, unpacked
from fedloom.data.sources.base import Source, locate_or_cached
from fedloom.data.sources.csv import NOT_CSV, Csv
from fedloom.errors import InputError

CLASSES = ("fist", "stop", "point1", "point2", "grab")  # 1 to 5 in the file
FEATURES = tuple(f"{axis}{marker}" for marker in range(12) for axis in "XYZ")


class Table(Csv):
    """Postures.csv, whose columns are what they are: there is nothing to set."""

    def advice(self, cell: str, column: str) -> str:
        """A file that is damaged cannot be helped by settings."""
        return "The file is damaged: fetch it again."


class Postures(Source):
    """36 coordinates in mm (Gardner et al., UCI); a client is a user, and a marker that was not seen is at 0.

    `path` is the CSV file, packed or not, or a folder or archive that holds it. The record of zeros after its header,
    which is no posture, is dropped.
    """

    path: Path | None = None
    """The CSV file, packed or not, or a folder or archive that holds it. By default, what `fedloom data get postures`
    downloaded.
    """

    def load(self, base: Path) -> Dataset:
        """Classes are always five, also where a part of the file lacks some."""
        path = locate_or_cached(base, self.path, "postures")
        for name, stream in files(path):
            if ".csv" in Path(name).suffixes:
                return _parse(path, name, stream)
        raise InputError(
            f"There is no CSV file in {path}: it must be, or hold, UCI's Postures.csv (also as .gz, .xz or .zip)."
        )


def _parse(path: Path, name: str, stream: IO[bytes]) -> Dataset:
    shown = path if path.name == name else path / name
    try:
        with io.TextIOWrapper(unpacked(name, stream), encoding="utf-8-sig", newline="") as text:
            table = Table(path=shown, label="Class", client="User", missing={"?": 0}, task="classification").parse(text)
    except NOT_CSV as error:
        raise InputError(f"The file {shown} cannot be read as CSV: {error}.") from None
    if table.features != FEATURES:
        raise InputError(
            f"The file {shown} is not UCI's Postures.csv: its columns must be Class, User, X0, Y0, Z0 to X11, Y11, Z11."
        )
    return _postures(table, shown)


def _postures(table: Dataset, shown: Path) -> Dataset:
    """The examples without the dummy record, with classes from 0."""
    assert table.client is not None
    written = np.array(table.classes)[table.y.numpy()]
    dummy = written[0] == "0" and table.client[0] == "0" and not table.x[0].any()
    kept = slice(int(dummy), None)
    wrong = sorted(set(written[kept]) - set("12345"))
    if wrong:
        raise InputError(f"The file {shown} has a record of class {wrong[0]}: classes must be 1 to {len(CLASSES)}.")
    if not len(written[kept]):
        raise InputError(f"The file {shown} has no postures besides the record of zeros: fetch it again.")
    labels = torch.from_numpy(written[kept].astype(np.int64) - 1)
    return replace(table, x=table.x[kept], y=labels, client=table.client[kept], classes=CLASSES)
