"""Every backend computes the same: bit for bit, or tightly where clients are trained side by side."""

import os
import platform
import re
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fedloom.algorithm import Update
from fedloom.algorithms import FedAvg
from fedloom.backends.serial import Serial
from fedloom.backends.vector import Vector, Workers, cut, environment
from fedloom.data.federation import Federation
from fedloom.errors import InputError, TrainingError
from fedloom.federation.engine import Evaluation, fit
from fedloom.federation.sampling import Sampling
from fedloom.task import Task
from fedloom.training.clients import Clients
from fedloom.training.probe import probe
from fedloom.tree import Groups
from tests.backends.helpers import LIGHT, cases, ragged, run, serial, task
from tests.conftest import (
    ALL_TRAIN,
    FEATURES,
    Dense,
    Memory,
    Moody,
    Normed,
    assert_close,
    facts,
    federation,
    last,
    slow_after,
)

VMAPPED = [(model, case) for model in ("dense", "normed", "pictures") for case in cases(model)] + [("logit", "cocoa")]


PLAIN = [("cumulative", "fedavg"), ("lstm", "fedavg"), ("lstm", "fedsgd")]


DRAWING = [(model, case) for model in ("rand_like", "lstm dropout") for case in ("fedavg", "fedsgd", "pooled")]


@pytest.mark.parametrize(("model", "case"), slow_after(6, [*DRAWING[:3], *PLAIN, *VMAPPED, *DRAWING[3:]]))
def test_workers_compute_what_the_serial_backend_computes_bit_for_bit(
    model: str, case: str, vector: Callable[..., Vector]
) -> None:
    found = run(model, case, "float32", vector(ragged(model), task(model, "float32"), group=1))
    for one, other in zip(found, serial(model, case, "float32"), strict=True):
        assert facts(one) == facts(other)


@pytest.mark.parametrize(("model", "case"), slow_after(12, VMAPPED))
def test_clients_side_by_side_learn_what_they_learn_alone(model: str, case: str, vector: Callable[..., Vector]) -> None:
    backend = vector(ragged(model), task(model, "float64"), group=4)
    assert backend.setup.group == 4
    for one, other in zip(run(model, case, "float64", backend), serial(model, case, "float64"), strict=True):
        assert_close(one, other, tolerance=1e-7)


@pytest.mark.parametrize(("model", "case"), PLAIN)
def test_a_model_that_cannot_be_vmapped_runs_with_any_group_size(
    model: str, case: str, vector: Callable[..., Vector]
) -> None:
    backend = vector(ragged(model), task(model, "float64"), group=4)
    if model == "cumulative":
        assert backend.setup.group == 1
    assert_close(run(model, case, "float64", backend)[-1], serial(model, case, "float64")[-1], tolerance=1e-10)


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("model", slow_after(1, ["normed", "dense", "pictures"]))
@pytest.mark.parametrize("case", ["fedavg keeps adam", "local keeps momentum"])
def test_one_two_and_three_workers_give_the_same_bits(
    model: str, case: str, group: int, vector: Callable[..., Vector]
) -> None:
    data, learnt = ragged(model), task(model, "float32")
    one, two, three = (
        [facts(r) for r in run(model, case, "float32", vector(data, learnt, group=group, workers=count))]
        for count in (1, 2, 3)
    )
    assert one == two == three


def test_a_large_cohort_in_several_pieces_gives_the_same_bits(vector: Callable[..., Vector]) -> None:
    data, learnt = federation([6] * 150), Task(Dense)
    settings: dict[str, Any] = {"seed": 2, "sampling": Sampling(count=140), "evaluation": Evaluation(splits=())}
    found = [
        facts(last(fit(data, learnt, FedAvg(**LIGHT), 2, backend=backend, **settings)))
        for backend in (Serial(data, learnt), vector(data, learnt, workers=2), vector(data, learnt, workers=3))
    ]
    assert found[0] == found[1] == found[2]
    grouped = [
        facts(last(fit(data, learnt, FedAvg(**LIGHT), 2, backend=vector(data, learnt, 10, workers), **settings)))
        for workers in (1, 3)
    ]
    assert grouped[0] == grouped[1]


def test_a_model_with_a_memory_gives_the_same_weights_and_measurements_everywhere(
    vector: Callable[..., Vector],
) -> None:
    data, learnt = federation((20, 30, 9, 14)), Task(Memory)
    found = [
        [facts(record) for record in fit(data, learnt, FedAvg(**LIGHT), 2, backend=backend)]
        for backend in (Serial(data, learnt), vector(data, learnt, workers=2), vector(data, learnt, workers=3))
    ]
    assert found[0] == found[1] == found[2]


def test_workers_leave_the_global_generator_of_the_parent_alone(vector: Callable[..., Vector]) -> None:
    before = torch.random.get_rng_state()
    run("rand_like", "fedavg", "float32", vector(ragged("rand_like"), task("rand_like", "float32")))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_backends_that_share_workers_do_not_mix_up_their_data(vector: Callable[..., Vector]) -> None:
    learnt = Task(Dense)
    first, second = federation((12, 30, 21)), federation((12, 30, 21), seed=5)
    one = vector(first, learnt)
    other = vector(second, learnt)
    algorithm = FedAvg(**LIGHT)
    for data, backend in ((first, one), (second, other), (first, one)):
        expected = facts(last(fit(data, learnt, algorithm, 1)))
        assert facts(last(fit(data, learnt, algorithm, 1, backend=backend))) == expected


@pytest.fixture
def own_workers() -> Iterator[Workers]:
    """Two processes that a test may break."""
    workers = Workers(2)
    yield workers
    workers.close()


def setup(data: Federation, learnt: Task, group: int = 1) -> Any:
    return probe(data, learnt).setup(group=group)


def test_after_an_error_the_same_workers_still_compute_what_they_are_asked(own_workers: Workers) -> None:
    learnt, quiet = Task(Dense), Evaluation(splits=())
    bad, good = federation((20, 30, 40, 25)), federation((20, 30, 40, 25))
    bad.x[:] = torch.nan  # so that both workers fail, and one of them when the parent no longer waits for it
    backend = Vector(bad, learnt, setup(bad, learnt), own_workers)
    with pytest.raises(TrainingError, match=r"client 'client-\d', local training, step 1 of 1: the loss of"):
        last(fit(bad, learnt, FedAvg(), 1, backend=backend, evaluation=quiet))
    backend = Vector(good, learnt, setup(good, learnt), own_workers)
    for _ in range(2):
        found = last(fit(good, learnt, FedAvg(), 2, backend=backend, evaluation=quiet))
        assert facts(found) == facts(last(fit(good, learnt, FedAvg(), 2, evaluation=quiet)))


class Suicidal(FedAvg):
    """Kills every process but one; if there is a file for the first victim, only the process that removes it."""

    parent: int = 0
    victim: str = ""

    def client(self, task: Task, shared: Groups, own: Groups, data: Clients) -> tuple[Update, Groups]:
        if os.getpid() != self.parent and data.round == 2:
            with suppress(FileNotFoundError):
                os.remove(self.victim) if self.victim else None
                os.kill(os.getpid(), signal.SIGKILL)
        return super().client(task, shared, own, data)


def test_a_worker_that_is_killed_at_work_is_replaced_and_changes_no_bit(own_workers: Workers, tmp_path: Path) -> None:
    data, learnt = federation((20, 30, 40)), Task(Dense)
    notes: list[str] = []
    own_workers.note = notes.append
    before = [process.pid for process in own_workers.processes]
    (tmp_path / "victim").touch()
    algorithm = Suicidal(parent=os.getpid(), victim=str(tmp_path / "victim"))
    backend = Vector(data, learnt, setup(data, learnt), own_workers)
    found = last(fit(data, learnt, algorithm, 3, backend=backend))
    assert facts(found) == facts(last(fit(data, learnt, FedAvg(), 3)))
    assert len({*before} & {process.pid for process in own_workers.processes}) == 1
    (note,) = notes
    assert re.fullmatch(
        r"Worker process [12] of 2 ended: signal 9 \(9 often .*\)\. Another one takes its place\. .*", note
    )


@pytest.mark.slow
def test_workers_that_are_killed_again_and_again_end_the_run_with_an_error(own_workers: Workers) -> None:
    data, learnt = federation((20, 30, 40)), Task(Dense)
    backend = Vector(data, learnt, setup(data, learnt), own_workers)
    with pytest.raises(
        TrainingError, match=r"Worker process [12] of 2 ended: signal 9 \(9 often means out of memory\)\. Fewer workers"
    ):
        last(fit(data, learnt, Suicidal(parent=os.getpid()), 2, backend=backend))


@pytest.mark.slow
def test_workers_that_are_killed_while_they_wait_are_replaced(own_workers: Workers) -> None:
    data, learnt = federation((20, 30, 40)), Task(Dense)
    backend = Vector(data, learnt, setup(data, learnt), own_workers)
    records = fit(data, learnt, FedAvg(), 3, backend=backend)
    next(records)
    for process in own_workers.processes:
        process.kill()
        process.wait()
    assert facts(last(records)) == facts(last(fit(data, learnt, FedAvg(), 3)))


def test_workers_that_were_ended_on_purpose_are_not_replaced(own_workers: Workers) -> None:
    data, learnt = federation((20, 30, 40)), Task(Dense)
    backend = Vector(data, learnt, setup(data, learnt), own_workers)
    own_workers.kill()
    with pytest.raises(TrainingError, match="ended: signal 9"):
        last(fit(data, learnt, FedAvg(), 1, backend=backend))


def test_an_error_inside_the_model_comes_back_from_the_worker_with_client_and_step(
    vector: Callable[..., Vector],
) -> None:
    data, learnt = federation((16, 28, 16), split=ALL_TRAIN), Task(Moody)
    message = r"^Round 1, client 'client-1', local training, step 2 of 2: RuntimeError: twelve is right out\n"
    message += r"  .*conftest\.py, line \d+, in forward\n(.*\n)* +> +\d+ \|  +raise RuntimeError"
    for backend in (Serial(data, learnt), vector(data, learnt, workers=1)):
        with pytest.raises(TrainingError, match=message) as caught:
            last(fit(data, learnt, FedAvg(batch_size=16), 1, backend=backend))
        whole = "".join(traceback.format_exception(caught.value))
        assert "line" in whole.partition("in forward")[0]
        assert "RuntimeError: twelve is right out\n\nThe above exception was the direct cause" in whole


def test_an_error_of_clients_side_by_side_names_the_client_that_fails_alone(vector: Callable[..., Vector]) -> None:
    data, learnt = federation((8, 12), split=ALL_TRAIN), Task(Moody)
    message = r"^Round 1, client 'client-1', local training, step 1 of 1: RuntimeError: twelve is right out"
    with pytest.raises(TrainingError, match=message):
        last(fit(data, learnt, FedAvg(batch_size=12), 1, backend=vector(data, learnt, group=2, workers=1)))


def test_a_model_that_a_worker_cannot_import_is_named(own_workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    ghost = ModuleType("ghost")
    exec("from tests.conftest import Dense\nclass Net(Dense): pass", vars(ghost))
    monkeypatch.setitem(sys.modules, "ghost", ghost)
    data, learnt = federation((20, 30)), Task(ghost.Net)
    with pytest.raises(TrainingError, match="ghost"):
        last(fit(data, learnt, FedAvg(), 1, backend=Vector(data, learnt, setup(data, learnt), own_workers)))


class Picky(nn.Module):
    """Refuses to be evaluated on five examples."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(FEATURES, 3)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training and x.shape[0] == 5:
            raise RuntimeError("not in the mood")
        return self.out(x)


def test_an_error_in_an_evaluation_comes_back_from_the_worker(vector: Callable[..., Vector]) -> None:
    data, learnt = federation((8, 25)), Task(Picky)
    with pytest.raises(TrainingError, match=r"(?s)RuntimeError: not in the mood"):
        last(fit(data, learnt, FedAvg(), 1, backend=vector(data, learnt, workers=1)))


def test_bad_input_comes_back_from_the_worker_as_bad_input(vector: Callable[..., Vector]) -> None:
    data, learnt = federation((8, 1, 13), split=ALL_TRAIN), Task(Normed)
    with pytest.raises(InputError, match="Client 'client-1' has one training example") as caught:
        last(fit(data, learnt, FedAvg(), 1, backend=vector(data, learnt, workers=1)))
    assert caught.value.exit_code == 2


@given(st.lists(st.integers(1, 100), max_size=50), st.integers(1, 12))
def test_work_is_cut_into_ranges_of_about_equal_cost(costs: list[int], pieces: int) -> None:
    borders = cut(costs, pieces)
    assert borders[0] == 0
    assert borders[-1] == len(costs)
    assert borders == sorted(set(borders))
    assert len(borders) - 1 <= pieces
    loads = [sum(costs[begin:end]) for begin, end in pairwise(borders)]
    if loads:
        assert max(loads) <= sum(costs) / pieces + 2 * max(costs)


def test_workers_end_when_they_are_closed(own_workers: Workers) -> None:
    processes = list(own_workers.processes)
    own_workers.close()
    assert all(process.poll() is not None for process in processes)
    own_workers.close()


TEN_LARGE_BLOCKS = """
import ctypes, resource
c = ctypes.CDLL(None)
c.malloc.restype, c.malloc.argtypes, c.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
for _ in range(10):
    block = c.malloc(1 << 26)
    ctypes.memset(block, 1, 1 << 26)
    c.free(block)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is glibc's")
def test_a_worker_reuses_the_memory_of_large_batches_unless_you_say_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    def fresh_pages() -> int:
        return int(subprocess.check_output([sys.executable, "-c", TEN_LARGE_BLOCKS], env=environment()))

    ten = 10 * (1 << 26) // os.sysconf("SC_PAGE_SIZE")
    assert fresh_pages() < ten / 2
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "1000000")
    assert fresh_pages() > ten
