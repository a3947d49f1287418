"""Ray: the same bits as other backends on two nodes of a real cluster, even if processes and nodes die."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedloom as fl
from fedloom.aggregation.means import partial_sums
from fedloom.algorithm import Update
from fedloom.algorithms import ALGORITHMS, FedAvg
from fedloom.backends import ray as backend
from fedloom.backends.ray import Ray, check_memory, spread
from fedloom.backends.ray_cluster import Cluster, Node
from fedloom.backends.vector import Vector
from fedloom.data.federation import Federation
from fedloom.errors import InputError, TrainingError
from fedloom.experiment.tables import RunTable
from fedloom.federation.engine import Evaluation, fit
from fedloom.task import Task
from fedloom.training.clients import Clients, Setup
from fedloom.training.probe import probe
from fedloom.tree import Groups
from tests.backends.helpers import CASES, MEASURE, cases, ragged, serial, task
from tests.conftest import ALL_TRAIN, Dense, Moody, facts, federation, last

pytestmark = pytest.mark.slow

QUIET = Evaluation(splits=())
GB = 10**9


def nodes(*workers: int) -> list[Node]:
    return [Node(str(n), f"node-{n}", count, 10 * GB, 10 * GB) for n, count in enumerate(workers)]


# without Ray


@given(st.lists(st.integers(1, 100), max_size=200), st.lists(st.integers(1, 5), min_size=1, max_size=6), st.booleans())
def test_every_client_is_computed_once_in_order_by_about_equally_busy_nodes(
    costs: list[int], workers: list[int], once: bool
) -> None:
    found = spread(costs, nodes(*workers), once)
    assert len(found) == len(workers)
    ranges = [part for node in found for part in node]
    assert [client for begin, end in ranges for client in range(begin, end)] == list(range(len(costs)))
    share = len(costs) / len(workers)
    for count, node in zip(workers, found, strict=True):
        load = sum(sum(costs[begin:end]) for begin, end in node)
        fair = sum(costs) * count / sum(workers)
        assert load <= fair + (2 + share / 8) * max(costs, default=0)


def test_a_node_with_a_power_of_two_of_clients_sends_one_sum_and_others_few() -> None:
    def sums(clients: int, count: int) -> list[int]:
        ranges = [(part[0][0], part[-1][1]) for part in spread([7] * clients, nodes(*[4] * count))]
        return [len(partial_sums({"": torch.ones(e - b)}, torch.ones(e - b), b)) for b, e in ranges]

    assert sums(64, 2) == [1, 1]
    assert sums(1024, 8) == [1] * 8
    assert max(sums(1000, 10)) <= 5
    assert sum(sums(1000, 10)) < 40


def test_borders_of_nodes_go_to_whole_subtrees_even_where_costs_differ() -> None:
    costs = [30] * 31 + [20] * 33
    assert [(part[0][0], part[-1][1]) for part in spread(costs, nodes(1, 1))] == [(0, 28), (28, 64)]


def test_too_little_memory_is_refused_with_the_arithmetic() -> None:
    small = Node("", "here", workers=3, store_bytes=GB, memory_bytes=2 * GB)
    check_memory(small, data=GB // 2, model=GB // 100, group=1)
    with pytest.raises(InputError, match=r"0\.90 GB of examples \+ \(2 \+ 4 × 3 workers\) × 0\.010 GB .* = 1\.04 GB"):
        check_memory(small, data=9 * GB // 10, model=GB // 100, group=1)
    with pytest.raises(
        InputError, match=r"3 workers × \(0\.3 GB \+ 64 × 0\.010 GB of weights\) = 2\.82 GB, and .* 2\.00"
    ):
        check_memory(small, data=GB // 2, model=GB // 100, group=10)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"address": "auto"}, r'\[run\] address is for backend = "ray"\. Got backend = "vector"'),
        ({"nodes": 2}, r'\[run\] nodes is for backend = "ray"'),
        ({"backend": "ray", "nodes": 2}, r"\[run\] nodes = 2 needs the address of a cluster"),
        ({"backend": "ray", "device": "cuda"}, r'\[run\] backend = "ray" computes on processors\. Got device = "cuda"'),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        RunTable(**settings)


# on a real cluster of two nodes on this machine


@dataclass
class Machines:
    """Two nodes, the first of them with two workers, and a connection to them."""

    ray: Any
    simulated: Any
    cluster: Cluster
    told: list[str]

    def add(self) -> str:
        """A further node; its id."""
        before = {node.id for node in self.cluster.nodes()}
        self.simulated.add_node(num_cpus=1, wait=True)
        (added,) = {node.id for node in self.cluster.nodes()} - before
        return added

    def __call__(self, data: Federation, learnt: Task, group: int = 1) -> Ray:
        return Ray(data, learnt, probe(data, learnt).setup(group=group), self.cluster)


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'fedloom[ray]'")
    from ray.cluster_utils import Cluster as Simulated

    quick = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 6}
    head = {"num_cpus": 2, "include_dashboard": False, "_system_config": quick}
    simulated = Simulated(initialize_head=True, head_node_args=head)
    simulated.add_node(num_cpus=1, wait=True)
    told: list[str] = []
    cluster = Cluster(simulated.address, nodes=2, tell=told.append)
    yield Machines(ray, simulated, cluster, told)
    cluster.close()
    simulated.shutdown()


@pytest.fixture(scope="module")
def on_ray(machines: Machines) -> Ray:
    return machines(ragged("dense"), task("dense", "float32"))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[] if case in ("fedavg", "scaffold", "peer", "pooled") else [pytest.mark.slow])
        for case in cases("dense")
    ],
)
def test_every_algorithm_gives_the_serial_bits_on_two_nodes(case: str, on_ray: Ray) -> None:
    data, learnt = ragged("dense"), task("dense", "float32")
    found = fit(data, learnt, CASES[case], 2, seed=6, evaluation=MEASURE, backend=on_ray)
    assert [facts(record) for record in found] == [facts(record) for record in serial("dense", case, "float32")]


@pytest.mark.parametrize("name", ["fedavg", "scaffold"])
def test_side_by_side_it_gives_the_bits_of_vector(name: str, machines: Machines, vector: Callable[..., Vector]) -> None:
    data, learnt = federation([9] * 21), Task(Dense)
    algorithm = ALGORITHMS[name](lr=0.05, batch_size=4)
    one, other = (
        facts(last(fit(data, learnt, algorithm, 2, seed=3, backend=where)))
        for where in (vector(data, learnt, group=5), machines(data, learnt, group=5))
    )
    assert one == other


def test_the_server_receives_one_sum_from_every_node(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    data, learnt = federation([6] * 96), Task(Dense)
    received: list[Any] = []

    def unpack(message: list[Any]) -> Any:
        received.append(open_(message))
        return received[-1]

    open_ = backend.unpack
    monkeypatch.setattr(backend, "unpack", unpack)
    last(fit(data, learnt, FedAvg(), 1, evaluation=QUIET, backend=machines(data, learnt)))
    assert [list(outcome.sums) for outcome in received] == [[(6, 0)], [(5, 2)]]  # clients 0 to 63 and 64 to 95


class Mortal(FedAvg):
    """FedAvg, but in round 2 one process dies at work, or a whole node does."""

    mark: str  # a file that is made by the one that dies
    node: str = ""  # which node dies; without it, only the first process kills itself

    def client(self, task: Task, shared: Groups, own: Groups, data: Clients) -> tuple[Update, Groups]:
        import ray

        here = ray.get_runtime_context().get_node_id()
        if data.round == 2 and self.node in ("", here) and not Path(self.mark).exists():
            Path(self.mark).touch()
            if self.node:
                os.kill(os.getppid(), signal.SIGKILL)  # Ray's own process on that node
            os.kill(os.getpid(), signal.SIGKILL)
        return super().client(task, shared, own, data)


def test_a_process_that_is_killed_at_work_changes_nothing(machines: Machines, tmp_path: Path) -> None:
    data, learnt = federation((20, 30, 40, 17, 9)), Task(Dense)
    mortal = Mortal(mark=str(tmp_path / "killed"))
    found = last(fit(data, learnt, mortal, 3, backend=machines(data, learnt)))
    assert (tmp_path / "killed").exists()
    assert facts(found) == facts(last(fit(data, learnt, FedAvg(), 3)))


@pytest.mark.slow
def test_a_node_that_joins_and_is_killed_at_work_changes_nothing(
    machines: Machines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "FAN_IN", 2)  # so that one of three nodes adds up for another
    data, learnt = federation((20, 30, 40, 17, 9, 12, 25)), Task(Dense)
    where = machines(data, learnt)
    victim = machines.add()  # a node that joins gets work
    mortal = Mortal(mark=str(tmp_path / "killed"), node=victim)
    found = last(fit(data, learnt, mortal, 3, backend=where))
    assert (tmp_path / "killed").exists()
    assert victim not in [node.id for node in machines.cluster.nodes()]
    assert facts(found) == facts(last(fit(data, learnt, FedAvg(), 3)))


class Doomed(FedAvg):
    """Kills every process that computes it."""

    def client(self, task: Task, shared: Groups, own: Groups, data: Clients) -> tuple[Update, Groups]:
        os.kill(os.getpid(), signal.SIGKILL)
        return super().client(task, shared, own, data)


def test_a_client_that_kills_every_process_ends_the_run(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines.cluster, "retries", 0)
    machines.cluster._tasks.clear()
    data, learnt = federation((20,)), Task(Dense)
    where = machines(data, learnt)
    try:
        with pytest.raises(
            TrainingError, match=r"(?s)Round 1, client: Ray gave up after 0 retries .* too little memory"
        ):
            last(fit(data, learnt, Doomed(), 1, backend=where))
    finally:
        machines.cluster._tasks.clear()


class Sleepy(FedAvg):
    """Takes its time."""

    def client(self, task: Task, shared: Groups, own: Groups, data: Clients) -> tuple[Update, Groups]:
        time.sleep(1)
        return super().client(task, shared, own, data)


@pytest.mark.slow
def test_a_long_wait_is_reported(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    data, learnt = federation((20, 30, 10)), Task(Dense)
    where = machines(data, learnt)
    machines.told.clear()
    monkeypatch.setattr(machines.cluster, "patience", 0.3)
    last(fit(data, learnt, Sleepy(), 1, evaluation=QUIET, backend=where))
    assert "round 1, client: waited 0 s for" in machines.told[0]
    assert "clients 1 to 2" in machines.told[0]
    assert "Nodes in the cluster: 2, with 3 workers in all" in machines.told[0]


def test_errors_name_client_and_step_as_elsewhere(machines: Machines) -> None:
    data, learnt = federation((16, 28, 16), split=ALL_TRAIN), Task(Moody)
    message = r"^Round 1, client 'client-1', local training, step 2 of 2: RuntimeError: twelve is right out\n"
    with pytest.raises(TrainingError, match=message):
        last(fit(data, learnt, FedAvg(batch_size=16), 1, backend=machines(data, learnt)))


class Odd(Exception):
    """Cannot be unpickled: its text is not what it was made of."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} is not {other}")


class Strange(FedAvg):
    """Fails with an exception of its own."""

    def client(self, task: Task, shared: Groups, own: Groups, data: Clients) -> tuple[Update, Groups]:
        raise Odd(1, 2)


def test_an_exception_that_cannot_travel_is_told_as_what_it_is(machines: Machines) -> None:
    data, learnt = federation((8, 13)), Task(Dense)
    with pytest.raises(TrainingError, match=r"^Round 1, client 'client-0', Strange\.client: Odd: 1 is not 2\n"):
        last(fit(data, learnt, Strange(), 1, backend=machines(data, learnt)))


def test_a_model_that_a_node_cannot_import_is_named(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    ghost = ModuleType("ghost")
    exec("from tests.conftest import Dense\nclass Net(Dense): pass", vars(ghost))
    monkeypatch.setitem(sys.modules, "ghost", ghost)
    with pytest.raises(TrainingError, match="ModuleNotFoundError: No module named 'ghost'"):
        machines(federation((20, 30)), Task(ghost.Net))


def test_a_node_with_another_torch_is_refused(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = backend.machine.facts()
    monkeypatch.setattr(backend.machine, "facts", lambda: {**theirs, "torch": "1.0"})
    with pytest.raises(
        InputError, match=rf"has torch {re.escape(theirs['torch'])}.* has 1\.0: install the same version"
    ):
        machines(federation((20, 30)), Task(Dense))


def test_a_node_with_another_kind_of_processor_is_named(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = {**backend.machine.facts(), "cpu_capability": "another one"}
    monkeypatch.setattr(backend.machine, "facts", lambda: ours)
    machines.told.clear()
    machines(federation((20, 30)), Task(Dense))
    assert [text.split(": ")[0].split(" ", 2)[2] for text in machines.told] == ["has another kind of processor"] * 2


def test_data_that_has_no_room_is_refused_before_it_is_sent(machines: Machines) -> None:
    examples = 10**11
    huge = torch.zeros(1, 1).expand(examples, 1)  # takes no memory unless something copies it
    data = Federation(huge, torch.zeros(1, dtype=torch.int64).expand(examples), np.array([0, examples]))
    with pytest.raises(InputError, match=r"The object store of node .* is too small: 1200\.00 GB of examples \+ "):
        Ray(data, Task(Dense), Setup(), machines.cluster)


def test_a_run_goes_on_as_elsewhere(machines: Machines, tmp_path: Path) -> None:
    data, learnt = federation((20, 30, 40)), Task(Dense)
    settings: dict[str, Any] = {"algorithms": {"scaffold": fl.Scaffold(batch_size=8)}, "cells": 1}
    for rounds in (2, 4):
        found = fl.run(data, learnt, rounds=rounds, out=tmp_path / "ray", backend="ray", workers=1, **settings)
    plain = fl.run(data, learnt, rounds=4, out=tmp_path / "serial", backend="serial", **settings)
    assert found.json()["weights_sha256"] == plain.json()["weights_sha256"]
    assert machines.ray.is_initialized()  # what was there before is there afterwards


@pytest.mark.usefixtures("machines")
def test_a_federation_is_in_the_object_store_and_not_in_every_process() -> None:
    import ray

    held = backend.pack(backend.for_workers(federation((1000, 2000))))
    again = ray.get(ray.put(held))
    assert not any(array.flags.owndata or array.flags.writeable for array in again[1:])
    assert len(again[1:]) == 3  # examples, labels and the borders between clients


# without a cluster


LONG = """
rounds = 100000
data = { source = "digits", partition = { name = "iid", clients = 3 } }
algorithm = { fedavg = {} }
run = { backend = "ray", workers = 1 }
"""


def started_with(mark: str) -> dict[int, str]:
    """The processes that have this in their environment, and their commands."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark.encode() in (folder / "environ").read_bytes():
                found[int(folder.name)] = (folder / "cmdline").read_text()
    return found


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks at processes as Linux shows them")
@pytest.mark.slow
def test_a_ray_that_was_started_for_a_run_ends_with_it(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'fedloom[ray]'")
    (tmp_path / "long.toml").write_text(LONG)
    mark = f"FEDLOOM_TEST={uuid4()}"
    command = [sys.executable, "-m", "fedloom", "run", "long.toml"]
    environment = dict([*os.environ.items(), tuple(mark.split("="))])
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stderr is not None
    said = next(line for line in process.stderr if "round" in line or "error" in line)
    assert "round" in said
    (folder,) = set(re.findall(r"/tmp/fedloom-ray-\w+", " ".join(started_with(mark).values())))
    assert Path(folder).is_dir()
    os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C in a terminal does: to all of its processes
    process.communicate(timeout=60)
    assert process.returncode == 130
    limit = time.monotonic() + 30
    while started_with(mark) and time.monotonic() < limit:
        time.sleep(0.1)
    assert started_with(mark) == {}
    assert not Path(folder).exists()
