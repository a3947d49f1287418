"""scikit-learn's digits: 1,797 images of 8 × 8, inside the installed package, so nothing is downloaded."""

from __future__ import annotations

from pathlib import Path

import torch

from fedloom.data.federation import Dataset
from fedloom.data.sources.base import Source


class Digits(Source):
    """Handwritten digits of 64 grey values from 0 to 16; as `image`, in one channel of 8 × 8.

    >>> Digits(image=True).load(Path()).x.shape
    torch.Size([1797, 1, 8, 8])
    """

    image: bool = False

    def load(self, base: Path) -> Dataset:
        """All of them, in scikit-learn's order."""
        from sklearn.datasets import load_digits  # slow to import, and only needed here

        values, labels = load_digits(return_X_y=True)
        x = torch.from_numpy(values).to(torch.uint8)
        return Dataset(
            x=x.reshape(-1, 1, 8, 8) if self.image else x,
            y=torch.from_numpy(labels).long(),
            classes=tuple("0123456789"),
            scale=1 / 16,
        )
