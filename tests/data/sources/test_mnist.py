from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch

from fedloom.data.build import federate
from fedloom.data.sources.mnist import FILES
from fedloom.errors import InputError
from tests.data.sources.loading import idx, load, write_mnist


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
@pytest.mark.parametrize("dotted", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_idx_files_in_all_spellings(tmp_path: Path, name: str, dotted: bool, packed: bool) -> None:
    def rename(file: str) -> str:
        return (file.replace("-idx", ".idx") if dotted else file) + (".gz" if packed else "")

    write_mnist(tmp_path / "data", rename, gzip.compress if packed else lambda raw: raw)
    data = load(name, tmp_path, path="data")
    assert (data.x.shape, data.x.dtype, data.scale) == ((5, 1, 3, 4), torch.uint8, 1 / 255)
    assert data.x.flatten().tolist() == list(range(60))
    assert data.y.tolist() == [0, 1, 2, 3, 9]
    assert data.test is not None
    assert data.test[0].shape == (2, 1, 3, 4)
    assert data.test[1].tolist() == [4, 5]
    assert len(data.classes) == 10


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (0, idx(np.zeros((5, 3, 4)))[:-7], r"promises 60 values \(5 × 3 × 4\), but it has 53"),
        (0, idx(np.zeros((5, 3, 4))) + b"more", "promises 60 values .*, but it has 64"),
        (0, b"\x00\x00\x08\x03\x00", "but it has 0"),
        (0, b"<html>", "not an idx file of bytes: it begins with 3c 68 74 6d"),
        (0, b"\x00\x00\x0d\x03" + bytes(12), "not an idx file of bytes: it begins with 00 00 0d 03"),
        (0, b"", "begins with nothing"),
        (0, gzip.compress(idx([1]), mtime=0)[:-9], "not a complete gzip file"),
        (0, idx([0, 1]), r"must hold images \(3 dimensions\) and labels \(1\)"),
        (1, idx([0, 1, 2]), "has 5 images but .* has 3 labels"),
    ],
)
def test_damaged_idx_files_are_named(tmp_path: Path, file: int, content: bytes, message: str) -> None:
    write_mnist(tmp_path)
    (tmp_path / FILES[file]).write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        load("mnist", path=tmp_path)
    assert FILES[file] in str(caught.value)


def test_missing_idx_files_are_named(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    (tmp_path / FILES[3]).unlink()
    with pytest.raises(InputError, match=r"has no t10k-labels-idx1-ubyte \(with or without \.gz\)"):
        load("mnist", path=tmp_path)


@pytest.mark.data
def test_real_mnist(real: Path) -> None:
    data = load("mnist", real, path="mnist")
    assert data.x.shape == (60_000, 1, 28, 28)
    assert data.y.bincount().tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert data.test is not None
    assert data.test[0].shape == (10_000, 1, 28, 28)
    federation = federate(data, partition={"name": "shards", "clients": 100}, server="test")
    assert np.diff(federation.offsets).tolist() == [600] * 100
