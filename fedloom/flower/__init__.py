"""Run fedloom on Flower: the engine as a ServerApp, the client half as a ClientApp, algorithms as strategies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from fedloom.algorithm import Algorithm
    from fedloom.flower.strategies import Strategy
    from fedloom.task import Task


def strategy(algorithm: Algorithm, model: nn.Module | Task | None = None, **settings: Any) -> Strategy:
    """Return an algorithm's server half as a Flower strategy, for your own ClientApps.

    See `fedloom.flower.strategies.Strategy` for the settings.
    """
    from fedloom.flower.strategies import Strategy

    return Strategy(algorithm, model, **settings)
