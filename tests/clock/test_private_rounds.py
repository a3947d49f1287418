"""[privacy] in virtual time: who is late changes neither the noise nor what ε is charged for."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom import tree
from fedloom.algorithms import FedAvg
from fedloom.clock.fleet import Fleet
from fedloom.clock.system import System
from fedloom.federation.engine import Evaluation, RoundRecord, fit
from fedloom.federation.sampling import Sampling
from fedloom.privacy.dp.at_client import AtClients
from fedloom.privacy.protection import Protection
from fedloom.privacy.table import PrivacyTable
from fedloom.task import Task
from fedloom.tree import Tree
from tests.conftest import ALL_TRAIN, Dense, federation

SIZES = (10, 20, 30, 40)  # training examples: one step of ten for each ten of them
TINY = {"noise_multiplier": 1e-7, "clip": 10.0}


def rounds(
    number: int = 1, *, privacy: dict[str, Any] | None = None, system: System | None = None, **cohort: Any
) -> list[RoundRecord]:
    data, sampling = federation(SIZES, split=ALL_TRAIN, names=None), Sampling(**cohort)
    protection = None if privacy is None else Protection(PrivacyTable(**privacy), sampling, len(SIZES), number)
    fleet = Fleet.of(system or System(step=1.0), data)
    algorithm = FedAvg(batch_size=10, weights="uniform")
    quiet = Evaluation(splits=(), server=())
    return [
        *fit(
            data,
            Task(Dense),
            algorithm,
            number,
            sampling=sampling,
            evaluation=quiet,
            protection=protection,
            fleet=fleet,
        )
    ]


def moved(record: RoundRecord) -> Tree:
    return tree.sub(record.state["model"], Task(Dense).initial())


def assert_close(left: Tree, right: Tree) -> None:
    torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)


def test_a_late_client_adds_nothing_and_the_sum_is_divided_by_the_expected_number() -> None:
    (plain,), (private,) = rounds(deadline="3s"), rounds(deadline="3s", privacy={"dp": TINY})
    assert private.cohort == plain.cohort == (0, 1, 2)
    assert_close(moved(private), tree.scale(moved(plain), 3 / 4))


def test_a_round_in_which_everybody_is_late_releases_noise_and_is_charged() -> None:
    dp = {"noise_multiplier": 1.0, "clip": 1.0}
    first, second = rounds(2, deadline="0.5s", privacy={"dp": dp})
    assert (first.complete, first.cohort, first.reports) == (True, (), ())
    assert first.time is not None
    assert first.time.ended == 0.5
    assert tree.norm(moved(first)) > 0
    assert second.notes["epsilon"] > first.notes["epsilon"] > 0


def test_the_epsilon_of_a_sampled_round_is_that_of_its_draw() -> None:
    dp = {"noise_multiplier": 1.0, "clip": 1.0}
    late, on_time = (
        rounds(3, sampling="poisson", fraction=0.5, deadline=deadline, privacy={"dp": dp})
        for deadline in ("1.5s", "10m")
    )
    assert [record.notes["epsilon"] for record in late] == [record.notes["epsilon"] for record in on_time]


def test_clients_that_are_late_drop_out_of_a_masked_sum() -> None:
    secure = {"secure_aggregation": {"threshold": 0.6}}
    (plain,), (masked,) = rounds(deadline="3s"), rounds(deadline="3s", privacy=secure)
    assert masked.cohort == (0, 1, 2)
    assert masked.notes["lost"] == 1
    assert_close(moved(masked), moved(plain))


def test_a_masked_sum_of_too_few_is_abandoned_at_the_deadline() -> None:
    (record,) = rounds(deadline="3s", privacy={"secure_aggregation": {"threshold": 1.0}})
    assert record.time is not None
    assert (record.complete, record.time.ended) == (False, 3.0)
    assert_close(moved(record), tree.zeros_like(moved(record)))


def test_each_stage_of_a_masked_sum_has_its_latency() -> None:
    system = System(step=1.0, latency=0.5)
    (plain,), (masked,) = rounds(system=system), rounds(system=system, privacy={"secure_aggregation": {}})
    assert plain.time is not None
    assert masked.time is not None
    assert (plain.time.ended, masked.time.ended) == (4.5, 6.5)


def test_late_clients_share_distributed_noise_that_still_suffices() -> None:
    privacy = {"secure_aggregation": {"threshold": 0.6}, "dp": {**TINY, "noise": "distributed", "colluders": 0.0}}
    (plain,), (record,) = rounds(deadline="3s"), rounds(deadline="3s", privacy=privacy)
    assert record.cohort == (0, 1, 2)
    assert record.notes["distributed_epsilon"] > 0
    torch.testing.assert_close(moved(record), tree.scale(moved(plain), 3 / 4), rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    "table", [{"example_dp": {}}, {"dp": {"noise": "local", "clip": 1.0, "noise_multiplier": 1.0}}]
)
@pytest.mark.parametrize("cohort", [{}, {"mode": "async", "buffer": 4}])
def test_what_clients_do_by_themselves_needs_no_clock_and_minds_none(
    table: dict[str, Any], cohort: dict[str, Any], tmp_path: Path
) -> None:
    data, task = federation((20, 20, 20, 20), split=ALL_TRAIN, names=None), Task(Dense)
    algorithm = FedAvg(batch_size=10, weights="uniform")

    def found(fleet: Fleet | None, sampling: Sampling) -> RoundRecord:
        at_clients = AtClients(PrivacyTable(**table), 2, tmp_path)
        *_, last = fit(data, task, algorithm, 2, sampling=sampling, at_clients=at_clients, fleet=fleet)
        return last

    timed, plain = found(Fleet.of(System(step=1.0), data), Sampling(**cohort)), found(None, Sampling())
    assert tree.sha256(timed.state["model"]) == tree.sha256(plain.state["model"])
    spent = {name: value for name, value in plain.notes.items() if "epsilon" in name}
    assert spent
    assert spent.items() <= timed.notes.items()
