"""Checks of the examples. An error names the client and the place of the first wrong example."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom.data.federation import Dataset
from fedloom.errors import InputError

ROWS = 8192  # examples checked at a time, so that checks need little memory besides the data


def labels(dataset: Dataset) -> Tensor:
    """Return the labels as class numbers, or as float32 for a regression."""
    if len(dataset.x) != len(dataset.y):
        raise InputError(
            f"There are {len(dataset.x)} examples but {len(dataset.y)} labels: every example needs one label."
        )
    if len(dataset.y) == 0:
        raise InputError("The data has no examples: check the file.")
    clients = dataset.client
    return _numbers(
        dataset.y,
        dataset.classes,
        lambda row: f"example {row}" if clients is None else f"example {row} (client {clients[row]})",
    )


def official_test_set(dataset: Dataset) -> tuple[Tensor, Tensor]:
    """Return the official test set, checked like the other examples."""
    if dataset.test is None:
        raise InputError(
            "The server should hold the official test set, but this source has none. "
            "Give a share to draw instead, such as server = 0.1."
        )
    x, y = dataset.test
    if len(x) != len(y) or x.shape[1:] != dataset.x.shape[1:]:
        raise InputError(
            f"The official test set has {len(y)} labels for examples of shape {tuple(x.shape)}: it must have one for "
            f"each, and examples of shape {tuple(dataset.x.shape[1:])} like the others."
        )
    row = _not_finite(x, dataset.missing)
    if row is not None:
        raise InputError(
            f"Example {row} of the official test set has a feature that is not a finite number: correct it."
        )
    return x, _numbers(y, dataset.classes, lambda row: f"example {row} of the official test set")


def features(dataset: Dataset, holder: Callable[[int], str]) -> None:
    """Check that all features are finite; `holder` names the client of a row."""
    row = _not_finite(dataset.x, dataset.missing)
    if row is None:
        return
    values = dataset.x[row].flatten()
    place = _first(~_allowed(values, dataset.missing))
    feature = f"'{dataset.features[place]}'" if len(dataset.features) == len(values) else place
    raise InputError(
        f"Feature {feature} of example {row} ({holder(row)}) is {values[place].item()}: features must be finite "
        "numbers. Fill in such values or remove the example."
    )


def no_client_empty(sizes: NDArray[np.int64], names: Sequence[str] | None) -> None:
    """Check that every client has an example."""
    empty = np.flatnonzero(sizes == 0)
    if len(empty):
        first = empty[0] if names is None else names[empty[0]]
        raise InputError(
            f"Client {first} would have no examples, as would {len(empty) - 1} more of {len(sizes)} clients. "
            "Use fewer clients, another partition, or dirichlet with its 'min_examples'."
        )


def _numbers(y: Tensor, classes: tuple[str, ...], where: Callable[[int], str]) -> Tensor:
    def refuse(wrong: Tensor, why: str) -> None:
        if wrong.any():
            row = _first(wrong)
            raise InputError(f"The label of {where(row)} is {y[row].tolist()}: {why}.")

    if y.is_floating_point():
        refuse(~torch.isfinite(y), "labels must be finite numbers")
    if not classes:
        return y.to(torch.float32)
    numbers = y.long()
    refuse(numbers != y, "the labels of classes must be whole numbers")
    allowed = f"with {len(classes)} classes, labels must be 0 to {len(classes) - 1}"
    refuse((numbers < 0) | (numbers >= len(classes)), allowed)
    return numbers


def _not_finite(x: Tensor, missing: bool) -> int | None:
    if x.is_floating_point():
        for start in range(0, len(x), ROWS):
            allowed = _allowed(x[start : start + ROWS], missing)
            if not allowed.all():
                return start + _first(~allowed)
    return None


def _allowed(values: Tensor, missing: bool) -> Tensor:
    return ~torch.isinf(values) if missing else torch.isfinite(values)


def _first(wrong: Tensor) -> int:
    """Return the first row with a wrong value."""
    return int(wrong.reshape(len(wrong), -1).any(dim=1).nonzero()[0])
