"""scikit-learn's digits: 1,797 images of 8 × 8, inside the installed package, so there is nothing to download."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom.data.federation import Dataset
from fedloom.data.sources.base import Source


class Digits(Source):
    """Handwritten digits of 64 grey values from 0 to 16; with `image`, of shape 1 × 8 × 8.

    >>> Digits(image=True).load(Path()).x.shape
    torch.Size([1797, 1, 8, 8])
    """

    image: bool = False
    """Give each digit the shape 1 × 8 × 8 instead of 64."""

    def load(self, base: Path) -> Dataset:
        """Read all digits, in scikit-learn's order."""
        table = _table()
        x = torch.from_numpy(table[:, :-1])
        return Dataset(
            x=x.reshape(-1, 1, 8, 8) if self.image else x,
            y=torch.from_numpy(table[:, -1]).long(),
            classes=tuple("0123456789"),
            scale=1 / 16,
        )


def _table() -> NDArray[np.uint8]:
    """Return 64 grey values and the label of every image.

    Importing scikit-learn takes seconds, so its file is read directly where it is found.
    """
    package = find_spec("sklearn")
    file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz" if package and package.origin else None
    if file is not None and file.is_file():
        return np.loadtxt(file, delimiter=",").astype(np.uint8)
    from sklearn.datasets import load_digits

    values, labels = load_digits(return_X_y=True)
    return np.column_stack([values, labels]).astype(np.uint8)
