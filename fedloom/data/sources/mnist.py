"""MNIST and Fashion-MNIST: four files in the idx format, gzipped or not."""

from __future__ import annotations

import gzip
import math
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedloom.data.federation import Dataset
from fedloom.data.sources.archive import readable
from fedloom.data.sources.base import Source, cache_folder, find, locate
from fedloom.errors import InputError

FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
UNSIGNED_BYTES = 0x08


class Mnist(Source):
    """70,000 handwritten digits of 28 × 28, 10,000 of them the official test set (LeCun, Cortes and Burges)."""

    path: Path | None = None
    """The folder with the four files. By default, what `fedloom data get` downloaded."""
    name: ClassVar[str] = "mnist"
    classes: ClassVar[tuple[str, ...]] = tuple("0123456789")

    def load(self, base: Path) -> Dataset:
        """Read the files in `path`, or in the cache."""
        folder = cache_folder(self.name) if self.path is None else locate(base, self.path)
        files = {file: find(folder, file) for file in FILES}
        missing = [file for file, found in files.items() if found is None]
        if missing:
            raise InputError(
                f"The folder {folder} has no {', '.join(missing)} (with or without .gz). Run `fedloom data get "
                f"{self.name}`, or set 'path' to a folder with the four files {', '.join(FILES)}."
            )
        train_x, train_y, test_x, test_y = (file for file in files.values() if file is not None)
        x, y = _images_and_labels(train_x, train_y)
        return Dataset(x, y, test=_images_and_labels(test_x, test_y), classes=self.classes, scale=1 / 255)


class FashionMnist(Mnist):
    """70,000 pictures of clothes, in MNIST's format (Xiao, Rasul and Vollgraf 2017)."""

    name = "fashion_mnist"
    classes = ("T-shirt", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Boot")


def _read(path: Path) -> Tensor:
    """Read the unsigned bytes of one idx file: a header of big-endian numbers, then the values."""
    raw = path.read_bytes()
    if raw[:2] == b"\x1f\x8b":
        with readable(f"The file {path} is not a complete gzip file"):
            raw = gzip.decompress(raw)
    dimensions = raw[3] if len(raw) >= 4 else 0
    if len(raw) < 4 or raw[:2] != b"\0\0" or raw[2] != UNSIGNED_BYTES or not 1 <= dimensions <= 3:
        raise InputError(
            f"The file {path} is not an idx file of bytes: it begins with {raw[:4].hex(' ') or 'nothing'} "
            "and must begin with 00 00 08 03 for images or 00 00 08 01 for labels."
        )
    start = 4 + 4 * dimensions
    shape = [int.from_bytes(raw[at : at + 4], "big") for at in range(4, start, 4)]
    if len(raw) - start != math.prod(shape):
        raise InputError(
            f"The file {path} is incomplete or damaged: its header promises {math.prod(shape)} values "
            f"({' × '.join(map(str, shape))}), but it has {max(len(raw) - start, 0)}. Download it again."
        )
    return torch.from_numpy(np.frombuffer(raw, dtype=np.uint8, offset=start).reshape(shape).copy())


def _images_and_labels(images: Path, labels: Path) -> tuple[Tensor, Tensor]:
    x, y = _read(images), _read(labels)
    if x.dim() != 3 or y.dim() != 1:
        raise InputError(
            f"The files {images} and {labels} must hold images (3 dimensions) and labels (1). Got {x.dim()} and "
            f"{y.dim()} dimensions instead: are they swapped?"
        )
    if len(x) != len(y):
        raise InputError(f"{images} has {len(x)} images but {labels} has {len(y)} labels: are they of one set?")
    return x.unsqueeze(1), y.long()
