"""FedAsync: the paper's step in numpy, in asynchronous rounds and in rounds that wait."""

from pathlib import Path

import pytest

from fedloom import tree
from fedloom.algorithms import FedAsync, FedProx
from fedloom.errors import InputError
from fedloom.federation.engine import fit
from fedloom.task import Task
from tests.clock.test_async_cohort import LR, SCHEDULE, line, run, trained
from tests.conftest import Normed, federation, last


def test_fedasync_in_numpy(tmp_path: Path) -> None:
    data, task = line()
    algorithm = FedAsync(batch_size="full", lr=LR, alpha=0.6, mu=0.0)
    records = run(tmp_path, data, task, algorithm, buffer=1, staleness_exponent=1.0)
    versions = {1: 0.3}
    for round, (client, version) in enumerate(SCHEDULE, start=1):
        rate = 0.6 / (1 + round - version)
        versions[round + 1] = (1 - rate) * versions[round] + rate * trained(versions[version], client)
        assert records[round - 1].state["model"]["w"].item() == pytest.approx(versions[round + 1], abs=1e-12)


def test_in_rounds_that_wait_the_mean_is_mixed_in() -> None:
    data, task = line()
    w = 0.3
    for record in fit(data, task, FedAsync(batch_size="full", lr=LR, alpha=0.25, mu=0.0), 3):
        w = 0.75 * w + 0.25 * (2 * trained(w, 0) + 3 * trained(w, 1)) / 5
        assert record.state["model"]["w"].item() == pytest.approx(w, abs=1e-12)


def test_with_alpha_one_it_is_fedprox() -> None:
    data, task = federation((12, 30)), Task(Normed, dtype="float64")
    found, expected = (last(fit(data, task, kind, 2)).state["model"] for kind in (FedAsync(alpha=1.0), FedProx()))
    assert float(tree.norm(tree.sub(found, expected))) < 1e-12


def test_alpha_must_be_a_share() -> None:
    for alpha in (0.0, 1.5):
        with pytest.raises(InputError, match="'alpha' parameter of FedAsync must be"):
            FedAsync(alpha=alpha)
