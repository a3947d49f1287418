"""Asynchronous means: the bits of FedAvg where nothing is stale, and the papers' steps in numpy where something is."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedloom import tree
from fedloom.algorithm import Algorithm
from fedloom.algorithms import FedAdam, FedAsync, FedAvg, FedProx, Scaffold
from fedloom.backends.vector import Vector
from fedloom.clock.fleet import Fleet
from fedloom.clock.system import System
from fedloom.data.federation import Federation
from fedloom.errors import InputError
from fedloom.federation.engine import Evaluation, RoundRecord, fit
from fedloom.federation.sampling import Sampling
from fedloom.task import Task
from tests.clock.test_async_clock import QUIET, system
from tests.conftest import ALL_TRAIN, Dense, federation, numbers_federation

X = ([[1.0], [2.0], [3.0], [-1.0], [0.5]], [[2.0], [3.0], [5.0], [1.0], [0.0]])
SIZES = (2, 3)
LR = 0.05


class Line(nn.Module):
    """y = w x."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([[0.3]], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w


def line() -> tuple[Federation, Task]:
    return numbers_federation(*X, SIZES), Task(Line, loss="mse", dtype="float64")


def trained(w: float, client: int) -> float:
    """One step of gradient descent on a client's mean squared error."""
    rows = slice(0, 2) if client == 0 else slice(2, 5)
    x, y = np.array(X[0])[rows, 0], np.array(X[1])[rows, 0]
    return float(w - LR * np.mean(2 * (w * x - y) * x))


# client 0 takes 1 second and client 1 takes 2.5: who answers in each round, and the version that it started from
SCHEDULE = [(0, 1), (0, 2), (1, 1), (0, 3), (0, 5)]


def test_fedbuff_in_numpy(tmp_path: Path) -> None:
    data, task = line()
    records = run(tmp_path, data, task, FedAvg(batch_size="full", lr=LR), buffer=1)
    versions = {1: 0.3}
    for round, (client, version) in enumerate(SCHEDULE, start=1):
        change = trained(versions[version], client) - versions[version]
        versions[round + 1] = versions[round] + (1 + round - version) ** -0.5 * change
        assert records[round - 1].state["model"]["w"].item() == pytest.approx(versions[round + 1], abs=1e-12)


def test_fedbuff_with_two_answers_weighs_changes_by_examples_and_staleness(tmp_path: Path) -> None:
    data, task = line()
    speeds = [1.0, 0.4]
    records = run(tmp_path, data, task, FedAvg(batch_size="full", lr=LR), buffer=2, speeds=speeds)
    # both answer in every round, and both start in the next: nothing is stale
    w = 0.3
    for record in records[:2]:
        w = (2 * trained(w, 0) + 3 * trained(w, 1)) / 5
        assert record.state["model"]["w"].item() == pytest.approx(w, abs=1e-12)


def test_scaffolds_control_variates_are_not_scaled(tmp_path: Path) -> None:
    data, task = line()
    records = run(tmp_path, data, task, Scaffold(batch_size="full", lr=LR), buffer=1)
    # c is the mean of what all clients keep: exactly that, however stale an answer was
    for number, record in enumerate(records, start=1):
        kept = {0: 0.0, 1: 0.0}
        for earlier in records[:number]:
            kept |= {client: own["control"]["w"].item() for client, own in earlier.own.items()}
        assert record.state["control"]["w"].item() == pytest.approx(sum(kept.values()) / 2, abs=1e-12)


def run(
    folder: Path,
    data: Federation,
    task: Task,
    algorithm: Algorithm,
    speeds: list[float] | None = None,
    **cohort: Any,
) -> list[RoundRecord]:
    fleet = Fleet.of(system(folder, speeds or [1.0, 0.4]), data)
    sampling = Sampling(mode="async", **cohort)
    return list(fit(data, task, algorithm, 5, sampling=sampling, evaluation=QUIET, fleet=fleet))


@pytest.mark.parametrize("kind", [FedAvg, FedProx, FedAdam, Scaffold, FedAsync])
def test_equal_times_with_a_buffer_as_large_as_the_cohort_are_rounds_bit_for_bit(kind: type[Algorithm]) -> None:
    data, algorithm = federation((30,) * 20, split=ALL_TRAIN), kind(batch_size=8)
    *_, plain = fit(data, Task(Dense), algorithm, 4, sampling=Sampling(count=8), evaluation=QUIET)
    sampling = Sampling(count=8, mode="async", buffer=8)
    fleet = Fleet.of(System(step=1.0), data)
    *_, found = fit(data, Task(Dense), algorithm, 4, sampling=sampling, evaluation=QUIET, fleet=fleet)
    assert found.cohort == plain.cohort
    assert tree.sha256(found.state["model"]) == tree.sha256(plain.state["model"])


@pytest.mark.slow
def test_any_number_of_workers_gives_the_same_bits(vector: Callable[..., Vector]) -> None:
    data, task = federation((12, 30, 21, 45) * 3), Task(Dense)
    fleet = Fleet.of(System(step=1.0, speed={"name": "lognormal", "sigma": 1.0}, vanish=0.1), data)
    sampling = Sampling(count=6, mode="async", buffer=3)
    found = set()
    for workers in (None, 1, 2):
        backend = None if workers is None else vector(data, task, workers=workers)
        *_, last = fit(data, task, FedAvg(batch_size=8), 5, sampling=sampling, fleet=fleet, backend=backend)
        found.add(tree.sha256_of_groups(last.state))
    assert len(found) == 1


def test_an_outlier_is_left_out_whatever_version_it_started_from() -> None:
    class Loud(FedAvg):
        def client(self, task: Any, shared: Any, own: Any, data: Any) -> Any:
            update, kept = super().client(task, shared, own, data)
            loud = torch.tensor([1e6 if client == 3 else 0.0 for client in data.ids])
            update.groups["model"] = tree.map_leaves(
                lambda leaf: leaf + tree.per_client(loud, leaf), update.groups["model"]
            )
            return update, kept

    data = federation((30,) * 10, split=ALL_TRAIN)
    fleet = Fleet.of(System(step=1.0, speed={"name": "lognormal"}), data)
    sampling = Sampling(mode="async", buffer=6, outlier_factor=10)
    records = list(fit(data, Task(Dense), Loud(batch_size=8), 4, sampling=sampling, evaluation=QUIET, fleet=fleet))
    assert any(record.outliers == (3,) for record in records)
    for record in records:
        assert record.time is not None
        arrived = {one.client for one in record.time.clients}
        assert {*record.cohort} == arrived - {3}
        assert all(leaf.abs().max() < 100 for leaf in record.state["model"].values())


def test_the_clients_of_the_round_are_measured_after_training_and_at_the_end() -> None:
    data = federation((30,) * 10)
    fleet = Fleet.of(System(step=1.0, speed={"name": "lognormal"}), data)
    sampling = Sampling(mode="async", buffer=4)
    evaluation = Evaluation(clients="cohort")
    *_, last = fit(data, Task(Dense), FedAvg(), 3, sampling=sampling, evaluation=evaluation, fleet=fleet)
    assert {*last.clients["post_fit"]} == {*last.clients["final"]} == {*last.cohort}


class Twice(FedAvg):
    def round(self, state: Any, cohort: Any) -> Any:
        self.average(cohort, state)
        return super().round(state, cohort)


class Mapped(FedAvg):
    def round(self, state: Any, cohort: Any) -> Any:
        cohort.map(self.client, state)
        return state


@pytest.mark.parametrize(("kind", "why"), [(Twice, "several times in a round"), (Mapped, "see each answer")])
def test_your_own_algorithm_is_refused_where_it_cannot_be_asynchronous(kind: type[Algorithm], why: str) -> None:
    data = federation((10,) * 4)
    fleet = Fleet.of(System(step=1.0), data)
    with pytest.raises(InputError, match=rf'mode = "async" is not for {kind.__name__}, which .*{why}'):
        next(fit(data, Task(Dense), kind(), 1, sampling=Sampling(mode="async", buffer=2), fleet=fleet))
