"""Numbers of a run as arrays: values at clients, statistics over them, and what rounds cost."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fedloom.metrics import heading, is_percentage, is_share

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Curve = tuple[Ints, Floats]  # rounds, and a value for each


@dataclass(frozen=True)
class Stats:
    """Statistics of values that share an index: a round (over its clients) or a client (over its rounds).

    The standard deviation is the population's, because these clients are all there are.
    """

    index: Ints
    mean: Floats
    std: Floats
    low: Floats
    high: Floats


@dataclass(frozen=True)
class ClientValues:
    """One metric of one cell: a value for each pair of round and client that was measured."""

    rounds: Ints
    clients: Ints
    values: Floats
    undefined: int = 0  # how many values are left out because they are not finite

    def __len__(self) -> int:
        return len(self.values)

    @staticmethod
    def of(table: Floats) -> ClientValues:
        """Take a table with the columns round, client and value; leave out values that are not finite."""
        finite = np.isfinite(table[:, 2])
        kept = table[finite]
        rounds, clients = kept[:, 0].astype(np.int64), kept[:, 1].astype(np.int64)
        return ClientValues(rounds, clients, kept[:, 2], len(table) - len(kept))

    def followed_by(self, later: ClientValues) -> ClientValues:
        """Return these values and those of later rounds."""
        return ClientValues(
            np.concatenate([self.rounds, later.rounds]),
            np.concatenate([self.clients, later.clients]),
            np.concatenate([self.values, later.values]),
            self.undefined + later.undefined,
        )

    def by_round(self) -> Stats:
        """Statistics over clients, for each round."""
        return grouped(self.rounds, self.values)

    def by_client(self) -> Stats:
        """Statistics over rounds, for each client."""
        return grouped(self.clients, self.values)

    def last_round(self) -> ClientValues:
        """The values of the last measured round."""
        return self.keep(self.rounds == (self.rounds.max() if len(self) else 0))

    def keep(self, here: NDArray[np.bool_]) -> ClientValues:
        """The values where a mask is true."""
        return ClientValues(self.rounds[here], self.clients[here], self.values[here], self.undefined)


def grouped(index: Ints, values: Floats) -> Stats:
    """Statistics of the values that have the same index.

    >>> found = grouped(np.array([1, 1, 2]), np.array([0.0, 1.0, 5.0]))
    >>> found.index.tolist(), found.mean.tolist(), found.std.tolist(), found.high.tolist()
    ([1, 2], [0.5, 5.0], [0.5, 0.0], [1.0, 5.0])
    """
    if not len(index):
        empty = np.empty(0)
        return Stats(index, empty, empty, empty, empty)
    if (index[1:] < index[:-1]).any():  # rounds are in order, and there may be many
        order = np.argsort(index, kind="stable")
        index, values = index[order], values[order]
    starts = np.flatnonzero(np.diff(index, prepend=index[0] - 1))
    counts = np.diff(starts, append=len(index))
    mean = np.add.reduceat(values, starts) / counts
    deviations = (values - np.repeat(mean, counts)) ** 2
    std = np.sqrt(np.add.reduceat(deviations, starts) / counts)
    low, high = np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)
    return Stats(index[starts], mean, std, low, high)


@dataclass(frozen=True)
class RoundTimes:
    """When each round began and ended, in virtual seconds."""

    rounds: Ints
    began: Floats
    ended: Floats

    def at(self, rounds: Ints) -> Floats:
        """When these rounds ended."""
        return self.ended[np.searchsorted(self.rounds, rounds)]


@dataclass(frozen=True)
class RoundCosts:
    """Seconds, bytes and participants of each round."""

    rounds: Ints
    seconds: Floats
    bytes_up: Ints
    bytes_down: Ints
    participants: Ints

    @property
    def bytes_so_far(self) -> Ints:
        """All bytes up and down until the end of each round."""
        return np.cumsum(self.bytes_up + self.bytes_down)


@dataclass(frozen=True)
class MetricInfo:
    """What is known about a metric."""

    name: str
    is_mean: bool  # over examples; AUROC, for example, is not
    higher_is_better: bool
    of_class: str = field(default="", compare=False)  # the name of the class that it is about, if that is known

    @property
    def title(self) -> str:
        """The name for people: a class has a number in the stored one.

        >>> MetricInfo("f1_of_0", False, True, "benign").title, MetricInfo("f1", False, True).title
        ('f1_of_0 (benign)', 'f1')
        """
        return f"{self.name} ({self.of_class})" if self.of_class else self.name

    @property
    def capital_title(self) -> str:
        """The name for a heading or the beginning of a sentence.

        >>> [MetricInfo(name, True, True).capital_title for name in ("auroc_macro", "balanced_accuracy", "f1_of_0")]
        ['AUROC macro', 'Balanced accuracy', 'F1 of 0']
        """
        return heading(self.name) + (f" ({self.of_class})" if self.of_class else "")

    @property
    def percent(self) -> bool:
        """Whether the metric is a share, shown as a percentage."""
        return is_percentage(self.name)

    @property
    def share(self) -> bool:
        """Whether the metric is between 0 and 1, shown as a percentage (accuracy) or not (AUROC)."""
        return is_share(self.name)

    @property
    def number_format(self) -> str:
        """How a table shows a value of this metric: see `table.show`."""
        return "percent" if self.percent else "number"

    @property
    def deviation_format(self) -> str:
        """How a table shows a standard deviation of this metric: see `table.show`."""
        return "deviation" if self.percent else "number"

    @property
    def difference_format(self) -> str:
        """How a table shows a difference of two values of this metric: see `table.show`."""
        return "points" if self.percent else "difference"
