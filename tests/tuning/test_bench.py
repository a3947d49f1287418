"""This machine's numbers for an experiment: measured rounds and the choices behind them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedloom.experiment.experiment_file import load
from fedloom.experiment.plan import Plan
from fedloom.experiment.progress import Silent
from fedloom.experiment.tables import RunTable
from fedloom.training.clients import Setup
from fedloom.training.probe import probe
from fedloom.tuning.bench import bench, choices
from tests.forked import run_forked

EXPERIMENT = """
name = "small"
rounds = 4
[data]
source = "digits"
partition = { name = "iid", clients = 10 }
[train]
batch_size = 16
epochs = 2
[cohort]
count = 5
[algorithm]
fedavg = {}
pooled = {}
[run]
workers = 1
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(EXPERIMENT)
    return path


def test_rounds_are_measured_and_nothing_is_stored(file: Path) -> None:
    done = run_forked("bench", file.name, "--rounds", "2", "--json", cwd=file.parent)
    found = json.loads(done.stdout)
    assert [timing["algorithm"] for timing in found["timings"]] == ["fedavg", "pooled"]
    assert all(len(timing["rounds"]) == len(timing["training"]) == 2 for timing in found["timings"])
    assert "1 worker process" in found["choices"][0]
    assert [path.name for path in file.parent.iterdir()] == ["small.toml"]


def test_examples_are_those_that_clients_train_on(file: Path) -> None:
    experiment = load(file, {"run.backend": "serial"})
    federation = Plan.of(experiment).federation(1)
    found = bench(experiment, 2, Silent())
    fedavg, pooled = found.timings
    everyone = 2 * federation.sizes("train").sum()
    assert pooled.examples_a_second * sum(pooled.training) == pytest.approx(2 * everyone)
    assert fedavg.examples_a_second * sum(fedavg.training) == pytest.approx(everyone, rel=0.05)  # half take part
    assert all("a round" in timing.lines()[0] for timing in found.timings)


def test_choices_say_why(file: Path) -> None:
    plan = Plan.of(load(file))
    facts = probe(plan.federation(1), plan.task(1))
    said = choices(facts, facts.setup(1), RunTable(), 5, "2 worker processes")
    assert said[0] == "2 worker processes with one thread each"
    assert said[1].startswith("one client at a time: the model has 9.6 kB and 5 take part")
    assert "16 kernels" in said[2]
    assert "side by side: as requested" in choices(facts, facts.setup(4), RunTable(group=4), 5, None)[1]
    assert (
        choices(facts, Setup(), RunTable(), 5, None)[2] == "steps are done by autograd: this model's cannot be replayed"
    )
