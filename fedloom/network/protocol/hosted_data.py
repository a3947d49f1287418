"""The data of one agent under the run's numbers, and what the coordinator knows about the data that it never sees."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom.data.federation import Federation
from fedloom.data.split import SPLITS, SplitName


@dataclass(frozen=True, eq=False)
class Hosted(Federation):
    """An agent's own federation, whose clients have other numbers in the run."""

    inner: Federation = field(kw_only=True)
    local: Mapping[int, int] = field(kw_only=True)  # number in the run → number here
    population: int = field(kw_only=True)

    @staticmethod
    def of(inner: Federation, local: Mapping[int, int], population: int) -> Hosted:
        return Hosted(
            inner.x,
            inner.y,
            inner.offsets,
            inner.split,
            inner.seed,
            inner.names,
            inner.classes,
            inner.scale,
            features=inner.features,
            inner=inner,
            local=dict(local),
            population=population,
        )

    @property
    def clients(self) -> int:
        return self.population

    def name(self, client: int) -> str:
        return self.inner.name(self.local[client])

    def counts(self, clients: Sequence[int], split: SplitName) -> NDArray[np.int64]:
        return self.inner.counts([self.local[client] for client in clients], split)

    def indices(self, client: int, split: SplitName) -> Tensor:
        return self.inner.indices(self.local[client], split)


@dataclass(frozen=True, eq=False)
class Roster(Federation):
    """All clients of a run as the coordinator knows them: names and numbers of examples, but no example."""

    held: Mapping[SplitName, NDArray[np.int64]] = field(kw_only=True)
    marks: tuple[str, ...] = field(kw_only=True)  # one per agent: whether its data changed, not what it is

    @staticmethod
    def of(
        names: Sequence[str],
        sizes: Sequence[Mapping[str, int]],
        classes: Sequence[str],
        marks: Sequence[str],
        server: dict[str, tuple[Tensor, Tensor]] | None = None,
        scale: float = 1.0,
    ) -> Roster:
        held = {split: np.array([size[split] for size in sizes], dtype=np.int64) for split in SPLITS}
        totals = sum(held.values(), np.zeros(len(sizes), np.int64))
        return Roster(
            torch.empty(0),
            torch.empty(0),
            np.concatenate([[0], np.cumsum(totals)]),
            names=list(names),
            classes=tuple(classes),
            server=server or {},
            scale=scale,
            held=held,
            marks=tuple(marks),
        )

    def sizes(self, split: SplitName) -> NDArray[np.int64]:
        return self.held[split]

    def counts(self, clients: Sequence[int], split: SplitName) -> NDArray[np.int64]:
        return self.held[split][np.asarray(clients, dtype=np.int64)]

    @cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256("\n".join(self.marks).encode()).hexdigest()


def data_facts(federation: Federation) -> dict[str, Any]:
    """What must be the same at every site for one model to fit."""
    return {
        "features": list(federation.x.shape[1:]),
        "dtype": str(federation.x.dtype).removeprefix("torch."),
        "classes": list(federation.classes),
    }
