"""Real agents, in processes of their own: the bits of the serial backend, and the weights of the plain torch loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedloom.experiment.experiment_file import parse
from fedloom.experiment.plan import Plan
from fedloom.results.result import Result
from fedloom.testing.comparison import TOLERANCE
from fedloom.testing.plain_loop import plain_fedavg
from fedloom.testing.ways import leaf_distance
from tests.network.conftest import serial_weights, start, weights, write_toml
from tests.odd.harness import SIZES, federation

pytestmark = pytest.mark.slow

TASKS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("tokens", {"model": "tests.odd.nets.values:CutsPaddingByToList"}, {}),
    ("features", {"model": "tests.odd.nets.state:CountsItsCalls"}, {}),
    ("features", {"model": "tests.odd.nets.state:DrawsFromNumpy"}, {}),
    ("features", {"model": "tests.odd.nets.state:WritesInEvaluation"}, {}),
    ("features", {"model": "tests.odd.nets.draws:dropout"}, {"optimizer": "adam"}),
    ("features", {"model": "tests.odd.nets.layers:batch_norm", "loss": "tests.odd.losses:class_weights"}, {}),
]


@pytest.mark.parametrize(
    ("kind", "task", "training"), TASKS, ids=[task["model"].rpartition(":")[2] for _, task, _ in TASKS]
)
def test_agents_train_as_plain_torch_does(
    kind: str, task: dict[str, Any], training: dict[str, Any], tmp_path: Path
) -> None:
    data = federation(kind)
    owners = np.repeat(np.arange(len(SIZES)), SIZES)
    np.savez(tmp_path / "examples.npz", x=data.x.numpy(), y=data.y.numpy(), client=owners)
    values = {
        "name": "odd",
        "rounds": 2,
        "data": {"source": "npz", "path": str(tmp_path / "examples.npz"), "client": "client"},
        "task": {"dtype": "float64", **task},
        "train": {"lr": 0.05, "epochs": 2, "batch_size": 5, "weight_decay": 0.01, **training},
        "algorithm": {"fedavg": {}},
        "run": {"backend": "serial"},
    }
    file = write_toml(tmp_path / "experiment.toml", values)
    process = start("serve", file, "--local", "2", "--out", tmp_path / "net", "--json", cwd=tmp_path)
    assert process.wait(timeout=300) == 0, (tmp_path / "log.txt").read_text()
    assert weights(tmp_path / "net") == serial_weights(values, tmp_path / "serial")

    plan = Plan.of(parse(values))
    seed = plan.seeds[0]
    settings = plan.algorithms["fedavg"].train
    *_, plain = plain_fedavg(plan.task(seed), plan.federation(seed), settings, 2, seed=seed)
    model = Result.read(tmp_path / "net").weights("fedavg")["model"]
    far = {leaf: leaf_distance(value, model[leaf]) for leaf, value in plain.weights.items()}
    assert max(far.values()) <= TOLERANCE["float64"], far
