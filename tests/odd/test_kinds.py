"""Numbers keep their kind, and what is frozen stays as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fedloom as fl
from fedloom.federation.engine import fit
from fedloom.task import Task
from tests.odd.harness import federation
from tests.odd.nets.gradients import HasFrozenParameters
from tests.odd.nets.shapes import HasABfloat16Part, HasADoublePart, HasComplexWeights


@pytest.mark.parametrize(
    ("model", "leaf", "kind"),
    [
        (HasComplexWeights, "turn", torch.complex64),
        (HasADoublePart, "fine.weight", torch.float64),
        (HasABfloat16Part, "coarse.weight", torch.bfloat16),
    ],
)
def test_a_parameter_keeps_the_kind_that_its_model_gave_it(model: Any, leaf: str, kind: torch.dtype) -> None:
    task = Task(model)
    begin = task.initial()
    (record,) = fit(federation("features"), task, fl.FedAvg(lr=0.1, batch_size=4), 1)
    kinds = {name: value.dtype for name, value in begin.items()}
    assert kinds[leaf] == kind
    assert {name: value.dtype for name, value in record.state["model"].items()} == kinds
    assert not torch.equal(record.state["model"][leaf], begin[leaf])


@pytest.mark.parametrize("algorithm", [fl.FedAvg, fl.Peer, fl.FedProx, fl.Scaffold, fl.FedAdam])
def test_a_frozen_parameter_is_neither_sent_nor_kept(algorithm: Any) -> None:
    task = Task(HasFrozenParameters)
    records = list(fit(federation("features"), task, algorithm(lr=0.1, weight_decay=0.1), 3))
    models = [record.state["model"] for record in records if "model" in record.state]
    models += [own["model"] for record in records for own in record.own.values() if "model" in own]
    assert {tuple(model) for model in models} == {("out.weight", "out.bias")}
    assert {tuple(task.whole(model)) for model in models} == {("first.weight", "first.bias", "out.weight", "out.bias")}
