"""Load a source, and write MNIST's files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fedloom.data.federation import Dataset
from fedloom.data.sources import source
from fedloom.data.sources.mnist import FILES


def load(name: str, base: Path = Path(), **fields: Any) -> Dataset:
    return source(name)(**fields).load(base)


def idx(values: Any) -> bytes:
    array = np.asarray(values, dtype=np.uint8)
    header = bytes([0, 0, 8, array.ndim]) + b"".join(side.to_bytes(4, "big") for side in array.shape)
    return header + array.tobytes()


def write_mnist(folder: Path, rename: Any = lambda name: name, pack: Any = lambda raw: raw) -> None:
    folder.mkdir(exist_ok=True)
    contents = [np.arange(60).reshape(5, 3, 4), [0, 1, 2, 3, 9], np.arange(24).reshape(2, 3, 4), [4, 5]]
    for name, content in zip(FILES, contents, strict=True):
        (folder / rename(name)).write_bytes(pack(idx(content)))
