"""How each client divides its examples into train, validation and test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import model_validator

from fedloom.errors import InputError
from fedloom.record import Record

SplitName = Literal["train", "validation", "test"]
SPLITS: tuple[SplitName, ...] = ("train", "validation", "test")


class Split(Record):
    """Shares of a client's examples. The test part is taken first, then `validation / (1 − test)` of the rest.

    Parts are rounded up, as in scikit-learn's `train_test_split`, but training always keeps one example. Examples are
    drawn at random. Without `shuffle` they stay in order: training first, test last.

    >>> [int(part[0]) for part in Split().sizes(np.array([11]))]
    [6, 2, 3]
    """

    train: float = 0.6
    """The share of the training split."""
    validation: float = 0.2
    """The share of the validation split."""
    test: float = 0.2
    """The share of the test split."""
    shuffle: bool = True
    """Draw examples at random for each split. Otherwise they stay in order: training first, test last."""

    @model_validator(mode="after")
    def _shares(self) -> Split:
        shares = (self.train, self.validation, self.test)
        if not (min(shares) >= 0 and abs(sum(shares) - 1) <= 1e-6 and self.train > 0):  # nan must be refused too
            raise InputError(
                "The 'split' of the data must be three shares (train, validation, test) that add up to 1, "
                f"with some training. Got {list(shares)} instead."
            )
        return self

    def __repr_args__(self) -> Iterator[tuple[str, Any]]:
        # data fingerprints contain this text, so a split without `shuffle = false` must look as it always did
        return ((name, value) for name, value in self if name != "shuffle" or not value)

    def sizes(self, examples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return the number of examples in each part, for clients with these numbers of examples."""
        test = np.minimum(_ceil(self.test * examples), np.maximum(examples - 1, 0))
        rest = examples - test
        share = self.validation / (1 - self.test) if self.test < 1 else 0.0
        validation = np.minimum(_ceil(share * rest), np.maximum(rest - 1, 0))
        return rest - validation, validation, test


def _ceil(values: NDArray[np.floating]) -> NDArray[np.int64]:
    # 0.2 * 15 is 3.0000000000000004 in floating point: round it to 3 before rounding up
    return np.ceil(np.round(values, 9)).astype(np.int64)
