"""Weights that are sent as if they were changes are found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fedloom.aggregation.positions import undeclared
from fedloom.algorithm import Clients, Groups, Task, Update
from fedloom.algorithms import FedAvg
from fedloom.compression.table import CompressTable
from fedloom.errors import TrainingError
from fedloom.federation.engine import fit
from fedloom.federation.sampling import Sampling
from fedloom.privacy.protection import Protection
from fedloom.privacy.table import DpTable, PrivacyTable
from tests.conftest import Dense, federation

W = torch.tensor([[1.0, -2.0], [0.5, 3.0]])


class Undeclared(FedAvg):
    """FedAvg whose clients do not say where their weights started."""

    def client(self, task: Task, shared: Groups, own: Groups, data: Clients) -> tuple[Update, Groups]:
        update, own = super().client(task, shared, own, data)
        return replace(update, positions={}), own


def run(algorithm: FedAvg, sampling: Sampling = Sampling(), dp: bool = False, **settings: Any) -> None:
    data = federation((12, 9, 7, 11, 8))
    if dp:
        table = PrivacyTable(dp=DpTable(noise_multiplier=1.0, clip=1.0))
        settings["protection"] = Protection(table, sampling, data.clients, 1)
    for _ in fit(data, Task(Dense), algorithm, 1, sampling=sampling, **settings):
        pass


@pytest.mark.parametrize(
    ("sent", "found"),
    [
        ({"w": W + 0.1}, True),
        ({"w": 0.1 * W}, False),  # a change along the weights
        ({"w": -W}, False),
        ({"w": torch.zeros(2, 2)}, False),
        ({"other": W}, False),
        ({"w": W[:1]}, False),
        ({"w": torch.full((2, 2), torch.nan)}, False),
        ({}, False),
    ],
)
def test_an_answer_near_what_was_shared_is_a_position(sent: dict[str, torch.Tensor], found: bool) -> None:
    stacked = {name: torch.stack([leaf, leaf]) for name, leaf in sent.items()}
    shared = {"other": {"x": W}, "model": {"w": W, "count": torch.tensor(3)}}
    assert undeclared({"sent": stacked}, {}, shared) == ({"sent": "model"} if found else {})
    assert undeclared({"sent": stacked}, {"sent": "model"}, shared) == {}


def test_a_change_may_lie_near_another_change_that_was_shared() -> None:
    shared = {"model": {"w": W}, "control": {"w": W.flip(0)}}
    sent = {"model": {"w": W[None]}, "control": {"w": W.flip(0)[None]}}
    assert undeclared(sent, {"model": "model"}, shared) == {}
    assert undeclared({**sent, "more": {"w": W[None]}}, {"model": "model"}, shared) == {"more": "model"}
    assert undeclared(sent, {}, shared) == {"model": "model", "control": "control"}


def test_weights_that_start_from_zero_are_like_changes() -> None:
    zero = {"model": {"w": torch.zeros(2)}}
    assert undeclared({"model": {"w": torch.zeros(3, 2)}}, {}, zero) == {}


MESSAGE = r"needs changes\. Clients send 'model', which lies near .* give positions=\{\"model\": \"model\"\}"


def test_what_judges_changes_refuses_weights_that_are_not_declared() -> None:
    run(Undeclared(lr=0.1))  # a mean needs no declaration
    with pytest.raises(TrainingError, match=f"cohort.outlier_factor {MESSAGE}"):
        run(Undeclared(lr=0.1), Sampling(outlier_factor=3.0))
    with pytest.raises(TrainingError, match=f"A robust rule {MESSAGE}"):
        run(Undeclared(lr=0.1, rule="norm_bounding"))
    with pytest.raises(TrainingError, match=rf"\[compress\] up {MESSAGE}"):
        run(Undeclared(lr=0.1), compress=CompressTable(up={"name": "topk", "keep": 0.5}))
    with pytest.raises(TrainingError, match=rf"\[privacy\] dp {MESSAGE}"):
        run(Undeclared(lr=0.1, weights="uniform"), dp=True)
    run(Undeclared(lr=0.1), compress=CompressTable(up="lossless"))
    run(FedAvg(lr=0.1, rule="norm_bounding"), Sampling(outlier_factor=3.0))
