"""An agent's data, under the numbers that its clients have in the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedloom.data.federation import Federation
from fedloom.data.split import SplitName


@dataclass(frozen=True, eq=False)
class HostedClients(Federation):
    """A site's own federation whose clients have other numbers in the run."""

    inner: Federation = field(kw_only=True)
    local: Mapping[int, int] = field(kw_only=True)  # number in the run → number at the site
    population: int = field(kw_only=True)

    @staticmethod
    def of(inner: Federation, local: Mapping[int, int], population: int) -> HostedClients:
        same = {one.name: getattr(inner, one.name) for one in fields(Federation) if one.name != "server"}
        return HostedClients(**same, inner=inner, local=dict(local), population=population)

    @property
    def clients(self) -> int:
        return self.population

    def name(self, client: int) -> str:
        return self.inner.name(self.local[client])

    def counts(self, clients: Sequence[int], split: SplitName) -> NDArray[np.int64]:
        return self.inner.counts([self.local[client] for client in clients], split)

    def indices(self, client: int, split: SplitName) -> Tensor:
        return self.inner.indices(self.local[client], split)
