"""The ServerApp with nodes that answer in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedloom[flower]'")

from fedloom.errors import InputError
from fedloom.experiment.experiment_file import parse
from fedloom.flower import server
from fedloom.flower.client import answer
from fedloom.flower.messages import BODIES, HEADER, Payload
from fedloom.network.protocol.tensors import Parcel, read_parcel
from tests.flower.conftest import THREE, VALUES, FakeGrid, Grids
from tests.network.conftest import serial_weights, weights


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "POLL_SECONDS", 0.001)
    monkeypatch.setattr(server, "NODE_POLL_SECONDS", 0.0)


def run(fake_grid: FakeGrid, app: Path, folder: Path, **config: Any) -> None:
    server.run(app, fake_grid, {"out": str(folder), **config})  # type: ignore[arg-type]


def changed(payload: Payload, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Payload:
    """A node's payload with other tensors in its answers."""
    bodies = {}
    for name, body in payload.bodies.items():
        header, tensors = read_parcel(body)
        bodies[name] = Parcel(header, {path: change(path, leaf) for path, leaf in tensors.items()}).whole
    return Payload(payload.header, bodies)


def participants(folder: Path) -> list[tuple[int, tuple[str, ...]]]:
    from fedloom.experiment.store import Store

    with Store(folder, read_only=True) as store:
        found: dict[int, list[str]] = {}
        for row in store.rows("participants"):
            found.setdefault(row["round"], []).append(row["client"])
        return [(round, tuple(sorted(clients))) for round, clients in sorted(found.items())]


class Nested(Payload):
    """A payload whose header is nested deeper than JSON's reader goes."""

    def to_record(self) -> Any:
        from flwr.app import ArrayRecord, ConfigRecord, RecordDict

        return RecordDict({HEADER: ConfigRecord({"json": "[" * 100_000}), BODIES: ArrayRecord({})})


def test_all_verbs_give_the_bits_of_the_serial_backend(fake_grid: Grids, tmp_path: Path) -> None:
    values = {**VALUES, "algorithm": {**THREE, "ditto": {}}, "evaluate": {"every": 2, "server": ["test"]}}
    made, app = fake_grid(values)
    run(made, app, tmp_path / "net")
    assert weights(tmp_path / "net") == serial_weights(values, tmp_path / "serial")


def test_a_process_for_every_message_gives_the_same_bits_and_leaves_no_old_states(
    fake_grid: Grids, tmp_path: Path
) -> None:
    values = {**VALUES, "rounds": 5, "algorithm": {"scaffold": {}}}
    made, app = fake_grid(values)
    for number in range(2):
        config = {"partition-id": number, "num-partitions": 2, "state": str(tmp_path / f"alone-{number}")}
        made.nodes[number + 7] = lambda payload, config=config: answer(app, payload, config)  # type: ignore[misc]
    run(made, app, tmp_path / "net")
    assert weights(tmp_path / "net") == serial_weights(values, tmp_path / "serial")
    kept = list((tmp_path / "alone-0" / "own").rglob("*.safetensors"))
    assert 2 <= len(kept) <= 2 * 4, "versions that can never count again are deleted"


def test_a_bad_answer_is_left_out_and_its_node_is_told(fake_grid: Grids, tmp_path: Path) -> None:
    made, app = fake_grid({**VALUES, "cohort": {"quorum": 0.5, "deadline": "1m"}})
    honest = made.nodes[8]

    def poisoned(payload: Payload) -> Payload:
        def poison(path: str, leaf: torch.Tensor) -> torch.Tensor:
            return leaf * torch.nan if "/update/" in path and path.startswith("1/") else leaf

        return changed(honest(payload), poison) if "ask" in payload.header else honest(payload)

    made.nodes[8] = poisoned
    run(made, app, tmp_path / "net")
    rounds = participants(tmp_path / "net")
    assert rounds == [(1, ("0", "2", "3")), (2, ("0", "2", "3"))]
    told = [why for node, payload in made.payloads for why in payload.header.get("rejected", []) if node == 8]
    assert len(told) == 1
    assert "client 1, not-finite" in told[0]
    events = [json.loads(line) for line in (tmp_path / "state-1" / "audit.jsonl").read_text().splitlines()]
    assert any(event["event"] == "rejected" and "not-finite" in event["why"] for event in events)


def test_a_node_whose_app_fails_and_one_that_never_answers_do_not_stop_the_round(
    fake_grid: Grids, tmp_path: Path
) -> None:
    made, app = fake_grid({**VALUES, "cohort": {"quorum": 0.5, "deadline": "3s"}})
    honest = made.nodes[8]
    asked: list[str] = []

    def broken(payload: Payload) -> Any:
        if "ask" not in payload.header:
            return honest(payload)
        asked.append(payload.header["ask"]["id"])
        if len(asked) == 1:
            raise RuntimeError("out of memory")
        return None

    made.nodes[8] = broken
    run(made, app, tmp_path / "net")
    assert len(asked) == 2
    assert participants(tmp_path / "net") == [(1, ("0", "2")), (2, ("0", "2"))]


@pytest.mark.parametrize(
    "nonsense", [Payload({"failure": ""}), Payload({"failures": [{"x" * 50: 1}] * 2000}), Nested({})]
)
def test_nonsense_does_not_end_the_server(nonsense: Payload, fake_grid: Grids, tmp_path: Path) -> None:
    made, app = fake_grid({**VALUES, "rounds": 1, "cohort": {"quorum": 0.5, "deadline": "1m"}})
    honest = made.nodes[8]
    made.nodes[8] = lambda payload: nonsense if "ask" in payload.header else honest(payload)
    made.nodes[9] = lambda payload: nonsense  # it does not even say who it is
    run(made, app, tmp_path / "net")
    assert participants(tmp_path / "net") == [(1, ("0", "2"))]


def test_a_node_that_comes_back_under_another_number_goes_on_with_its_state(fake_grid: Grids, tmp_path: Path) -> None:
    values = {**VALUES, "rounds": 3, "algorithm": {"scaffold": {}}}
    made, app = fake_grid(values)
    worker, asks = made.nodes[8], 0

    def restarts(payload: Payload) -> Any:
        nonlocal asks
        asks += "ask" in payload.header
        if asks < 2:
            return worker(payload)
        del made.nodes[8]  # it takes the message with it
        made.nodes[99] = worker
        return None

    made.nodes[8] = restarts
    run(made, app, tmp_path / "net")
    assert weights(tmp_path / "net") == serial_weights(values, tmp_path / "serial")


def test_a_run_that_was_broken_off_goes_on(fake_grid: Grids, tmp_path: Path) -> None:
    values = {**VALUES, "rounds": 3, "algorithm": {"scaffold": {}}}
    made, app = fake_grid(values)
    worker, asks = made.nodes[7], 0

    class PowerCut(BaseException):
        pass

    def cut(payload: Payload) -> Payload:
        nonlocal asks
        asks += "ask" in payload.header
        if asks == 2:
            raise PowerCut
        return worker(payload)

    made.nodes[7] = cut
    with pytest.raises(PowerCut):
        run(made, app, tmp_path / "net")
    made.nodes[7] = worker
    run(made, app, tmp_path / "net")
    assert weights(tmp_path / "net") == serial_weights(values, tmp_path / "serial")


def test_a_site_that_refuses_is_named(
    fake_grid: Grids, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, app = fake_grid({**VALUES, "cohort": {"start_when": 1}})
    site = tmp_path / "kerry.toml"
    site.write_text('[data]\nsource = "digits"\n[policy]\nalgorithms = ["scaffold"]\n')
    del made.nodes[7]
    made.nodes[8], stays = (lambda payload: answer(app, payload, {"site": str(site)})), made.nodes[8]
    made.nodes[9] = stays

    def end(self: server.FlowerRun, text: str) -> None:
        raise InputError(text)  # it would wait for other sites

    monkeypatch.setattr(server.FlowerRun, "_tell_once", end)
    with pytest.raises(InputError, match=r"Waiting for agents whose data and \[site\] hosts fit together"):
        run(made, app, tmp_path / "net")  # the one that is left has half of the clients
    said = capsys.readouterr().out
    assert "node 8 cannot take part: This site does not take part: the policy does not allow the algorithm" in said


def test_asynchronous_rounds_are_refused(tmp_path: Path) -> None:
    experiment = parse({"cohort": {"mode": "async"}})
    with pytest.raises(InputError, match="a message over Flower belongs to one round"):
        server.FlowerRun(experiment, tmp_path, FakeGrid, print)  # type: ignore[arg-type]
