from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedloom.data.build import federate
from fedloom.errors import InputError
from tests.data.sources.loading import load

LOADERS = """
import numpy as np
from fedloom.data.federation import Dataset
import torch

def pair(count=4) -> tuple: return np.zeros((count, 2)), np.arange(count) % 2
def triple(): return np.zeros((2, 2)), np.array([0, 1]), ["a", "b"]
def dataset(base): return Dataset(torch.zeros(1, 1), torch.zeros(1), features=(base.name,))
def nothing(): return None
def fails(): raise RuntimeError("disk on fire")
number = 3
"""


def test_loaders_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(LOADERS)
    assert len(load("mine.py:pair", tmp_path).y) == 4
    assert len(load("mine.py:pair", tmp_path, count=7).y) == 7
    assert federate(load("mine.py:triple", tmp_path)).names == ["a", "b"]
    assert load("mine.py:dataset", tmp_path).features == (tmp_path.name,)


def test_loaders_in_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fedloom_test_loaders.py").write_text(LOADERS)
    monkeypatch.syspath_prepend(tmp_path)
    assert len(load("fedloom_test_loaders:pair").y) == 4


@pytest.mark.parametrize(
    ("reference", "fields", "message"),
    [
        ("mine.py:pear", {}, "mine.py has no 'pear'.*Did you mean 'pair'"),
        ("mine.py:number", {}, "'mine.py:number' must be a function that loads data. Got 3"),
        ("mime.py:pair", {}, "no file .*mime.py"),
        ("no_such_module:pair", {}, "no module 'no_such_module'"),
        ("mine.py:pair", {"size": 3}, "cannot be called with size: .*Its parameters are: count"),
        ("mine.py:nothing", {}, "must return a Dataset.*Got NoneType"),
    ],
)
def test_wrong_loaders_are_explained(tmp_path: Path, reference: str, fields: dict[str, Any], message: str) -> None:
    (tmp_path / "mine.py").write_text(LOADERS)
    with pytest.raises(InputError, match=message):
        load(reference, tmp_path, **fields)


def test_an_error_in_a_loader_names_its_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(LOADERS)
    with pytest.raises(InputError, match=r"(?s)'mine.py:fails' failed: RuntimeError: disk on .*mine.py, line 10"):
        load("mine.py:fails", tmp_path)
