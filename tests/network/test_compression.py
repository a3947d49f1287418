"""Compressed messages between a coordinator and agents: the bits of a simulation, and bytes that a socket confirms."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import uvicorn

from fedloom.experiment.progress import Silent
from fedloom.network.agent.agent import Agent
from fedloom.network.agent.assignment_runner import AssignmentRunner
from fedloom.network.agent.connection import Connection
from fedloom.network.coordinator.http_api import make_app
from fedloom.network.protocol.messages import ClientAnswer
from fedloom.results.result import Result
from tests.conftest import slow_after
from tests.network.conftest import EXPERIMENT, InProcessRun, serial_weights, wait_for, weights
from tests.network.proxy import Proxy

SMALL = {**EXPERIMENT, "rounds": 2, "evaluate": {"every": 1}}
TOPK = {"name": "topk", "keep": 0.05}
MASK = {"name": "randomk", "keep": 0.2, "mask": "round"}


@pytest.mark.parametrize(
    ("compress", "algorithm"),
    slow_after(
        2,
        [
            ({"up": TOPK, "down": "bfloat16"}, {"scaffold": {}}),
            ({"up": {"name": "qsgd", "bits": 3}}, {"fedavg": {"rule": "median"}}),
            ({"up": "eden", "down": "lossless"}, {"fedbn": {}}),
            ({"up": "powersgd"}, {"fedsgd": {}}),
            ({"up": "lossless"}, {"fednova": {}}),
            ({"up": {"name": "randomk", "keep": 0.1}, "down": "float16"}, {"fedadam": {}}),
        ],
    ),
)
def test_the_bits_are_those_of_the_serial_backend(
    tmp_path: Path, compress: dict[str, Any], algorithm: dict[str, Any]
) -> None:
    values = {**SMALL, "algorithm": algorithm, "compress": compress}
    run = InProcessRun(tmp_path / "net", values, {}, {})
    assert run.run(Silent()).status == "done", run.said
    assert weights(tmp_path / "net") == serial_weights(values, tmp_path / "serial")
    net, serial = (Result.read(tmp_path / folder).rows("clients") for folder in ("net", "serial"))
    assert sorted(map(str, net)) == sorted(map(str, serial)) != []


def test_a_restart_continues_with_what_agents_held_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {**SMALL, "rounds": 3, "compress": {"up": TOPK}}
    train, asked = AssignmentRunner.train, []

    def crash_in_round_two(runner: Any, assignment: Any, one: Any, write: Any) -> Any:
        asked.append((assignment.round, one.client))
        if asked[-1] == (2, 3) and asked.count((2, 3)) == 1:
            raise KeyboardInterrupt
        return train(runner, assignment, one, write)

    monkeypatch.setattr(AssignmentRunner, "train", crash_in_round_two)
    with pytest.raises(KeyboardInterrupt):
        InProcessRun(tmp_path / "net", values, {}, {}).run(Silent())
    InProcessRun(tmp_path / "net", values, {}, {}).run(Silent())
    assert asked.count((2, 0)) == 1
    assert weights(tmp_path / "net") == serial_weights(values, tmp_path / "serial")


@pytest.mark.slow
def test_a_mask_for_all_clients_composes_with_masks_that_cancel(tmp_path: Path) -> None:
    secure = {"secure_aggregation": {"min_clients": 3, "threshold": 0.67}}
    values = {**SMALL, "algorithm": {"fedavg": {"weights": "uniform"}}, "compress": {"up": MASK}}
    values |= {"evaluate": {"splits": [], "server": []}}
    run = InProcessRun(tmp_path / "net", {**values, "privacy": secure}, {}, {}, {}, {})
    assert run.run(Silent()).status == "done", run.said
    serial_weights(values, tmp_path / "serial")
    found, plain = (Result.read(tmp_path / folder).weights("fedavg", 1)["model"] for folder in ("net", "serial"))
    for name, leaf in plain.items():
        torch.testing.assert_close(found[name], leaf, rtol=0, atol=1e-5)


@pytest.mark.parametrize("damage", slow_after(2, ["values", "missing", "gaps", "twice", "unasked", "not finite"]))
def test_a_damaged_answer_costs_its_client_the_round_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    train = AssignmentRunner.train

    def spoil(runner: Any, assignment: Any, one: Any, write: Any) -> Any:
        (answer,) = train(runner, assignment, one, write)
        return [spoilt(answer, damage)] if one.client == 1 else [answer]

    monkeypatch.setattr(AssignmentRunner, "train", spoil)
    values = SMALL if damage == "unasked" else {**SMALL, "compress": {"up": TOPK}}
    run = InProcessRun(tmp_path / "net", {**values, "rounds": 1}, {}, {}, quorum=0.5)
    run.run(Silent())
    code = "not-finite" if damage == "not finite" else "compressed"
    assert any("the answer of client 1 was rejected" in line and code in line for line in run.said), run.said
    rows = [row for row in Result.read(tmp_path / "net").rows("participants") if row["round"] == 1]
    assert len(rows) == 3


def spoilt(answer: ClientAnswer, damage: str) -> ClientAnswer:
    if damage == "unasked":
        return replace(answer, parts={"model": {"values": torch.ones(3)}})
    parts = dict(answer.parts["model"])
    if damage == "missing":
        return replace(answer, parts={})
    if damage == "twice":
        groups = {"model": {**answer.update.groups["model"], "out.bias": torch.zeros(1, 10)}}
        return replace(answer, update=replace(answer.update, groups=groups))
    if damage == "values":
        parts["values"] = parts["values"][:-1]
    elif damage == "gaps":
        parts["gaps"] = torch.full_like(parts["gaps"], 254)
    else:
        parts["values"] = parts["values"] * torch.inf
    return replace(answer, parts={"model": parts})


class CountingProxy(Proxy):
    """Counts what passes in each direction."""

    def __init__(self, target: int) -> None:
        self.up = self.down = 0
        super().__init__(target)

    def _pump(self, one: Any, other: Any, upwards: bool) -> None:
        try:
            while piece := one.recv(1 << 16):
                if upwards:
                    self.up += len(piece)
                else:
                    self.down += len(piece)
                other.sendall(piece)
        except OSError:
            pass
        finally:
            self._close(one)
            self._close(other)


class SocketRun(InProcessRun):
    """A run whose agents speak plain HTTP through a counting proxy."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.answers: list[int] = []  # bytes on the socket for each answer
        self.work: list[int] = []  # and for each assignment

    @contextmanager
    def _connected(self) -> Iterator[None]:
        server = uvicorn.Server(uvicorn.Config(make_app(self.pool), port=0, log_level="error", lifespan="off"))
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        wait_for(lambda: server.started)
        self.proxy = CountingProxy(server.servers[0].sockets[0].getsockname()[1])
        try:
            with super()._connected():
                yield
        finally:
            self.proxy.close()
            server.should_exit = True
            thread.join()

    def agent(self, number: int) -> Agent:
        agent = super().agent(number)
        agent.connection = Connection(f"http://127.0.0.1:{self.proxy.port}", agent.signer, True)
        post, take = agent.connection.post, agent.parcels.next_assignment

        def counted_post(path: str, message: Any) -> Any:
            before = self.proxy.up
            reply = post(path, message)
            if path == "/v1/answers":
                self.answers.append(self.proxy.up - before)
            return reply

        def counted_take(connection: Connection) -> Any:
            before = self.proxy.down
            found = take(connection)
            self.work.append(self.proxy.down - before)
            return found

        agent.connection.post = counted_post  # type: ignore[method-assign]
        agent.parcels.next_assignment = counted_take  # type: ignore[method-assign]
        return agent


@pytest.mark.parametrize(
    "compress", slow_after(1, [{"up": {"name": "qsgd", "bits": 8}, "down": "float16"}, {"up": "lossless"}])
)
def test_the_bytes_of_a_run_are_those_on_the_socket(tmp_path: Path, compress: dict[str, Any]) -> None:
    wide = {"model": "mlp", "args": {"features": 64, "hidden": [1500], "classes": 10}}
    values = {**SMALL, "task": wide, "rounds": 1, "evaluate": {"splits": [], "server": []}, "compress": compress}
    run = SocketRun(tmp_path / "net", values, {}, {})
    assert run.run(Silent()).status == "done", run.said
    rows = Result.read(tmp_path / "net").rows("participants")
    up, down = (sorted(row[name] for row in rows) for name in ("bytes_up", "bytes_down"))
    assert min(up) > 100_000
    for stored, seen in zip(up, sorted(run.answers), strict=True):
        assert stored == pytest.approx(seen, rel=0.01)
    # an agent receives once what its two clients share
    assert sum(down) == pytest.approx(sum(run.work), rel=0.01)
    serial_weights(values, tmp_path / "serial")
    rows = Result.read(tmp_path / "serial").rows("participants")
    for stored, simulated in zip(up, sorted(row["bytes_up"] for row in rows), strict=True):
        assert simulated == pytest.approx(stored, rel=0.01)
