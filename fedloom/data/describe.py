"""What a federation looks like before anything is trained: numbers, a table, a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.table import Table
from rich.text import Text

from fedloom.data.federation import Federation
from fedloom.data.figure import plot

__all__ = ["Client", "Description", "describe", "label_counts", "plot", "table"]

Numbers = NDArray[np.int64]


class Client(NamedTuple):
    """One client: examples in each split, how many labels it has, and the share of its most common one."""

    name: str
    train: int
    validation: int
    test: int
    labels: int  # 0 for a regression
    largest: float  # nan for a regression

    @property
    def examples(self) -> int:
        """In all splits."""
        return self.train + self.validation + self.test


@dataclass(frozen=True, eq=False)
class Description:
    """All clients, as one array a column so that a million of them cost little, and what is worth a warning."""

    names: Sequence[str] | None
    train: Numbers
    validation: Numbers
    test: Numbers
    labels: Numbers
    largest: NDArray[np.float64]
    classes: tuple[str, ...]
    server: dict[str, int]
    warnings: tuple[str, ...]

    @property
    def clients(self) -> int:
        """How many there are."""
        return len(self.train)

    @property
    def examples(self) -> int:
        """Of all clients in all splits; the server's are not among them."""
        return int(self.train.sum() + self.validation.sum() + self.test.sum())

    def client(self, number: int) -> Client:
        """One row."""
        return Client(
            str(number) if self.names is None else self.names[number],
            int(self.train[number]),
            int(self.validation[number]),
            int(self.test[number]),
            int(self.labels[number]),
            float(self.largest[number]),
        )

    @property
    def rows(self) -> Iterator[Client]:
        """All clients in order."""
        return (self.client(number) for number in range(self.clients))


def describe(federation: Federation) -> Description:
    """Count what every client holds.

    >>> federation = Federation.from_arrays(np.zeros((6, 1)), [0, 0, 0, 0, 1, 1], client=["a"] * 3 + ["b"] * 3)
    >>> description = describe(federation)
    >>> description.client(1)
    Client(name='b', train=1, validation=1, test=1, labels=2, largest=0.6666666666666666)
    >>> description.warnings[0]
    '1 of 2 clients has one label only: a.'
    """
    train, validation, test = federation.split.sizes(np.diff(federation.offsets))
    labels, largest = _labels(federation)
    return Description(
        names=federation.names,
        train=train,
        validation=validation,
        test=test,
        labels=labels,
        largest=largest,
        classes=federation.classes,
        server={name: len(y) for name, (_, y) in federation.server.items()},
        warnings=tuple(_warnings(federation, train, validation, test, labels)),
    )


def _labels(federation: Federation) -> tuple[Numbers, NDArray[np.float64]]:
    """How many labels each client has, and the share of its most common one."""
    sizes = np.diff(federation.offsets)
    classes = len(federation.classes)
    if classes == 0:
        return np.zeros(len(sizes), dtype=np.int64), np.full(len(sizes), np.nan)
    # only the pairs (client, label) that occur are counted: clients × classes may be too many to write down
    pairs = np.repeat(np.arange(len(sizes)), sizes) * classes + federation.y.numpy()
    found, counts = np.unique(pairs, return_counts=True)
    labels = np.bincount(found // classes, minlength=len(sizes))
    most = np.maximum.reduceat(counts, np.concatenate([[0], np.cumsum(labels)[:-1]]))
    return labels, most / sizes


def label_counts(federation: Federation, most: int = 200) -> dict[str, object] | None:
    """Examples of every label at every client, as JSON can hold them; nothing for a regression or a large population.

    >>> federation = Federation.from_arrays(np.zeros((6, 1)), [0, 0, 0, 0, 1, 1], client=["a"] * 3 + ["b"] * 3)
    >>> label_counts(federation)
    {'classes': ['0', '1'], 'counts': [[3, 0], [1, 2]]}
    """
    classes, clients = len(federation.classes), federation.clients
    if not 0 < classes <= most or clients > most:
        return None
    owners = np.repeat(np.arange(clients), np.diff(federation.offsets))
    counts = np.bincount(owners * classes + federation.y.numpy(), minlength=clients * classes)
    return {"classes": list(federation.classes), "counts": counts.reshape(clients, classes).tolist()}


def _warnings(
    federation: Federation, train: Numbers, validation: Numbers, test: Numbers, labels: Numbers
) -> Iterator[str]:
    def clients(where: NDArray[np.bool_], what: str) -> Iterator[str]:
        found = np.flatnonzero(where)
        if len(found):
            shown = ", ".join(federation.name(int(client)) for client in found[:5]) + (", …" if len(found) > 5 else "")
            verb = "has" if len(found) == 1 else "have"
            yield f"{len(found):,} of {federation.clients:,} clients {verb} {what}: {shown}."

    if len(federation.classes) > 1:
        yield from clients(labels == 1, "one label only")
    yield from clients(train == 1, "one training example only")
    if federation.split.validation > 0:
        yield from clients(validation == 0, "no validation examples")
    if federation.split.test > 0:
        yield from clients(test == 0, "no test examples")
    if federation.classes:
        held = np.bincount(federation.y.numpy(), minlength=len(federation.classes))
        nobody = [name for name, count in zip(federation.classes, held, strict=True) if count == 0]
        if nobody:
            shown = ", ".join(nobody[:5]) + (", …" if len(nobody) > 5 else "")
            yield f"No client has examples of {len(nobody):,} of {len(held):,} classes: {shown}."


def table(description: Description, limit: int = 20) -> Table:
    """The clients, at most `limit` of them, with totals and warnings; fits 80 columns."""
    kind = f"{len(description.classes):,} classes" if description.classes else "a regression"
    plural = "" if description.clients == 1 else "s"
    held = " and ".join(f"{count:,} {name} examples" for name, count in description.server.items())
    result = Table(
        title=f"{description.clients:,} client{plural}, {description.examples:,} examples, {kind}"
        + (f"\nThe server holds {held}" if held else ""),
        caption=Text("\n".join(description.warnings)) if description.warnings else None,
        caption_justify="left",
        show_footer=True,
    )
    result.add_column("client", "all", max_width=20, overflow="ellipsis", no_wrap=True)
    for name, counts in _columns(description):
        result.add_column(name, f"{counts.sum():,}", justify="right", no_wrap=True)
    if description.classes:
        result.add_column("labels", justify="right", no_wrap=True)
        result.add_column("largest", justify="right", no_wrap=True)
    for number in range(min(limit, description.clients)):
        client = description.client(number)
        cells = [f"{counts[number]:,}" for _, counts in _columns(description)]
        if description.classes:
            cells += [f"{client.labels:,}", f"{client.largest:.0%}"]
        result.add_row(Text(client.name), *cells)  # as Text: a name like [red] is no markup
    if description.clients > limit:
        result.add_row(f"… {description.clients - limit:,} more")
    return result


def _columns(description: Description) -> list[tuple[str, Numbers]]:
    return [
        ("examples", description.train + description.validation + description.test),
        ("train", description.train),
        ("validation", description.validation),
        ("test", description.test),
    ]
