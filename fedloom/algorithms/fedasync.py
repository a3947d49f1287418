"""FedAsync."""

from __future__ import annotations

from typing import Annotated, ClassVar

from annotated_types import Gt, Le
from pydantic import Strict

from fedloom.algorithm import Cohort, Groups, map_leaves, select
from fedloom.algorithms.fedprox import FedProx


class FedAsync(FedProx):
    """The server mixes in the weights of the next answer.

    w ← (1 − α_t) w + α_t w_k with α_t = α s(τ), where client k started τ rounds ago and trained with a pull towards its
    start (mu). Use it with `[cohort] mode = "async"` and `buffer = 1`; with a larger buffer, w_k is the mean of its
    answers. In rounds that wait, s = 1.
    """

    mixes_weights: ClassVar[bool] = True
    reference: ClassVar[str] = "Xie et al., Asynchronous Federated Optimization, OPT 2020"

    alpha: Annotated[float, Strict(), Gt(0), Le(1)] = 0.6
    """How much the client's weights count, α."""

    def round(self, state: Groups, cohort: Cohort) -> Groups:
        found = self.average(cohort, state)
        rate = self.alpha * cohort.freshness
        before = select(state["model"], cohort.task.trainable)
        mixed = map_leaves(lambda w, k: (1 - rate) * w + rate * k, before, select(found, before))
        return {**state, "model": {**found, **mixed}}
