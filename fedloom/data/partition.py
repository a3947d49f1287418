"""Partitions: ways to assign examples to clients, each a pure function of a key."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveInt
from torch import Tensor

from fedloom import keys
from fedloom.errors import InputError, unknown
from fedloom.record import Record

Owners = NDArray[np.int64]  # the client of every example
ATTEMPTS = 100


class Partition(Record):
    """A way to assign examples to `clients`. A new one defines `owners`; the checks that all need are here."""

    clients: PositiveInt
    """The number of clients."""
    by_label: ClassVar[bool] = False  # whether the partition needs classes

    def count(self, classes: int) -> int:
        """Return the number of clients for data with this many classes."""
        return self.clients

    def assign(self, y: Tensor, key: int, classes: int) -> Owners:
        """Return the client of every example; `classes` is 0 for a regression.

        >>> import torch
        >>> Shards(clients=2, per_client=1).assign(torch.tensor([1, 0, 1, 0]), key=1, classes=2).tolist()
        [1, 0, 1, 0]
        """
        name, clients = type(self).__name__, self.count(classes)
        if self.by_label and classes == 0:
            raise InputError(
                f"The {name} partition assigns examples by their label, but this data is a regression and has no "
                "classes. Use iid, unbalanced or quantity instead."
            )
        if clients > len(y):
            raise InputError(
                f"The 'clients' parameter of {name} must be at most the number of examples, {len(y)}. "
                f"Got {clients} instead: use fewer clients."
            )
        return self.owners(y.numpy(), key, classes)

    @abstractmethod
    def owners(self, labels: NDArray[Any], key: int, classes: int) -> Owners:
        """Return the client of every example, given its label. `assign` calls it after the checks."""


class Iid(Partition):
    """Examples are shuffled and cut into parts as equal as possible."""

    def owners(self, labels: NDArray[Any], key: int, classes: int) -> Owners:
        return _cut(keys.permutation(key, len(labels)), _equal(len(labels), self.clients))


class Shards(Partition):
    """Examples are sorted by label and cut into equal shards; each client gets `per_client` of them.

    With few shards a client has few labels. This is the "pathological" non-IID partition of McMahan et al. 2017.
    """

    per_client: PositiveInt = 2
    """The number of shards for each client."""
    by_label: ClassVar[bool] = True

    def owners(self, labels: NDArray[Any], key: int, classes: int) -> Owners:
        shards = self.clients * self.per_client
        if shards > len(labels):
            raise InputError(
                f"Shards needs at least one example per shard, but {self.clients} clients × {self.per_client} shards "
                f"are {shards} shards for {len(labels)} examples: use fewer clients or a smaller 'per_client'."
            )
        owner = _cut(keys.permutation(key, shards), np.full(self.clients, self.per_client))
        return owner[_cut(np.argsort(labels, kind="stable"), _equal(len(labels), shards))]


class Dirichlet(Partition):
    """The examples of each class are divided by proportions drawn from a Dirichlet distribution (Hsu et al. 2019).

    A small `alpha` gives each class to few clients, a large one approaches iid. Proportions are drawn again until every
    client has `min_examples`.
    """

    alpha: float = Field(gt=0, allow_inf_nan=False)
    """Concentration: a small value gives each class to few clients, a large one approaches iid."""
    min_examples: PositiveInt = 1
    """Draw again until every client has this many examples."""
    by_label: ClassVar[bool] = True

    def owners(self, labels: NDArray[Any], key: int, classes: int) -> Owners:
        """Sort by class, shuffle within each class, and cut by the drawn proportions."""
        shuffled = keys.permutation(keys.key(key, "order"), len(labels))
        order = shuffled[np.argsort(labels[shuffled], kind="stable")]
        examples = np.bincount(labels, minlength=classes)
        fewest = 0
        for attempt in range(ATTEMPTS):
            generator = keys.generator(keys.key(key, "proportions", attempt))
            shares = generator.dirichlet(np.full(self.clients, self.alpha), size=classes)
            sizes = _proportional(shares, examples[:, None])  # classes × clients
            fewest = max(fewest, int(sizes.sum(axis=0).min()))
            if fewest >= self.min_examples:
                return _cut(order, sizes.ravel()) % self.clients
        raise InputError(
            f"In {ATTEMPTS} draws of Dirichlet(alpha={self.alpha}) over {self.clients} clients some client always had "
            f"fewer than min_examples = {self.min_examples} of the {len(labels)} examples (at best {fewest}). "
            "Use a larger 'alpha', fewer clients or a smaller 'min_examples'."
        )


class Affinity(Partition):
    """Each class has a home client: an example goes there with a `probability`, otherwise to any other client.

    By default there are as many clients as classes, and the home of class i is client i. With fewer clients it is
    client i mod clients. With more, the clients j with j mod classes = i share class i at random.
    """

    clients: PositiveInt | None = None  # type: ignore[assignment]
    """The number of clients. By default, one for each class."""
    probability: float = Field(ge=0, le=1)
    """The probability that an example goes to the home of its class."""
    by_label: ClassVar[bool] = True

    def count(self, classes: int) -> int:
        """Return the given number, or the number of classes."""
        return self.clients or classes

    def owners(self, labels: NDArray[Any], key: int, classes: int) -> Owners:
        """Draw for every example whether it goes home, and a client for both cases."""
        clients = self.count(classes)
        homes = min(clients, classes)  # client j belongs to home j mod homes
        home = labels % homes
        insiders = (clients - home + homes - 1) // homes
        outsiders = clients - insiders
        inside = home + homes * _below(keys.key(key, "inside"), insiders)
        if homes == 1:
            return inside
        # number the outsiders: every `homes` clients in a row have one insider, at place `home`, which is skipped
        block, place = np.divmod(_below(keys.key(key, "outside"), outsiders), homes - 1)
        outside = block * homes + place + (place >= home)
        chance = keys.hashes(keys.key(key, "chance"), len(labels)) / 2.0**32
        return np.where(chance < self.probability, inside, outside)


class Unbalanced(Partition):
    """Examples are cut at random places: some clients get one, some very many. Without `shuffle`, in file order."""

    shuffle: bool = True
    """Shuffle the examples first. Otherwise neighbours stay together."""

    def owners(self, labels: NDArray[Any], key: int, classes: int) -> Owners:
        """Cut at distinct places, so that every client has an example."""
        count = len(labels)
        order = keys.permutation(keys.key(key, "order"), count) if self.shuffle else np.arange(count)
        places = np.sort(keys.permutation(keys.key(key, "cuts"), count - 1)[: self.clients - 1]) + 1
        return _cut(order, np.diff(places, prepend=0, append=count))


class Quantity(Partition):
    """Every client gets one example, and the rest is divided by log-normal sizes. `sigma` 0 is iid."""

    sigma: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """The standard deviation of the logarithm of the clients' sizes. 0 makes them equal."""

    def owners(self, labels: NDArray[Any], key: int, classes: int) -> Owners:
        logs = self.sigma * keys.generator(keys.key(key, "sizes")).standard_normal(self.clients)
        shares = np.exp(logs - logs.max())  # relative to the largest: no sigma overflows
        sizes = 1 + _proportional(shares / shares.sum(), len(labels) - self.clients)
        return _cut(keys.permutation(keys.key(key, "order"), len(labels)), sizes)


IN_WORDS = "iid is even; affinity, dirichlet and shards skew labels; unbalanced and quantity skew sizes."
PARTITIONS = {kind.__name__.lower(): kind for kind in Partition.__subclasses__()}


def partition(spec: Mapping[str, Any] | Partition) -> Partition:
    """Make a partition from a table of an experiment file.

    >>> partition({"name": "shards", "clients": 100})
    Shards(clients=100, per_client=2)
    """
    if isinstance(spec, Partition):
        return spec
    if not isinstance(spec, Mapping) or not isinstance(spec.get("name"), str):
        raise InputError(
            'A partition must be a table with a name, such as { name = "iid", clients = 10 }. '
            f"Got {spec!r} instead. Known names: {', '.join(PARTITIONS)}, natural. {IN_WORDS}"
        )
    fields = dict(spec)
    name = fields.pop("name")
    if name not in PARTITIONS:
        raise InputError(f"{unknown('partition', name, [*PARTITIONS, 'natural'])} {IN_WORDS}")
    return PARTITIONS[name](**fields)


def _cut(order: Owners, sizes: NDArray[np.int64]) -> Owners:
    """Give the first `sizes[0]` examples of the order to client 0, the next `sizes[1]` to client 1, and so on."""
    owner = np.empty(len(order), dtype=np.int64)
    owner[order] = np.repeat(np.arange(len(sizes)), sizes)
    return owner


def _equal(total: int, parts: int) -> NDArray[np.int64]:
    """Return sizes that differ by at most one, the larger first."""
    return total // parts + (np.arange(parts) < total % parts).astype(np.int64)


def _proportional(shares: NDArray[np.float64], total: Any) -> NDArray[np.int64]:
    """Divide a total by the shares along the last axis. Rounding the running sum keeps the total exact."""
    cuts = np.rint(np.cumsum(shares, axis=-1) * total).astype(np.int64)
    cuts[..., -1:] = total
    sizes: NDArray[np.int64] = np.diff(np.minimum(cuts, total), axis=-1, prepend=0)
    return sizes


def _below(key: int, bounds: NDArray[np.int64]) -> NDArray[np.int64]:
    """Draw a uniform whole number from 0 to below each bound."""
    return (keys.hashes(key, len(bounds)) * bounds) >> 32
