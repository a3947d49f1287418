"""Scale features to mean 0 and standard deviation 1, with statistics of the training splits only.

Statistics are per position of the features: for images that is one pixel of one channel, not a channel. Missing values
(NaN) do not count for the statistics and become 0, which is then the mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedloom.data.federation import Federation
from fedloom.data.preprocessing import MOST_STATISTICS, Numbers, Preprocessing
from fedloom.errors import InputError, nearest

NORMALIZE = ("none", "client", "federated")
EVERYBODY = "all clients'"  # training examples
ROWS = 512  # examples converted to float64 at a time: this fits the CPU's cache and is ten times as fast as 8192


@dataclass(frozen=True)
class Statistics:
    """Mean and population standard deviation of every feature, in float64."""

    mean: Tensor
    std: Tensor
    missing: bool = field(default=False, repr=False)

    def apply(self, x: Tensor, scale: float) -> Tensor:
        """Return normalised features in float32."""
        result = torch.empty(x.shape, dtype=torch.float32)
        for start in range(0, len(x), ROWS):
            result[start : start + ROWS] = (x[start : start + ROWS].double() * scale - self.mean) / self.std
        return result.nan_to_num_(nan=0.0) if self.missing else result

    def leave(self, places: Sequence[int]) -> Statistics:
        """Return statistics that leave the features at these places as they are."""
        if not places:
            return self
        here = torch.zeros(self.mean.shape, dtype=torch.bool)
        here[list(places)] = True
        return replace(self, mean=self.mean.masked_fill(here, 0.0), std=self.std.masked_fill(here, 1.0))

    def numbers(self) -> tuple[Numbers, Numbers]:
        """Return mean and standard deviation as plain numbers, for a file."""
        return tuple(self.mean.flatten().tolist()), tuple(self.std.flatten().tolist())


@dataclass(frozen=True)
class Moments:
    """How often every feature is known in some rows, with mean and population variance of what is known."""

    count: Tensor
    mean: Tensor
    variance: Tensor

    def statistics(self, missing: bool = False) -> Statistics:
        """Return what normalises by these moments."""
        std = torch.where(self.variance > 0, self.variance.sqrt(), 1.0)
        return Statistics(self.mean, torch.where(self.count > 0, std, torch.inf), missing)


def statistics(x: Tensor, rows: Tensor, scale: float = 1.0, missing: bool = False) -> Statistics:
    """Return the statistics of some rows. A feature that never varies is only centred: its standard deviation is 1.

    A feature that is missing in all rows gets an infinite standard deviation, so that all its values become 0.

    >>> statistics(torch.tensor([[1.0, 5.0], [3.0, 5.0], [9.0, 9.0]]), torch.tensor([0, 1]))
    Statistics(mean=tensor([2., 5.], dtype=torch.float64), std=tensor([1., 1.], dtype=torch.float64))
    """
    return moments(x, rows, scale, missing).statistics(missing)


def moments(x: Tensor, rows: Tensor, scale: float = 1.0, missing: bool = False) -> Moments:
    """Return the moments of some rows. The variance of a feature that never varies is exactly 0."""
    zeros = torch.zeros(x.shape[1:], dtype=torch.float64)
    first = _first(x, rows, missing) * scale
    total, squares, varies = zeros.clone(), zeros.clone(), zeros.bool()
    seen = (~x[rows].isnan()).sum(dim=0) if missing else torch.tensor(len(rows))  # values that are not missing
    blocks = [rows[start : start + ROWS] for start in range(0, len(rows), ROWS)]

    def known(values: Tensor) -> Tensor:
        return values.nan_to_num_(nan=0.0) if missing else values

    for block in blocks:
        # relative to the first row, so that a constant feature is exactly 0 and large offsets lose no digits
        total += known(x[block].double() * scale - first).sum(dim=0)
    mean = total / seen.clamp(min=1)
    for block in blocks:
        difference = x[block].double() * scale - first
        squares += known(difference - mean).square().sum(dim=0)
        varies |= (known(difference) != 0).any(dim=0)
    return Moments(seen.expand(zeros.shape), mean + first, torch.where(varies, squares / seen.clamp(min=1), 0.0))


def _first(x: Tensor, rows: Tensor, missing: bool) -> Tensor:
    """Return the first value of every feature that is not missing."""
    if not missing:
        return x[rows[0]].double()
    values = x[rows].double()
    places = (~values.isnan()).int().argmax(dim=0, keepdim=True)
    return values.gather(0, places)[0].nan_to_num_(nan=0.0)


def normalized(
    federation: Federation, by: str, missing: bool = False, agreed: Preprocessing | None = None
) -> Federation:
    """Normalise each client by its own statistics (`client`), or clients and server by those of all (`federated`).

    The statistics of all may be those that several sites `agreed` on.
    """
    x, untouched = federation.x, federation.preprocessing.untouched
    scale = 1.0 if x.is_floating_point() else federation.scale
    train = [federation.indices(client, "train") for client in range(federation.clients)]
    if by == "federated":
        # a server would learn the same from n, Σx and Σx² of each client
        known = None if agreed is None else agreed.statistics()
        everybody = statistics(x, torch.cat(train), scale, missing) if known is None else Statistics(*known, missing)
        everybody = everybody.leave(untouched)
        server = {name: (everybody.apply(data, scale), y) for name, (data, y) in federation.server.items()}
        mean, std = everybody.numbers()
        result = everybody.apply(x, scale)
        reach = None if agreed else _reach(federation, result, train)
        bounds = {} if agreed is None else agreed.bounds
        fitted = federation.preprocessing.replace(mean=mean, std=std, reach=reach, bounds=bounds)
        whose = federation.scaled_by if agreed else EVERYBODY
        return replace(federation, x=result, server=server, scale=1.0, preprocessing=fitted, scaled_by=whose)
    result = torch.empty(x.shape, dtype=torch.float32)
    few = 2 * federation.clients * x[0].numel() <= MOST_STATISTICS
    by_client: dict[str, tuple[Numbers, Numbers]] = {}
    for client, rows in enumerate(train):
        start, end = int(federation.offsets[client]), int(federation.offsets[client + 1])
        own = statistics(x, rows, scale, missing).leave(untouched)
        result[start:end] = own.apply(x[start:end], scale)
        if few:
            by_client[federation.name(client)] = own.numbers()
    fitted = federation.preprocessing.replace(clients=by_client, reach=_reach(federation, result, train))
    whose = federation.scaled_by or "its client's"
    return replace(federation, x=result, scale=1.0, preprocessing=fitted, scaled_by=whose)


def check_normalize(value: object) -> None:
    """Raise `InputError` unless features can be normalised like this: by a known name, or by bounds of features."""
    if not isinstance(value, Mapping) or not value:
        if value not in NORMALIZE:
            raise InputError(
                "[data] normalize must be 'none', 'client' or 'federated', or bounds of features such as "
                f"{{ age = [0, 100] }}. Got {value!r} instead.{nearest(str(value), NORMALIZE)}"
            )
        return
    for name, limits in value.items():
        try:
            low, high = (float(limit) for limit in limits)
        except (TypeError, ValueError):
            low = high = math.nan
        if not -math.inf < low < high < math.inf:
            raise InputError(
                f"[data] normalize: the bounds of {name} must be two numbers, the lower one first, such as [0, 100]. "
                f"Got {limits!r} instead."
            )


def between(bounds: Mapping[str, Sequence[float]], federation: Federation) -> Preprocessing:
    """Return what scales features from their bounds to −1 and 1, whatever the examples are.

    Other features stay as they are. A missing value becomes the middle of its bounds, or else 0.
    """
    names = federation.features
    if not names:
        raise InputError("[data] normalize has bounds of named features, and the features of this data have no names.")
    middle, half = torch.zeros(len(names), dtype=torch.float64), torch.ones(len(names), dtype=torch.float64)
    for name, (low, high) in bounds.items():
        if name not in names:
            known = f"Known: {', '.join(names[:10])}{', …' if len(names) > 10 else ''}."
            raise InputError(f"[data] normalize: there is no feature '{name}'. {known}{nearest(name, names)}")
        middle[names.index(name)], half[names.index(name)] = (low + high) / 2, (high - low) / 2
    given = {name: (float(low), float(high)) for name, (low, high) in bounds.items()}
    numbers = {"mean": tuple(middle.tolist()), "std": tuple(half.tolist())}
    fitted: Preprocessing = federation.preprocessing.replace(bounds=given, **numbers)
    return fitted


def _reach(federation: Federation, scaled: Tensor, train: Sequence[Tensor]) -> tuple[Numbers, Numbers] | None:
    """Return the whole numbers around the scaled training values of each feature of a table."""
    if not federation.preprocessing.columns:
        return None
    known = scaled[torch.cat(list(train))]
    return tuple(known.amin(0).floor().tolist()), tuple(known.amax(0).ceil().tolist())


def scaled_target(federation: Federation, agreed: Preprocessing | None = None) -> Federation:
    """Scale numeric labels to mean 0 and standard deviation 1, by all training labels, or as several sites agreed."""
    if federation.classes or federation.y.dim() > 1:
        what = f"{len(federation.classes):,} classes" if federation.classes else "several numbers for each example"
        raise InputError(
            f"scale_target is for labels that are one number, and these are {what}. Leave it out, or use a loss for "
            'numbers, such as "mse".'
        )
    rows = torch.cat([federation.indices(client, "train") for client in range(federation.clients)])
    found = statistics(federation.y[:, None], rows)
    if agreed is not None and agreed.target is not None:
        mean, std = (torch.tensor([value], dtype=torch.float64) for value in agreed.target)
        found = Statistics(mean, std)
    server = {name: (x, found.apply(y[:, None], 1.0)[:, 0]) for name, (x, y) in federation.server.items()}
    fitted = federation.preprocessing.replace(target=(found.mean.item(), found.std.item()))
    y = found.apply(federation.y[:, None], 1.0)[:, 0]
    whose = federation.scaled_by if agreed is not None and agreed.target is not None else EVERYBODY
    return replace(federation, y=y, server=server, preprocessing=fitted, scaled_by=whose)
