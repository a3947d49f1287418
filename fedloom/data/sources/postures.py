"""UCI's MoCap Hand Postures: positions of the markers on a glove, from twelve users who made five postures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from fedloom.data.federation import Dataset
from fedloom.data.sources.archive import files
from fedloom.data.sources.base import Source, locate_or_cached
from fedloom.data.sources.csv import Csv
from fedloom.errors import InputError

CLASSES = ("fist", "stop", "point1", "point2", "grab")  # 1 to 5 in the file
FEATURES = tuple(f"{axis}{marker}" for marker in range(12) for axis in "XYZ")


class Postures(Source):
    """36 coordinates in mm (Gardner et al., UCI); a client is a user. Markers that the cameras lost are at 0.

    `path` is the CSV file, compressed or not, or a folder or archive that holds it. The file begins with a record of
    zeros that is not a posture; it is dropped.
    """

    path: Path | None = None
    """The CSV file, packed or not, or a folder or archive that holds it. By default, what `fedloom data get postures`
    downloaded.
    """

    def load(self, base: Path) -> Dataset:
        """Read the examples. There are always five classes, even if a part of the file lacks some."""
        path = locate_or_cached(base, self.path, "postures")
        for name, stream in files(path):
            if ".csv" in Path(name).suffixes:
                shown = path if path.name == name else path / name
                csv = Csv(path=shown, label="Class", client="User", missing={"?": 0}, task="classification")
                return _postures(csv.parse(stream, name, "The file is damaged: download it again."), shown)
        raise InputError(
            f"There is no CSV file in {path}: it must be, or hold, UCI's Postures.csv (also as .gz, .xz or .zip)."
        )


def _postures(table: Dataset, shown: Path) -> Dataset:
    """Drop the record of zeros, and number the classes from 0."""
    if table.features != FEATURES:
        raise InputError(
            f"The file {shown} is not UCI's Postures.csv: its columns must be Class, User, X0, Y0, Z0 to X11, Y11, Z11."
        )
    assert table.client is not None
    written = np.array(table.classes)[table.y.numpy()]
    zeros = written[0] == "0" and table.client[0] == "0" and not table.x[0].any()
    kept = slice(int(zeros), None)
    wrong = sorted(set(written[kept]) - set("12345"))
    if wrong:
        raise InputError(f"The file {shown} has a record of class {wrong[0]}: classes must be 1 to {len(CLASSES)}.")
    if not len(written[kept]):
        raise InputError(f"The file {shown} has no postures besides the record of zeros: download it again.")
    labels = torch.from_numpy(written[kept].astype(np.int64) - 1)
    return replace(table, x=table.x[kept], y=labels, client=table.client[kept], classes=CLASSES)
