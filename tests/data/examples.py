"""Tiny datasets for the tests of building and checking."""

from __future__ import annotations

from typing import Any

import torch

from fedloom.data.federation import Dataset


def numbered(count: int = 20, classes: int = 2, **more: Any) -> Dataset:
    """Examples whose only feature is their place in the source."""
    x = torch.arange(count, dtype=torch.float32).reshape(-1, 1)
    return Dataset(x, torch.arange(count) % classes, classes=tuple("abcdefgh"[:classes]), **more)
