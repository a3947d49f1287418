"""Datasets that come client by client, with a second file of each client's test examples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveInt

from fedloom.data.federation import Dataset, as_dataset
from fedloom.data.sources.base import Source, targets
from fedloom.errors import InputError

Examples = tuple[NDArray[Any], NDArray[Any]]  # features and labels
Reader = Callable[[Path], Iterator[tuple[str, Examples]]]  # the clients of a file


class ByClient(Source):
    """Examples by client, of one `shape`. The test examples become the official test set, or `join` the others.

    The distinct labels in order become the classes; `classes` says instead that labels are already numbers below it.
    """

    shape: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] | None = None
    """The shape of an example."""
    classes: PositiveInt | None = None
    """The number of classes, if labels are already numbers below it. By default, the distinct labels in order become
    the classes.
    """
    join: bool = False
    """Add the test examples to the others instead of keeping them as the official test set."""

    def assemble(self, read: Reader, train: list[Path], test: list[Path]) -> Dataset:
        """The dataset in some files; a client may be in several of them."""
        held, tested = _held(read, train), _held(read, test)
        if not held:
            raise InputError(f"There are no clients in {', '.join(map(str, train))}.")
        if self.join:
            held, tested = [*held, *tested], []
        x, y, clients = self._stacked(held)
        x_test, y_test, _ = self._stacked(tested) if tested else (x[:0], y[:0], clients)
        labels = np.concatenate([y, y_test])
        classes = tuple(str(number) for number in range(self.classes or 0))
        numbers, classes = (labels, classes) if classes else targets(labels, "auto")
        official = (x_test, numbers[len(y) :]) if tested else None
        return replace(as_dataset(x, numbers[: len(y)], client=clients, test=official), classes=classes)

    def _stacked(self, held: list[tuple[str, Examples]]) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        for client, (x, y) in held:
            if x.dtype.kind not in "biuf" or y.dtype.kind not in "biuf":
                raise InputError(f"The examples of client '{client}' must be numbers. Got {x.dtype} and {y.dtype}.")
            if len(x) != len(y) or y.ndim != 1:
                raise InputError(f"Client '{client}' has {len(x)} examples but labels of shape {y.shape}.")
            if x.shape[1:] != held[0][1][0].shape[1:]:
                raise InputError(
                    f"Client '{client}' has examples of shape {x.shape[1:]}, but client '{held[0][0]}' of shape "
                    f"{held[0][1][0].shape[1:]}: all must be alike."
                )
        x = np.concatenate([x for _, (x, _) in held])
        if self.shape is not None:
            if x[0].size != np.prod(self.shape):
                raise InputError(f"An example has {x[0].size} values, which do not fit shape = {list(self.shape)}.")
            x = x.reshape(len(x), *self.shape)
        sizes = [len(y) for _, (_, y) in held]
        return x, np.concatenate([y for _, (_, y) in held]), np.repeat([client for client, _ in held], sizes)


def _held(read: Reader, files: list[Path]) -> list[tuple[str, Examples]]:
    return [(client, examples) for file in files for client, examples in read(file) if len(examples[1])]
