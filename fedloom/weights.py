"""How much each client counts: pure functions that make a row of weights."""

from __future__ import annotations

import torch
from torch import Tensor


def by_examples(examples: Tensor) -> Tensor:
    """In proportion to the number of training examples (McMahan et al. 2017)."""
    return examples.to(torch.float64)


def uniform(examples: Tensor) -> Tensor:
    """Every client the same."""
    return torch.ones(len(examples), dtype=torch.float64)
