"""Worker processes of a script."""

import subprocess
import sys

import pytest

SCRIPT = """
import numpy as np
import torch
from torch import nn

import fedloom as fl
from fedloom import tree
from fedloom.backends.serial import Serial
from fedloom.backends.vector import Vector
from fedloom.training.probe import probe

draws = np.random.default_rng(0)
x, y = torch.from_numpy(draws.normal(size=(120, 5))).float(), torch.from_numpy(draws.integers(0, 2, 120))
x[:, 4] = 0.0
federation = fl.Federation(x, y, np.array([0, 30, 50, 120]), classes=("no", "yes"))
smoothing = 0.1


class Net(nn.Module):
    def __init__(self, tiny=0.5):
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.last = nn.Linear(8, 2)
        with torch.no_grad():
            self.first.weight[:, 4] = tiny

    def forward(self, x):
        return self.last(torch.relu(self.first(x)))


def loss(output, target):
    return nn.functional.cross_entropy(output, target, label_smoothing=smoothing, reduction="none")


class Pull(fl.FedAvg):
    mu: float = 0.1

    def correct(self, step, shared, own):
        return tree.add(step.grad, tree.sub(step.params, step.start), scale=self.mu)


for tiny in (0.5, 1e-39):
    task = fl.Task(Net, loss=loss, args={"tiny": tiny})
    setup = probe(federation, task).setup(group=1)
    for backend in (Serial(federation, task), Vector(federation, task, setup, workers=2)):
        for record in fl.fit(federation, task, Pull(batch_size=16, mu=0.3), 2, backend=backend):
            pass
        print(tree.sha256(record.state["model"]))
        backend.close()
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What a script prints that has no guard and defines everything inline."""
    folder = tmp_path_factory.mktemp("script")
    (folder / "mine.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, "mine.py"], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.split()


def test_a_script_without_a_guard_runs_on_two_workers(printed: list[str]) -> None:
    assert len(printed) == 4
    assert printed[0] == printed[1]


def test_numbers_too_small_for_normal_precision_are_treated_alike_by_all_backends(printed: list[str]) -> None:
    assert printed[2] == printed[3]
