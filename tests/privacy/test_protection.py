"""What every protection refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedloom as fl
from fedloom.algorithm import Update
from fedloom.errors import InputError
from fedloom.federation.engine import fit
from fedloom.privacy.protection import ClientGuard, Protection, check_plan
from fedloom.privacy.secure.ring import Ring
from fedloom.privacy.table import DpTable, PrivacyTable, SecureTable
from fedloom.task import Task
from fedloom.tree import Groups
from tests.conftest import Dense
from tests.conftest import federation as some_clients

LOCAL = {"epsilon": 1.0, "clip": 1.0, "noise": "local"}


class Forgetful(fl.FedAvg):
    """The server sees each answer, and the class does not say linear = False."""

    def round(self, state: Groups, cohort: Any) -> Groups:
        return {"model": {name: leaf.mean(0) for name, leaf in cohort.map(self.client, state)["model"].items()}}


@pytest.mark.parametrize("algorithm", [fl.Selective(), fl.FedAvg(rule="median"), fl.EvaluationWeighted()])
def test_an_algorithm_that_shows_each_update_is_refused(algorithm: fl.Algorithm) -> None:
    table = PrivacyTable(secure_aggregation=SecureTable())
    protection = Protection(table, fl.Sampling(), 3, 1)
    with pytest.raises(InputError, match=r"the rule of \w+ judges each|update or score of each client"):
        next(fit(some_clients((12, 9, 7)), Task(Dense), algorithm, 1, protection=protection))


@pytest.mark.parametrize(
    ("table", "cohort", "algorithm", "words"),
    [
        ({"dp": {"epsilon": 1.0}}, {}, fl.FedAvg(), "bound on how much one client counts"),
        ({"dp": {"epsilon": 1.0}}, {"quorum": 0.5}, fl.FedAvg(weights="uniform"), "quorum"),
        (
            {"example_dp": {"epsilon": 1.0}},
            {},
            fl.IFCA(),
            r"of mine \(ifca\) also use .* such as fedavg, or move mine \(ifca\) into a file of its own",
        ),
        ({"example_dp": {"epsilon": 1.0}}, {}, fl.Pooled(), r"mine \(pooled\) trains on all examples in one place"),
        ({"dp": {"epsilon": 1.0}}, {}, fl.Selective(), r"mine \(selective\) shows the server the update or score"),
        ({"dp": {"epsilon": 1.0}}, {}, fl.Peer(), r"mine \(peer\) has no sum at a server.*only noise = \"local\""),
        ({"dp": {"epsilon": 1.0}}, {}, fl.FedAvg(rule="median"), "Leave out the rule, or dp"),
        ({"secure_aggregation": {}}, {}, fl.Peer(), r"mine \(peer\) has no sum at a server"),
        (
            {"secure_aggregation": {}},
            {},
            Forgetful(weights="uniform"),
            r"shows the server the update or score of each client \(.*test_protection.py, line \d+\)",
        ),
        ({"secure_aggregation": {}}, {}, fl.FedAvg(), r"mine \(fedavg\) weighs clients by examples. Set weights"),
        ({"secure_aggregation": {}}, {}, fl.QFedAvg(), "Use another algorithm, such as fedavg"),
        ({"dp": LOCAL}, {}, fl.FedAvg(), r"mine \(fedavg\) weighs them by their data.* Set weights = \"uniform\""),
        ({"dp": LOCAL}, {}, fl.Peer(weights="score"), r"mine \(peer\) also sends scores"),
        ({"dp": LOCAL}, {}, fl.EvaluationWeighted(), r"mine \(evaluation_weighted\) also sends scores"),
        ({"dp": LOCAL}, {}, fl.Pooled(), r"mine \(pooled\) trains on all examples in one place"),
    ],
)
def test_a_protection_that_does_not_fit_is_refused_before_anything_is_loaded(
    table: dict[str, Any], cohort: dict[str, Any], algorithm: fl.Algorithm, words: str
) -> None:
    with pytest.raises(InputError, match=words):
        check_plan(PrivacyTable(**table), fl.Sampling(**cohort), {"mine": algorithm})
    check_plan(PrivacyTable(), fl.Sampling(**cohort), {"mine": algorithm})


@pytest.mark.parametrize(
    "algorithm", [fl.FedAvg(weights="uniform"), fl.FedAvg(rule="median"), fl.Peer(), fl.Peer(weights="metropolis")]
)
def test_noise_at_each_client_fits_rules_peers_and_every_cohort(algorithm: fl.Algorithm) -> None:
    check_plan(PrivacyTable(dp=LOCAL), fl.Sampling(quorum=0.5), {"mine": algorithm})


class Weights(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(count))


@pytest.mark.parametrize(("bits", "clip"), [(32, 1e-3), (32, 1e-2), ("auto", 1e-6)])
def test_what_a_client_masks_is_no_longer_than_the_clip(bits: int | str, clip: float) -> None:
    """Rounding to the numbers of the ring makes a change longer, and noise is made for changes as long as the clip."""
    table = PrivacyTable(secure_aggregation=SecureTable(bits=bits), dp=DpTable(noise_multiplier=1.0, clip=clip))
    guard = ClientGuard(table, 100, 1, clip)
    draw = torch.Generator().manual_seed(1)
    start = torch.zeros(20_000)
    moved = start + 5 * torch.rand((1, 20_000), generator=draw)
    update = Update({"model": {"w": moved}}, torch.ones(1), positions={"model": "model"})
    task = Task(lambda: Weights(20_000))
    sent = guard.apply(update, {"model": {"w": start}}, task).groups["model"]["w"][0]
    ring = Ring(guard.ring, {"model": {"w": start}})
    vector = ring.encode({"model": {"w": sent}}, {"model": 1.0}, {})[1:]
    length = np.linalg.norm(vector.view(f"<i{ring.bits // 8}").astype(np.float64)) / ring.scales["model"]
    assert 0.9 * (clip - ring.rounding) < length <= clip


def test_a_ring_that_is_coarser_than_the_clip_is_refused() -> None:
    table = PrivacyTable(secure_aggregation=SecureTable(bits=32), dp=DpTable(noise_multiplier=1.0, clip=1e-6))
    update = Update({"model": {"w": torch.ones(1, 20_000)}}, torch.ones(1), positions={"model": "model"})
    guard, task = ClientGuard(table, 100, 1, 1e-6), Task(lambda: Weights(20_000))
    with pytest.raises(InputError, match=r"rounds changes by up to .* use bits = 64 or a smaller range"):
        guard.apply(update, {"model": {"w": torch.zeros(20_000)}}, task)


def test_agents_add_noise_for_as_many_rounds_as_the_coordinator_accounts_for(tmp_path: Path) -> None:
    dp = DpTable(epsilon=4.0, clip=1.0, noise="distributed")
    table = PrivacyTable(secure_aggregation=SecureTable(), dp=dp)
    for rounds in (10, 10):
        Protection(table, fl.Sampling(), 5, rounds, tmp_path, remote=True)
    with pytest.raises(InputError, match=r"is for 10 rounds, and agents would add noise for 20\. Set rounds = 10"):
        Protection(table, fl.Sampling(), 5, 20, tmp_path, remote=True)
    Protection(table, fl.Sampling(), 5, 20, tmp_path)  # a simulation goes on until ε is spent
