"""Heart disease at four hospitals (UCI): 920 patients. Each hospital left other findings unrecorded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

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
SITES: tuple[Site, ...] = get_args(Site)
COLUMNS: tuple[Column, ...] = get_args(Column)
CODES = {"cp": (1, 2, 3, 4), "restecg": (0, 1, 2), "slope": (1, 2, 3), "thal": (3, 6, 7)}  # kinds, not quantities
ALLOWED = {**CODES, "num": (0, 1, 2, 3, 4)}  # num is the diagnosis: 0 is healthy
NOT_ZERO = ("trestbps", "chol")  # a pressure or cholesterol of 0 was not measured
ALWAYS_KNOWN = ("age", "sex", "cp")
CLASSES = ("healthy", "disease")
LARGEST = float(np.finfo(np.float32).max)
Numbers = NDArray[np.float32]


class HeartDisease(Source):
    """Thirteen findings about a patient, and whether an artery is narrowed; a client is a hospital.

    With `missing = "mean"`, `normalize` fills missing findings with the mean; with `"drop"`, patients with a missing
    finding are left out. `indicators` adds a column for each finding that says whether it is missing.
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
        """Read the patients. Every hospital has the same columns, whatever it recorded."""
        columns = [name for name in COLUMNS if name not in self.without]
        if not columns or not self.sites:
            raise InputError("heart_disease needs at least one site and one column: shorten 'without' or add 'sites'.")
        twice = [site for site in SITES if self.sites.count(site) > 1]
        if twice:
            raise InputError(f"The hospital {twice[0]} is in 'sites' twice: its patients would be counted twice.")
        tables = _read(locate_or_cached(base, self.path, "heart_disease"), self.sites)
        if self.missing == "drop":
            used = [COLUMNS.index(name) for name in columns]
            tables = {site: table[~np.isnan(table[:, used]).any(axis=1)] for site, table in tables.items()}
        empty = [site for site in self.sites if not len(tables[site])]
        if empty:
            raise InputError(
                f"Every patient has a missing finding at {', '.join(empty)}, so nobody is left there. Leave out "
                'columns that it did not record, such as without = ["chol", "slope", "ca", "thal"], or the site.'
            )
        patients = np.concatenate([tables[site] for site in self.sites])
        x, names = _encode(patients, columns, self.indicators)
        return Dataset(
            torch.from_numpy(x),
            torch.from_numpy((patients[:, -1] > 0).astype(np.int64)),
            client=np.repeat(self.sites, [len(tables[site]) for site in self.sites]),
            classes=CLASSES,
            features=tuple(names),
            missing=self.missing == "mean",
        )


def _read(path: Path, sites: Sequence[str]) -> dict[str, Numbers]:
    wanted = {f"processed.{site}.data": site for site in sites}
    texts: dict[str, bytes] = {}
    for name, content in contents(path, wanted.__contains__):
        if texts.setdefault(name, content) != content:
            raise InputError(f"There are two files {name} in {path}, and they differ: remove one of them.")
    lacking = [name for name in wanted if name not in texts]
    if lacking:
        raise InputError(
            f"There is no {', '.join(lacking)} in {path}. Run `fedloom data get heart_disease`, set 'path' to a folder "
            'or zip file that has UCI\'s processed.*.data, or name the sites that you have: sites = ["cleveland"].'
        )
    return {site: _parse(texts[name], path / name) for name, site in wanted.items()}


def _parse(content: bytes, shown: Path) -> Numbers:
    """Return the patients of one hospital: COLUMNS and the diagnosis. Missing values are NaN."""
    lines = enumerate(content.decode("latin-1").splitlines(), 1)
    patients = [_patient(line, f"Line {number} of {shown}") for number, line in lines if line.strip()]
    if not patients:
        raise InputError(f"The file {shown} has no patients: download it again.")
    return np.array(patients, dtype=np.float32)


def _patient(line: str, where: str) -> list[float]:
    names, cells = (*COLUMNS, "num"), line.split(",")
    if len(cells) != len(names):
        raise InputError(f"{where} has {len(cells)} cells, but must have {len(names)}: download the file again.")
    return [_value(name, cell.strip(), where) for name, cell in zip(names, cells, strict=True)]


def _value(name: str, cell: str, where: str) -> float:
    if cell == "?" and name != "num":
        return math.nan
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    allowed = ALLOWED.get(name, ())
    if not abs(value) <= LARGEST or (allowed and value not in allowed):
        expected = f"one of {', '.join(map(str, allowed))}" if allowed else "a number"
        raise InputError(f"{where} has '{cell}' for {name}, which must be {expected}: download the file again.")
    return math.nan if name in NOT_ZERO and value == 0 else value


def _encode(table: Numbers, columns: Sequence[Column], indicators: bool) -> tuple[Numbers, list[str]]:
    """Return the features and their names: quantities as they are, one column per code, then the indicators."""
    features: dict[str, NDArray[np.generic]] = {}
    for name in columns:
        values = table[:, COLUMNS.index(name)]
        if name not in CODES:
            features[name] = values
        for code in CODES.get(name, ()):
            features[f"{name}={code}"] = np.where(np.isnan(values), np.nan, values == code)
    for name in columns if indicators else ():
        if name not in ALWAYS_KNOWN:
            features[f"{name} missing"] = np.isnan(table[:, COLUMNS.index(name)])
    return np.column_stack(list(features.values())).astype(np.float32), list(features)
