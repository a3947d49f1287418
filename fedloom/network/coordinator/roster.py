"""All clients of a run as the coordinator knows them, without a single example."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom.data.federation import Federation
from fedloom.data.split import SPLITS, SplitName


@dataclass(frozen=True, eq=False)
class Roster(Federation):
    """The clients' names and how many examples each has in each split."""

    held: Mapping[SplitName, NDArray[np.int64]] = field(kw_only=True)
    marks: tuple[str, ...] = field(kw_only=True)  # one for each agent: shows whether its data changed

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
