"""Clients that have too little of something: one label only, or hardly any examples to train or test with."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedloom.data.federation import Federation

Numbers = NDArray[np.int64]
SMALL_TEST = 10  # with fewer test examples, a client's accuracy moves in steps of more than ten points
ONE_LABEL, ONE_EXAMPLE, NO_VALIDATION = "only one label", "only one training example", "no validation examples"
NO_TEST, SMALL_TESTS = "no test examples", f"fewer than {SMALL_TEST} test examples"
SAID = (ONE_LABEL, ONE_EXAMPLE, NO_VALIDATION, NO_TEST)  # before a run; that tests are small is said beside its results
COUNTED = "clients of seed "  # how the names of facts of a run begin: `in_numbers` of the data of each seed


def scarce(federation: Federation) -> dict[str, Numbers]:
    """Return what some clients have too little of, and these clients.

    >>> federation = Federation.from_arrays(np.zeros((6, 1)), [0, 0, 0, 0, 1, 1], client=["a"] * 3 + ["b"] * 3)
    >>> scarce(federation)["only one label"].tolist()
    [0]
    """
    train, validation, test = (federation.sizes(split) for split in ("train", "validation", "test"))
    said = federation.split_sizes is not None  # by the data: a split that nobody has is not meant to be there
    found = {ONE_EXAMPLE: train == 1}
    if len(federation.classes) > 1:
        found = {ONE_LABEL: labels_of_clients(federation)[0] == 1, **found}
    if validation.any() if said else federation.split.validation > 0:
        found[NO_VALIDATION] = validation == 0
    if test.any() if said else federation.split.test > 0:
        found[NO_TEST] = test == 0
    found[SMALL_TESTS] = (test > 0) & (test < SMALL_TEST)
    return {what: np.flatnonzero(where) for what, where in found.items() if where.any()}


def sentences(federation: Federation, where: str = "", only: Collection[str] = SAID) -> Iterator[str]:
    """Yield a sentence about each thing that some clients have too little of; `where` is such as " in seed 1"."""
    for what, clients in scarce(federation).items():
        if what in only:
            verb = "has" if len(clients) == 1 else "have"
            names = first_five([federation.name(int(client)) for client in clients[:6]])
            yield f"{len(clients):,} of {federation.clients:,} clients {verb} {what}{where}: {names}."


def in_numbers(federation: Federation) -> dict[str, Any]:
    """Return how many clients have too little of something, and the sizes of the smallest and the largest, for JSON."""
    train = federation.sizes("train")
    return {
        "clients": federation.clients,
        "train": [int(train.min()), int(train.max())],
        "scarce": {what: len(clients) for what, clients in scarce(federation).items()},
    }


def labels_of_clients(federation: Federation) -> tuple[Numbers, NDArray[np.float64], Numbers]:
    """Return the number of labels of each client, the share of its most common label, and which class that is."""
    sizes, classes = np.diff(federation.offsets), len(federation.classes)
    if classes == 0:
        return np.zeros(len(sizes), dtype=np.int64), np.full(len(sizes), np.nan), np.full(len(sizes), -1)
    # only pairs that occur are counted: a table of clients × classes may not fit into memory
    pairs, counts = np.unique(client_and_label(federation), return_counts=True)
    labels = np.bincount(pairs // classes, minlength=len(sizes))
    starts = np.concatenate([[0], np.cumsum(labels)[:-1]])
    first = np.lexsort((-counts, pairs // classes))[starts]  # of a tie, the first class
    return labels, counts[first] / sizes, pairs[first] % classes


def client_and_label(federation: Federation) -> Numbers:
    """Return client × classes + label of every example: one number for each pair."""
    clients = np.repeat(np.arange(federation.clients), np.diff(federation.offsets))
    pairs: Numbers = clients * len(federation.classes) + federation.y.numpy()
    return pairs


def first_five(names: Sequence[str]) -> str:
    """Return the first names of a list, and whether there are more."""
    return ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
