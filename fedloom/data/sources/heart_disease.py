"""Heart disease at four hospitals (UCI): 920 patients, and at every hospital other things were not recorded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom.data.federation import Dataset
from fedloom.data.sources.archive import contents
from fedloom.data.sources.base import Source, locate_or_cached
from fedloom.errors import InputError

Site = Literal["cleveland", "hungarian", "switzerland", "va"]
Column = Literal[
    "age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak", "slope", "ca", "thal"
]
SITES: tuple[Site, ...] = ("cleveland", "hungarian", "switzerland", "va")
COLUMNS: tuple[Column, ...] = (
    "age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak", "slope", "ca", "thal",
)  # fmt: skip
CODES = {"cp": (1, 2, 3, 4), "restecg": (0, 1, 2), "slope": (1, 2, 3), "thal": (3, 6, 7)}  # kinds, not quantities
NOT_ZERO = ("trestbps", "chol")  # a pressure or cholesterol of 0 was not measured
ALWAYS_KNOWN = ("age", "sex", "cp")
CLASSES = ("healthy", "disease")
LARGEST = float(np.finfo(np.float32).max)
Numbers = NDArray[np.float32]


class HeartDisease(Source):
    """Thirteen findings about a patient, and whether an artery is narrowed; a client is a hospital.

    A finding that is missing is filled with the mean that `normalize` finds (`missing = "mean"`), or its patient is
    left out (`"drop"`). `indicators` adds a column for each finding that says whether it is missing.
    """

    path: Path | None = None
    """The folder with the hospitals' files. By default, what `fedloom data get heart_disease` downloaded."""
    sites: tuple[Site, ...] = SITES
    """The hospitals to use."""
    without: tuple[Column, ...] = ()
    """Findings to leave out."""
    missing: Literal["mean", "drop"] = "mean"
    """Fill a missing finding with the mean that `normalize` finds, or drop the patient."""
    indicators: bool = False
    """Add a column for each finding that says whether it is missing."""

    def load(self, base: Path) -> Dataset:
        """The columns are the same at every hospital, whatever it recorded."""
        twice = [site for site in SITES if self.sites.count(site) > 1]
        if twice:
            raise InputError(
                f"The hospital {twice[0]} stands in 'sites' more than once: its patients would be doubled."
            )
        path = locate_or_cached(base, self.path, "heart_disease")
        tables = _read(path, self.sites)
        columns = [name for name in COLUMNS if name not in self.without]
        if not columns or not self.sites:
            raise InputError("heart_disease needs at least one site and one column: shorten 'sites' or 'without' less.")
        found = {site: self._kept(tables[site], columns) for site in self.sites}
        empty = [site for site in self.sites if not len(found[site])]
        if empty:
            raise InputError(
                f"Without the patients for whom something is missing, nobody is left at {', '.join(empty)}. Leave out "
                'columns that it did not record, such as without = ["chol", "slope", "ca", "thal"], or the site.'
            )
        table = np.concatenate([found[site] for site in self.sites])
        x, names = _encode(table, columns, self.indicators)
        return Dataset(
            torch.from_numpy(x),
            torch.from_numpy((table[:, -1] > 0).astype(np.int64)),
            client=np.repeat(self.sites, [len(found[site]) for site in self.sites]),
            classes=CLASSES,
            features=tuple(names),
            missing=self.missing == "mean",
        )

    def _kept(self, table: Numbers, columns: Sequence[str]) -> Numbers:
        if self.missing == "mean":
            return table
        return table[~np.isnan(table[:, [COLUMNS.index(name) for name in columns]]).any(axis=1)]


def _read(path: Path, sites: Sequence[str]) -> dict[str, Numbers]:
    wanted = {f"processed.{site}.data": site for site in sites}
    found, texts = dict[str, Numbers](), dict[str, bytes]()
    for name, content in contents(path, wanted.__contains__):
        if texts.setdefault(name, content) != content:
            raise InputError(f"There are two files {name} in {path}, and they differ: remove one of them.")
        found[wanted[name]] = _parse(content, path / name)
    lacking = [name for name, site in wanted.items() if site not in found]
    if lacking:
        raise InputError(
            f"There is no {', '.join(lacking)} in {path}. Run `fedloom data get heart_disease`, set 'path' to a folder "
            'or zip file that has UCI\'s processed.*.data, or name the sites that you have: sites = ["cleveland"].'
        )
    return found


def _parse(content: bytes, shown: Path) -> Numbers:
    """The patients of one hospital: COLUMNS and the diagnosis; what is missing is NaN."""
    rows = [_row(line, number, shown) for number, line in enumerate(content.decode("latin-1").splitlines(), 1) if line]
    if not rows:
        raise InputError(f"The file {shown} has no patients: fetch it again.")
    return np.array(rows, dtype=np.float32)


def _row(line: str, number: int, shown: Path) -> list[float]:
    cells = line.split(",")
    if len(cells) != len(COLUMNS) + 1:
        raise InputError(
            f"Line {number} of {shown} has {len(cells)} cells and must have {len(COLUMNS) + 1}: fetch the file again."
        )
    row = []
    for name, cell in zip((*COLUMNS, "num"), cells, strict=True):
        try:
            row.append(_value(name, cell.strip()))
        except ValueError:
            allowed = f"one of {', '.join(map(str, CODES[name]))}" if name in CODES else "a number"
            raise InputError(
                f"Line {number} of {shown} has {cell.strip()!r} for {name}, which must be {allowed}."
            ) from None
    return row


def _value(name: str, cell: str) -> float:
    if cell == "?" and name != "num":
        return math.nan
    value = float(cell)
    if not abs(value) <= LARGEST or (name in CODES and value not in CODES[name]):
        raise ValueError(cell)
    return math.nan if name in NOT_ZERO and value == 0 else value


def _encode(table: Numbers, columns: Sequence[str], indicators: bool) -> tuple[Numbers, list[str]]:
    """Quantities as they are, a column for each code of the others; then, if asked, what is missing."""
    parts, names = [], []
    for name in columns:
        values = table[:, COLUMNS.index(name)]
        for code in CODES.get(name, ()):
            parts.append(np.where(np.isnan(values), np.nan, values == code))
            names.append(f"{name}={code}")
        if name not in CODES:
            parts.append(values)
            names.append(name)
    for name in columns if indicators else ():
        if name not in ALWAYS_KNOWN:
            parts.append(np.isnan(table[:, COLUMNS.index(name)]))
            names.append(f"{name} missing")
    return np.column_stack(parts).astype(np.float32), names
