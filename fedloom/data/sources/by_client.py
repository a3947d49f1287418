"""Datasets that are stored client by client, with a second file of each client's test examples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveInt

from fedloom.data.federation import Dataset
from fedloom.data.sources.base import Source, dataset_with_test
from fedloom.errors import InputError

Client = tuple[str, NDArray[Any], NDArray[Any]]  # name, features, labels
Reader = Callable[[Path], Iterator[Client]]  # the clients of a file


class ByClient(Source):
    """Examples by client. Test examples become the official test set, or with `join` they join the others.

    `shape` is the shape of one example. The distinct labels in order become the classes; if you set `classes`, labels
    are already class numbers from 0 to `classes` − 1.
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
        """Make the dataset from its files. A client may be in several of them."""
        train_clients, test_clients = _read(read, train), _read(read, test)
        if not train_clients:
            raise InputError(f"There are no clients in {', '.join(map(str, train))}.")
        if self.join:
            train_clients, test_clients = [*train_clients, *test_clients], []
        x, y = self._stack(train_clients)
        official = self._stack(test_clients) if test_clients else None
        names = np.repeat([name for name, _, _ in train_clients], [len(labels) for _, _, labels in train_clients])
        return dataset_with_test(x, y, official, client=names, classes=range(self.classes or 0))

    def _stack(self, clients: list[Client]) -> tuple[NDArray[Any], NDArray[Any]]:
        first_name, first_x, _ = clients[0]
        for name, x, y in clients:
            if x.dtype.kind not in "biuf" or y.dtype.kind not in "biuf":
                raise InputError(f"The examples of client '{name}' must be numbers. Got {x.dtype} and {y.dtype}.")
            if len(x) != len(y) or y.ndim != 1:
                raise InputError(f"Client '{name}' has {len(x)} examples but labels of shape {y.shape}.")
            if x.shape[1:] != first_x.shape[1:]:
                raise InputError(
                    f"Client '{name}' has examples of shape {x.shape[1:]}, but client '{first_name}' has examples of "
                    f"shape {first_x.shape[1:]}: all examples need the same shape."
                )
        stacked = np.concatenate([x for _, x, _ in clients])
        if self.shape is not None:
            if stacked[0].size != np.prod(self.shape):
                size, wanted = stacked[0].size, list(self.shape)
                raise InputError(f"An example has {size} values, which do not fit shape = {wanted}.")
            stacked = stacked.reshape(len(stacked), *self.shape)
        return stacked, np.concatenate([y for _, _, y in clients])


def _read(read: Reader, files: list[Path]) -> list[Client]:
    return [client for file in files for client in read(file) if len(client[2])]
