"""Federated gradient descent: one step a round on the mean of the clients' full gradients."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import model_validator

from fedloom.algorithm import (
    Central,
    Clients,
    Cohort,
    Groups,
    InputError,
    Task,
    Update,
    add,
    by_size,
    expand,
    local,
    select,
)


class FedSGD(Central):
    """Clients send the gradient over all their examples, the server takes the step: w ← w − lr · Σ n_k g_k / Σ n_k.

    Equal to FedAvg with one epoch of one full batch, and the baseline that FedAvg is measured against: of the training
    parameters only `lr` has a meaning here.
    """

    reference: ClassVar[str] = "McMahan et al., Communication-Efficient Learning of Deep Networks, AISTATS 2017"

    weights: Literal["examples", "uniform"] = "examples"
    """How much each client counts in the mean."""

    @model_validator(mode="after")
    def _plain_steps(self) -> FedSGD:
        for name in ("optimizer", "momentum", "weight_decay", "clip", "patience"):
            if getattr(self.train, name) != type(self.train).model_fields[name].default:
                raise InputError(
                    f"FedSGD takes one plain gradient step a round: '{name}' has no meaning for it. "
                    'Leave it out, or use fedavg with batch_size = "full".'
                )
        return self

    def round(self, state: Groups, cohort: Cohort) -> Groups:
        mean = cohort.reduce(self.client, state, rule=self.rule)
        stepped = add(select(state["model"], mean["gradient"]), mean["gradient"], scale=-self.train.lr)
        return {**state, "model": {**state["model"], **stepped, **mean["buffers"]}}

    def client(self, task: Task, shared: Groups, own: Groups, data: Clients) -> tuple[Update, Groups]:
        full = local.full_gradient(task, data, expand(shared["model"], len(data)))
        groups = {"gradient": full.gradient, "buffers": full.buffers}
        return Update(groups, by_size(self.weights, data.examples), positions={"buffers": "model"}), own
