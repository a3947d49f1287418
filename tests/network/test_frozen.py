"""Frozen parameters on a network: every agent fetches them once, with the initial weights, and nobody sends them."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom import tree
from fedloom.experiment.plan import Plan
from fedloom.experiment.progress import Silent
from fedloom.network.agent.assignment_runner import AssignmentRunner
from fedloom.network.agent.connection import Connection
from fedloom.network.agent.state_versions import StateVersions
from fedloom.network.coordinator import backend
from fedloom.network.protocol.packed_parcel import pack
from fedloom.results.result import Result
from tests.conftest import slow_after
from tests.network.conftest import EXPERIMENT, InProcessRun, serial_weights, weights

CODE = """
from torch import nn

def adapted():
    backbone = nn.Sequential(nn.Linear(64, 400), nn.Tanh()).requires_grad_(False)
    return nn.Sequential(backbone, nn.Linear(400, 10, bias=False))
"""
FROZEN, LEARNT = 4 * (64 * 400 + 400), 4 * 400 * 10  # bytes
HEADERS = 2000  # the most bytes of a message besides its numbers


@pytest.fixture
def values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """An experiment with a model of one's own, and what lets agents run it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(CODE)
    return {**EXPERIMENT, "rounds": 3, "task": {"model": "net.py:adapted"}, "evaluate": {"every": 1}}


def sites(folder: Path, values: dict[str, Any], count: int = 2, **edits: Any) -> InProcessRun:
    own_code = {"models": ["net.py:adapted"], "code": {"net.py": hashlib.sha256(CODE.encode()).hexdigest()}}
    run = InProcessRun(folder, values, *[own_code] * count, **edits)
    for number in range(count):
        site = folder.parent / f"state-{number}"
        site.mkdir(exist_ok=True)
        (site / "net.py").write_text(CODE)
    return run


@pytest.mark.parametrize(
    "more",
    slow_after(
        1,
        [
            {"algorithm": {"scaffold": {}, "ditto": {}}},
            {"algorithm": {"fedavg": {}, "peer": {}}, "seeds": [1, 2]},
            {"algorithm": {"fedavg": {}}, "task": {"model": "net.py:adapted", "seed": "run"}, "seeds": [1, 2]},
            {"algorithm": {"fedavg": {}}, "compress": {"up": {"name": "topk", "keep": 0.1}, "down": "bfloat16"}},
        ],
    ),
    ids=str,
)
def test_the_bits_are_those_of_the_serial_backend(values: dict[str, Any], more: dict[str, Any], tmp_path: Path) -> None:
    run = sites(tmp_path / "net", {**values, **more})
    assert run.run(Silent()).status == "done", run.said
    assert weights(tmp_path / "net") == serial_weights({**values, **more}, tmp_path / "serial")


def test_the_frozen_part_is_fetched_once_by_every_agent_and_never_again(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched, stream = [], Connection.stream
    monkeypatch.setattr(Connection, "stream", lambda self, path: fetched.append(path) or stream(self, path))
    values |= {"algorithm": {"fedavg": {}, "ditto": {}}}
    assert sites(tmp_path / "net", values).run(Silent()).status == "done"
    assert sum("/v1/tensors/" in path for path in fetched) == 2
    # four clients at two sites: each site receives the frozen part once in each cell's count
    rows = [row for row in Result.read(tmp_path / "net").rows("participants") if row["algorithm"] == "fedavg"]
    down = {(row["round"], row["client"]): row["bytes_down"] for row in rows}
    first, later = ([size for (round, _), size in down.items() if (round == 1) is begins] for begins in (True, False))
    assert sorted(size >= FROZEN for size in first) == [False, False, True, True]
    assert 2 * FROZEN + 2 * LEARNT <= sum(first) <= 2 * FROZEN + 2 * (LEARNT + HEADERS)
    assert len(later) == 8
    assert all(LEARNT <= 2 * size <= LEARNT + HEADERS for size in later)  # two clients share a message
    assert all(LEARNT <= row["bytes_up"] <= LEARNT + HEADERS for row in rows)
    for path in (tmp_path / "state-0").rglob("*.safetensors"):
        assert path.stat().st_size <= LEARNT + HEADERS, path  # what clients of Ditto keep
    fetched.clear()
    assert sites(tmp_path / "net", {**values, "rounds": 4}).run(Silent()).status == "done"
    assert fetched
    assert not any("/v1/tensors/" in path for path in fetched)


def test_frozen_parameters_are_not_taken_back(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = AssignmentRunner.train

    def with_frozen(runner: Any, assignment: Any, one: Any, write: Any) -> Any:
        (answer,) = train(runner, assignment, one, write)
        model = {**answer.update.groups["model"], "0.0.bias": torch.zeros(1, 400)}
        return (
            [replace(answer, update=replace(answer.update, groups={"model": model}))] if one.client == 1 else [answer]
        )

    monkeypatch.setattr(AssignmentRunner, "train", with_frozen)
    run = sites(tmp_path / "net", {**values, "rounds": 1}, quorum=0.5)
    run.run(Silent())
    assert any("the answer of client 1 was rejected" in line and "0.0.bias" in line for line in run.said), run.said


def test_an_agent_refuses_work_on_other_frozen_parameters(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "pack", lambda groups, link, frozen: pack(groups, link, "0" * 64))
    run = sites(tmp_path / "net", {**values, "rounds": 1, "evaluate": {"splits": []}})
    with pytest.raises(Exception, match="other frozen parameters than those that it sent first"):
        run.run(Silent())


def test_states_that_earlier_versions_kept_lose_their_frozen_parameters(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, frozen = StateVersions.save, {}

    def as_before(self: Any, cell: str, client: int, ticket: Any, own: Any) -> None:
        save(self, cell, client, ticket, {**own, "personal": {**frozen, **own["personal"]}})

    values |= {"algorithm": {"ditto": {}}}
    wanted = serial_weights({**values, "rounds": 2}, tmp_path / "serial")
    run = sites(tmp_path / "net", {**values, "rounds": 1})
    frozen |= Plan.of(run.experiment).task(1).frozen
    with monkeypatch.context() as before:
        before.setattr(StateVersions, "save", as_before)
        run.run(Silent())
    sizes = [path.stat().st_size for path in (tmp_path / "state-0").rglob("1-*.safetensors")]
    assert min(sizes) > FROZEN
    assert sites(tmp_path / "net", {**values, "rounds": 2}).run(Silent()).status == "done"
    assert weights(tmp_path / "net") == wanted
    model = tree.select(Result.read(tmp_path / "net").weights("ditto")["model"], frozen)
    assert tree.sha256(model) == tree.sha256(frozen)
