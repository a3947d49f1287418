"""Worker processes of a script."""

import os
import select
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


ORPHANS = """
import os
import sys

import numpy as np
from torch import nn

import fedloom as fl
from fedloom.backends.vector import Vector, Workers
from fedloom.training.clients import Setup


class Endless(nn.Linear):
    def forward(self, x):
        if os.getpid() != int(os.environ["FEDLOOM_TEST_PARENT"]):
            os.write(1, f"{os.getpid()}\\n".encode())
            while True:
                pass
        return super().forward(x)


os.environ["FEDLOOM_TEST_PARENT"] = str(os.getpid())
federation = fl.Federation.from_arrays(np.zeros((40, 2), "float32"), [0, 1] * 20, clients=2)
task = fl.Task(Endless, args={"in_features": 2, "out_features": 2})
backend = Vector(federation, task, Setup(), Workers(2))
next(fl.fit(federation, task, fl.FedAvg(), 1, backend=backend))
"""


def ends_with_its_parent(code: str, workers: int) -> None:
    """Run a script whose workers print their numbers, kill it, and wait for the workers' ends."""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        watched = [os.pidfd_open(int(parent.stdout.readline())) for _ in range(workers)]  # all are at work
        parent.kill()
    for worker in watched:
        assert select.select([worker], [], [], 2.0)[0], "a worker outlived its parent by two seconds"
        os.close(worker)


@pytest.mark.skipif(sys.platform != "linux", reason="needs pidfd_open, which Linux has")
def test_workers_end_when_their_parent_is_killed_whatever_they_are_doing() -> None:
    ends_with_its_parent(ORPHANS, 2)


WATCHED = """
import os, sys, threading
from fedloom.backends import worker_process

sys.platform = "elsewhere"
read, write = os.pipe()
parent = os.getpid()
if os.fork() == 0:
    worker_process.end_with(parent)
    os.write(1, f"{os.getpid()}\\n".encode())
    while True:
        pass
os.read(read, 1)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs pidfd_open, which Linux has")
def test_where_the_kernel_does_not_end_them_a_thread_watches_the_parent() -> None:
    ends_with_its_parent(WATCHED, 1)


def test_a_worker_whose_parent_has_ended_before_ends_at_once() -> None:
    code = "from fedloom.backends.worker_process import end_with; end_with(1); print('alive')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == ""
