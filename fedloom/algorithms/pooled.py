"""Not federated: the baseline that tells what federation costs."""

from __future__ import annotations

from typing import ClassVar

from pydantic import model_validator

from fedloom.algorithms.fedavg import FedAvg


class Pooled(FedAvg):
    """One model on the union of all clients' training splits, for rounds × epochs, with one optimiser throughout."""

    pooled: ClassVar[bool] = True

    @model_validator(mode="after")
    def _one_optimizer(self) -> Pooled:
        if self.train.optimizer_state == "reset":
            object.__setattr__(self, "train", self.train.replace(optimizer_state="keep"))
        return self
