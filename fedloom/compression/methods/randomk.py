"""Random-k: a random choice of a change's numbers (Konečný et al., 2016; Stich et al., NeurIPS 2018)."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom import keys
from fedloom.compression.method import (
    Draws,
    Form,
    Fraction,
    Method,
    as_leaf,
    form_of,
    kept,
    numbers,
    precision,
    real,
    take,
)
from fedloom.compression.random_bits import words
from fedloom.tree import Tree


class RandomK(Method):
    """Sends one number, drawn at random, of every run of 1/keep numbers of a leaf.

    Both sides draw the same places, so only the numbers are sent. Without error feedback, each number stands for its
    whole run: it is multiplied by the run's length, and the change is right on average.
    """

    name: ClassVar[str] = "randomk"

    keep: Fraction = 0.01
    """The share of numbers that is sent."""
    error_feedback: bool = True
    """Add what was not sent to the client's next change."""
    mask: Literal["client", "round"] = "client"
    """Whether each client draws its own places, or all clients of a round the same ones."""

    @property
    def scatters(self) -> bool:
        return self.mask == "client"

    @property
    def commutes(self) -> bool:
        return self.mask == "round"

    def pack(self, change: Tree, draws: Draws, memory: Tree) -> tuple[Tree, Tree]:
        kind = precision(form_of(change))
        return {"values": torch.cat([self.project(leaf, name, draws).to(kind) for name, leaf in change.items()])}, {}

    def unpack(self, parts: Tree, form: Form, draws: Draws) -> Tree:
        counts = [kept(self.keep, numbers(shape, kind)) for shape, kind in form.values()]
        (values,) = take(parts, values=(precision(form), sum(counts)))
        sent = torch.split(values, counts)
        return {name: self.expand(part, name, one, draws) for part, (name, one) in zip(sent, form.items(), strict=True)}

    def project(self, leaf: Tensor, name: str, draws: Draws) -> Tensor:
        """Return the numbers of a leaf that are sent."""
        values = real(leaf).reshape(-1)
        return values[torch.from_numpy(self._places(len(values), name, draws)[0])]

    def expand(self, sent: Tensor, name: str, form: tuple[tuple[int, ...], torch.dtype], draws: Draws) -> Tensor:
        """Return the leaf that the numbers stand for."""
        shape, kind = form
        places, runs = self._places(numbers(shape, kind), name, draws)
        values = sent if self.error_feedback else sent * torch.from_numpy(runs).to(sent.dtype)
        found = torch.zeros(numbers(shape, kind), dtype=sent.dtype)
        found[torch.from_numpy(places)] = values
        return as_leaf(found, shape, kind)

    def _places(self, count: int, name: str, draws: Draws) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return one place of every run of numbers, and the lengths of the runs."""
        sent = kept(self.keep, count)
        edges = np.arange(sent + 1) * count // max(sent, 1)
        runs = np.diff(edges)
        drawn = words(keys.key(draws.common if self.mask == "round" else draws.own, name), sent)
        return edges[:-1] + drawn.astype(np.int64) % runs, runs
