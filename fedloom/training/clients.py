"""Some clients' data, where it lives, for one call of the server: what an algorithm's client half is given."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedloom import keys
from fedloom.data.federation import Federation
from fedloom.data.split import SplitName


@dataclass(frozen=True)
class Setup:
    """How clients are computed: facts fixed before the first round and recorded with the run, never timings."""

    group: int = 1  # clients trained side by side as lanes of one vmapped step; 1 means plain steps
    replay: bool = False  # training steps are recorded and replayed, where that gives the same as doing them
    micro_batch: int = 256  # most rows in one pass of a full batch, where batches may be cut
    evaluation_batch: int = 1000  # most rows in one pass of an evaluation
    device: str = "cpu"
    masked: bool = False  # the model has dropout or batch normalisation, which must see keys and masks
    drops_evaluating: bool = False  # its dropout is also active in evaluation, where it must see a key
    normalises_features: bool = False  # it has batch normalisation over single values, which a lone example breaks
    loss_is_mean: bool = False  # the loss of a batch is the mean of its examples' losses
    cuts_batches: bool = False  # a training batch computed in parts gives the same as in one pass
    rows_apart: bool = False  # in evaluation, what the model says of an example does not depend on the others


@dataclass(frozen=True)
class Clients:
    """The clients of one call that are computed together; tensors that belong to them have them as first dimension."""

    federation: Federation
    ids: tuple[int, ...]
    seed: int = 0
    round: int = 0
    call: int = 0
    setup: Setup = Setup()
    watch_epochs: bool = False  # evaluate the validation split after every local epoch

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[Clients]:
        """The same clients one by one."""
        return (replace(self, ids=(client,)) for client in self.ids)

    @property
    def examples(self) -> Tensor:
        """How many training examples each client has."""
        return torch.from_numpy(self.federation.counts(self.ids, "train"))

    def rows(self, position: int, split: SplitName) -> Tensor:
        """Where the examples of one client and split are in the federation's tensors."""
        return self.federation.indices(self.ids[position], split)

    def name(self, position: int) -> str:
        return self.federation.name(self.ids[position])

    def key(self, position: int, purpose: str, *parts: int) -> int:
        """A key that belongs to this client in this call of this round."""
        return keys.key(self.seed, purpose, self.round, self.call, self.ids[position], *parts)
