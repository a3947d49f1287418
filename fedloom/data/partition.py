"""Who gets which example: ways to deal one pile of examples to clients, each a pure function of a key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveInt
from torch import Tensor

from fedloom import keys
from fedloom.errors import InputError, nearest
from fedloom.record import Record

Owners = NDArray[np.int64]  # the client of every example
ATTEMPTS = 100


class Partition(Record):
    """A way to deal examples to `clients`. A new one writes `deal`; what all of them need is checked here."""

    clients: PositiveInt
    """The number of clients."""
    by_label: ClassVar[bool] = False  # such a partition has no meaning for a regression

    def count(self, classes: int) -> int:
        """How many clients there are when the data has this many classes."""
        return self.clients

    def assign(self, y: Tensor, key: int, classes: int) -> Owners:
        """The client of every example; `classes` is 0 for a regression.

        >>> import torch
        >>> Shards(clients=2, per_client=1).assign(torch.tensor([1, 0, 1, 0]), key=1, classes=2).tolist()
        [1, 0, 1, 0]
        """
        name, clients = type(self).__name__, self.count(classes)
        if self.by_label and classes == 0:
            raise InputError(
                f"The {name} partition deals examples by their label, but this data is a regression and has no "
                "classes. Use iid, unbalanced or quantity instead."
            )
        if clients > len(y):
            raise InputError(
                f"The 'clients' parameter of {name} must be at most the number of examples, {len(y)}. "
                f"Got {clients} instead: use fewer clients."
            )
        return self.deal(y.numpy(), key, classes)

    def deal(self, labels: NDArray[Any], key: int, classes: int) -> Owners:
        """The client of every example, given its label; called by `assign` once the checks have passed."""
        raise NotImplementedError(f"{type(self).__name__} must define deal(labels, key, classes)")


class Iid(Partition):
    """Shuffled and cut into parts as equal as possible."""

    def deal(self, labels: NDArray[Any], key: int, classes: int) -> Owners:
        """Sizes differ by at most one."""
        return _cut(keys.permutation(key, len(labels)), _equal(len(labels), self.clients))


class Shards(Partition):
    """Sorted by label and cut into equal shards, `per_client` of them to each client (McMahan et al. 2017).

    With few shards a client has few labels: this is the "pathological" non-IID partition.
    """

    per_client: PositiveInt = 2
    """The number of shards for each client."""
    by_label: ClassVar[bool] = True

    def deal(self, labels: NDArray[Any], key: int, classes: int) -> Owners:
        """Shards are dealt, not examples; where a shard crosses two labels its client has one label more."""
        shards = self.clients * self.per_client
        if shards > len(labels):
            raise InputError(
                f"Shards needs at least one example a shard, but {self.clients} clients × {self.per_client} shards are "
                f"{shards} shards and there are {len(labels)} examples: use fewer clients or a smaller 'per_client'."
            )
        owner = _cut(keys.permutation(key, shards), np.full(self.clients, self.per_client))
        return owner[_cut(np.argsort(labels, kind="stable"), _equal(len(labels), shards))]


class Dirichlet(Partition):
    """The examples of each class are shared out by proportions drawn from a Dirichlet distribution (Hsu et al. 2019).

    A small `alpha` gives each class to few clients, a large one approaches iid. Drawn again until every client has
    `min_examples`.
    """

    alpha: float = Field(gt=0, allow_inf_nan=False)
    """Concentration: a small value gives each class to few clients, a large one approaches iid."""
    min_examples: PositiveInt = 1
    """Draw again until every client has this many examples."""
    by_label: ClassVar[bool] = True

    def deal(self, labels: NDArray[Any], key: int, classes: int) -> Owners:
        """All classes in one go: sorted by class, shuffled within, cut by the drawn proportions."""
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
    """Each class has a home: its examples go there with a `probability`, else uniformly to any other client.

    The home of class i is client i, with as many clients as classes (the default). With fewer clients it is client
    i mod clients; with more, the clients j with j mod classes = i share the home of class i at random.
    """

    clients: PositiveInt | None = None  # type: ignore[assignment]
    """The number of clients. By default, one for each class."""
    probability: float = Field(ge=0, le=1)
    """The probability that an example goes to the home of its class."""
    by_label: ClassVar[bool] = True

    def count(self, classes: int) -> int:
        """As many as there are classes, unless given."""
        return self.clients or classes

    def deal(self, labels: NDArray[Any], key: int, classes: int) -> Owners:
        """Every example draws whether it goes home, and where it goes either way."""
        clients = self.count(classes)
        homes = min(clients, classes)  # client j lives in home j mod homes
        home = labels % homes
        insiders = (clients - home + homes - 1) // homes
        outsiders = clients - insiders
        inside = home + homes * _below(keys.key(key, "inside"), insiders)
        if homes == 1:
            return inside
        # count the outsiders: every `homes` clients in a row have one insider, at place `home`, which is stepped over
        block, place = np.divmod(_below(keys.key(key, "outside"), outsiders), homes - 1)
        outside = block * homes + place + (place >= home)
        chance = keys.hashes(keys.key(key, "chance"), len(labels)) / 2.0**32
        return np.where(chance < self.probability, inside, outside)


class Unbalanced(Partition):
    """Cut at random places: sizes from one example to very many. Without `shuffle` neighbours stay together."""

    shuffle: bool = True
    """Shuffle the examples first. Otherwise neighbours stay together."""

    def deal(self, labels: NDArray[Any], key: int, classes: int) -> Owners:
        """Distinct places, so everybody has an example."""
        count = len(labels)
        order = keys.permutation(keys.key(key, "order"), count) if self.shuffle else np.arange(count)
        places = np.sort(keys.permutation(keys.key(key, "cuts"), count - 1)[: self.clients - 1]) + 1
        return _cut(order, np.diff(places, prepend=0, append=count))


class Quantity(Partition):
    """Shuffled; everybody gets one example and the rest is shared out by log-normal sizes. `sigma` 0 is iid."""

    sigma: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """The standard deviation of the logarithm of the clients' sizes. 0 makes them equal."""

    def deal(self, labels: NDArray[Any], key: int, classes: int) -> Owners:
        """Labels play no part."""
        logs = self.sigma * keys.generator(keys.key(key, "sizes")).standard_normal(self.clients)
        shares = np.exp(logs - logs.max())  # relative to the largest: no sigma overflows
        sizes = 1 + _proportional(shares / shares.sum(), len(labels) - self.clients)
        return _cut(keys.permutation(keys.key(key, "order"), len(labels)), sizes)


PARTITIONS: dict[str, type[Partition]] = {
    "iid": Iid,
    "shards": Shards,
    "dirichlet": Dirichlet,
    "affinity": Affinity,
    "unbalanced": Unbalanced,
    "quantity": Quantity,
}


def partition(spec: Mapping[str, Any] | Partition) -> Partition:
    """A partition from a table of an experiment file.

    >>> partition({"name": "shards", "clients": 100})
    Shards(clients=100, per_client=2)
    """
    if isinstance(spec, Partition):
        return spec
    if not isinstance(spec, Mapping) or not isinstance(spec.get("name"), str):
        raise InputError(
            'A partition must be a table with a name, such as { name = "iid", clients = 10 }. '
            f"Got {spec!r} instead. Known names: {', '.join(PARTITIONS)}, natural."
        )
    fields = dict(spec)
    name = fields.pop("name")
    if name not in PARTITIONS:
        known = [*PARTITIONS, "natural"]
        raise InputError(f"There is no partition '{name}'. Known: {', '.join(known)}.{nearest(name, known)}")
    return PARTITIONS[name](**fields)


def _cut(order: Owners, sizes: NDArray[np.int64]) -> Owners:
    """The first `sizes[0]` of the order belong to 0, the next `sizes[1]` to 1, and so on."""
    owner = np.empty(len(order), dtype=np.int64)
    owner[order] = np.repeat(np.arange(len(sizes)), sizes)
    return owner


def _equal(total: int, parts: int) -> NDArray[np.int64]:
    """Sizes that differ by at most one, the larger first."""
    return total // parts + (np.arange(parts) < total % parts).astype(np.int64)


def _proportional(shares: NDArray[np.float64], total: Any) -> NDArray[np.int64]:
    """Whole numbers in proportion to the shares along the last axis: rounding the running sum keeps the total exact."""
    cuts = np.rint(np.cumsum(shares, axis=-1) * total).astype(np.int64)
    cuts[..., -1:] = total
    sizes: NDArray[np.int64] = np.diff(np.minimum(cuts, total), axis=-1, prepend=0)
    return sizes


def _below(key: int, bounds: NDArray[np.int64]) -> NDArray[np.int64]:
    """A uniform whole number from 0 to below each bound."""
    return (keys.hashes(key, len(bounds)) * bounds) >> 32
