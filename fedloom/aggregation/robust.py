"""Robust rules: aggregation that tolerates some wrong clients. A rule makes one change from the clients' changes.

Write `rule = "median"` or `rule = { name = "krum", byzantine = 1 }` in the table of any central algorithm. The server
then sees each client's change, so robust rules do not work with secure aggregation.

A change that is not finite (with a NaN or an infinity anywhere) is certainly wrong, so it is left out before the rule
sees the others. It counts as one of the wrong clients that the rule tolerates. If there are more, the round is
abandoned.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge
from pydantic import SerializeAsAny, Strict
from torch import Tensor

from fedloom.aggregation import means
from fedloom.errors import InputError, ParameterError, RoundAbandoned, unknown
from fedloom.record import Count, Positive, Record
from fedloom.tree import Tree, flatten, row, rows, unflatten


class Robust(Record):
    """Base of robust rules. A rule works on one long vector per client; counters are averaged."""

    name: ClassVar[str] = ""

    def __call__(self, stacked: Tree, weights: Tensor, gone: int = 0) -> Tree:
        """Combine the clients' changes into one; `gone` clients of this round were already found to be wrong."""
        sound = finite(stacked) & weights.isfinite()
        gone += int((~sound).sum())
        clients = int(sound.sum()) + gone
        self.check(clients)
        if gone > self.tolerates(clients):
            raise RoundAbandoned(
                f"The updates of {gone} of {clients} clients are not finite, and the rule {self.name} tolerates "
                f"{self.tolerates(clients)}."
            )
        if any(leaf.is_complex() for leaf in stacked.values()):
            raise InputError(f"The model has complex parameters, and the rule {self.name} compares real ones.")
        stacked, weights = rows(stacked, sound), weights[sound]
        floating = {name: leaf for name, leaf in stacked.items() if leaf.is_floating_point()}
        counters = {name: leaf for name, leaf in stacked.items() if name not in floating}
        if not floating:
            return means.mean(counters, weights)
        flat = flatten(floating)
        found = self.combine(flat, weights.to(flat.dtype), gone)
        result = row(unflatten(found.unsqueeze(0), row(floating, 0)), 0)
        return {**result, **(means.mean(counters, weights) if counters else {})}

    def check(self, clients: int) -> None:
        """Raise an error if the rule cannot work with this number of clients."""

    def tolerates(self, clients: int) -> int:
        """Return how many of the clients may be wrong: fewer than half, unless the rule has a parameter for it.

        Clipping and bounding guarantee no number: they bound what each wrong client can do.
        """
        return (clients - 1) // 2

    def combine(self, changes: Tensor, weights: Tensor, gone: int = 0) -> Tensor:
        """Make one vector from one row per client; `gone` wrong clients are already left out."""
        raise NotImplementedError(f"{type(self).__name__} is abstract")

    def _need(self, clients: int, least: int, why: str) -> None:
        """Raise an error if there are fewer than `least` clients."""
        if clients < least:
            raise InputError(
                f"The rule {self.name} needs at least {least} clients a round ({why}). Got {clients} instead."
            )


class Median(Robust):
    """Takes the median of every coordinate; fewer than half of the clients may be wrong (Yin et al. 2018)."""

    name: ClassVar[str] = "median"

    def combine(self, changes: Tensor, weights: Tensor, gone: int = 0) -> Tensor:
        return changes.quantile(0.5, dim=0) if len(changes) % 2 == 0 else changes.median(dim=0).values


class TrimmedMean(Robust):
    """Takes the mean of every coordinate without its `trim` largest and smallest values (Yin et al. 2018)."""

    name: ClassVar[str] = "trimmed_mean"
    trim: Annotated[int, Strict(), Ge(0)] = 1
    """How many of the largest and of the smallest values to leave out, for each coordinate."""

    def check(self, clients: int) -> None:
        self._need(clients, 2 * self.trim + 1, f"trim = {self.trim} at each end")

    def tolerates(self, clients: int) -> int:
        return self.trim

    def combine(self, changes: Tensor, weights: Tensor, gone: int = 0) -> Tensor:
        trim = self.trim - gone
        return changes.sort(dim=0).values[trim : len(changes) - trim].mean(dim=0)


class Krum(Robust):
    """Takes the one change that is nearest to its neighbours (Blanchard et al. 2017)."""

    name: ClassVar[str] = "krum"
    factor: ClassVar[int] = 2  # the rule needs this many clients for each wrong one, and three more
    byzantine: Count = 1
    """How many clients may be wrong."""

    def check(self, clients: int) -> None:
        least = self.factor * self.byzantine + 3
        self._need(clients, least, f"{self.factor}f + 3 for f = {self.byzantine} wrong ones")

    def tolerates(self, clients: int) -> int:
        return self.byzantine

    def combine(self, changes: Tensor, weights: Tensor, gone: int = 0) -> Tensor:
        return changes[int(krum_scores(distances(changes), self.byzantine - gone).argmin())]


class MultiKrum(Krum):
    """Takes the mean of the `keep` changes that are nearest to their neighbours (Blanchard et al. 2017)."""

    name: ClassVar[str] = "multi_krum"
    keep: Count | None = None
    """How many changes to average. By default, all clients minus `byzantine`."""

    def check(self, clients: int) -> None:
        super().check(clients)
        self._need(clients, self.keep or 0, f"keep = {self.keep}")

    def combine(self, changes: Tensor, weights: Tensor, gone: int = 0) -> Tensor:
        byzantine = self.byzantine - gone
        keep = len(changes) - byzantine if self.keep is None else self.keep
        best = krum_scores(distances(changes), byzantine).argsort(stable=True)[:keep]
        return changes[best.sort().values].mean(dim=0)


class Bulyan(Krum):
    """Chooses changes by Krum, then averages the values around each coordinate's median (El Mhamdi et al. 2018)."""

    name: ClassVar[str] = "bulyan"
    factor: ClassVar[int] = 4

    def combine(self, changes: Tensor, weights: Tensor, gone: int = 0) -> Tensor:
        all_distances, byzantine = distances(changes), self.byzantine - gone
        left = list(range(len(changes)))
        chosen: list[int] = []
        for _ in range(len(changes) - 2 * byzantine):
            scores = krum_scores(all_distances[left][:, left], byzantine)
            chosen.append(left.pop(int(scores.argmin())))
        selected = changes[sorted(chosen)]
        median = Median().combine(selected, weights)
        keep = len(chosen) - 2 * byzantine
        nearest_values = (selected - median).abs().argsort(dim=0, stable=True)[:keep]
        return selected.gather(0, nearest_values).mean(dim=0)


class GeometricMedian(Robust):
    """Finds the point with the smallest weighted sum of distances to all changes (Pillutla et al. 2022)."""

    name: ClassVar[str] = "geometric_median"
    iterations: Count = 100
    """The largest number of steps of Weiszfeld's algorithm."""
    tolerance: Positive = 1e-6
    """Stop when the relative change of a step is below this."""

    def combine(self, changes: Tensor, weights: Tensor, gone: int = 0) -> Tensor:
        shares = weights / weights.sum()
        point = Median().combine(changes, weights)  # not the mean, which one distant change can move anywhere
        for _ in range(self.iterations):
            # bounded from below, because the point may be one of the changes
            pull = shares / (changes - point).norm(dim=1).clamp(min=self.tolerance)
            moved = (pull / pull.sum()) @ changes
            done = bool((moved - point).norm() <= self.tolerance * (1 + point.norm()))
            point = moved
            if done:
                break
        return point


class CentredClipping(Robust):
    """Averages changes clipped around the last mean, repeatedly (Karimireddy et al. 2021)."""

    name: ClassVar[str] = "centred_clipping"
    radius: Positive = 1.0
    """Changes are clipped to this distance from the last mean."""
    iterations: Count = 3
    """How many times to clip and average."""

    def combine(self, changes: Tensor, weights: Tensor, gone: int = 0) -> Tensor:
        centre = torch.zeros_like(changes[0])  # all clients count the same, because attackers can lie about weights
        for _ in range(self.iterations):
            offset = changes - centre
            centre = centre + (offset * shrink(offset, self.radius)).mean(dim=0)
        return centre


class NormBounding(Robust):
    """Averages changes after scaling long ones down to the norm `bound` (Sun et al. 2019)."""

    name: ClassVar[str] = "norm_bounding"
    bound: Positive = 1.0
    """The largest norm of a change. A longer change is scaled down to it."""

    def combine(self, changes: Tensor, weights: Tensor, gone: int = 0) -> Tensor:
        return (weights / weights.sum()) @ (changes * shrink(changes, self.bound))


def judge(
    rule: Any, stacked: Tree, weights: Tensor, sound: Tensor, gone: int, base: Tree | None, judge_all: bool = False
) -> Tree:
    """Apply a rule to one group of changes, and add the result to the base that they started from, if there is one.

    `sound` says which clients are finite; `gone` wrong clients left the round earlier. A client without weight in this
    group is not judged in it, unless `judge_all` is true. A group of a single number has no direction to judge, so its
    median is taken.
    """
    present = (weights != 0) | judge_all
    numbers = sum(leaf[0].numel() for leaf in stacked.values())
    if numbers == 0 or not bool(present.any()):
        return base or {}
    here = present & sound
    gone += int((present & ~sound).sum())
    judged: Tree = (rule if numbers > 1 else Median())(rows(stacked, here), weights[here], gone)
    return {
        name: (judged[name] if base is None else base[name] + judged[name]).to(leaf.dtype)
        for name, leaf in stacked.items()
    }


def finite(stacked: Tree) -> Tensor:
    """Return for each client whether all its numbers are finite."""
    found = [leaf.isfinite().flatten(1).all(1) if leaf.dim() > 1 else leaf.isfinite() for leaf in stacked.values()]
    return torch.stack(found).all(0)


def shrink(changes: Tensor, longest: float) -> Tensor:
    """Return a factor for each row that scales it down to at most this length."""
    lengths: Tensor = torch.linalg.vector_norm(changes, dim=1, keepdim=True).clamp(min=1e-30)
    return (longest / lengths).clamp(max=1.0)


def distances(changes: Tensor) -> Tensor:
    """Return squared distances between all rows, from their differences, which are exact for close rows."""
    return torch.stack([(changes - one).square().sum(dim=1) for one in changes])


def krum_scores(squared: Tensor, byzantine: int) -> Tensor:
    """Return for each row the sum of its n − f − 2 smallest distances to others."""
    others = squared + torch.diag(torch.full((len(squared),), torch.inf, dtype=squared.dtype))
    return others.sort(dim=1).values[:, : max(len(squared) - byzantine - 2, 1)].sum(dim=1)


RULES: dict[str, type[Robust]] = {
    kind.name: kind
    for kind in (Median, TrimmedMean, Krum, MultiKrum, Bulyan, GeometricMedian, CentredClipping, NormBounding)
}

AnyRule = SerializeAsAny[Robust]


def robust(value: Any) -> Any:
    """Make a rule from its name, or from a table with its name and fields."""
    if value is None or isinstance(value, Robust):
        return value
    fields = {"name": value} if isinstance(value, str) else dict(value) if isinstance(value, Mapping) else {}
    name = fields.pop("name", None)
    if not isinstance(name, str):
        raise InputError(f'A rule is a name, such as "median", or a table with a name. Got {value!r} instead.')
    if name not in RULES:
        raise unknown("rule", name, RULES)
    try:
        return RULES[name](**fields)
    except ParameterError as error:
        raise InputError(str(error)) from None
