"""The engine over a Grid: the bits of the serial backend, bad answers left out, and a run that goes on."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from multiprocessing.connection import Listener, Pipe
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedloom[flower]'")

from fedloom.errors import InputError
from fedloom.flower import client, server
from fedloom.flower.client import answer
from fedloom.flower.messages import BODIES, HEADER, Letter, NoLetter
from fedloom.flower.paths import ADDRESS, data_mark, partition, state_folder
from fedloom.network.agent.enrolment import claimed
from fedloom.network.protocol.messages import Outgoing, read_answer
from fedloom.network.protocol.tensors import read_parcel
from tests.flower.conftest import THREE, VALUES, Room
from tests.network.conftest import serial_weights, weights

Rooms = Callable[..., tuple[Room, Path]]


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "PAUSE", 0.001)
    monkeypatch.setattr(server, "LOOK", 0.0)


def run(room: Room, app: Path, folder: Path, **config: Any) -> None:
    server.run(app, room, {"out": str(folder), **config})  # type: ignore[arg-type]


def changed(letter: Letter, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Letter:
    """A node's letter with other tensors in its answers."""
    bodies = {}
    for name, body in letter.bodies.items():
        header, tensors = read_parcel(body)
        found, _ = read_answer(header, tensors)
        outgoing = Outgoing(found.ask, list(found.results), {path: change(path, t) for path, t in tensors.items()})
        bodies[name] = outgoing.parcel().whole
    return Letter(letter.header, bodies)


def test_all_verbs_give_the_bits_of_the_serial_backend(room: Rooms, tmp_path: Path) -> None:
    values = {**VALUES, "algorithm": {**THREE, "ditto": {}}, "evaluate": {"every": 2, "server": ["test"]}}
    made, app = room(values)
    run(made, app, tmp_path / "net")
    assert weights(tmp_path / "net") == serial_weights(values, tmp_path / "serial")


def test_a_process_for_every_message_gives_the_same_bits_and_leaves_no_old_states(room: Rooms, tmp_path: Path) -> None:
    values = {**VALUES, "rounds": 5, "algorithm": {"scaffold": {}}}
    made, app = room(values)
    for number in range(2):
        config = {"partition-id": number, "num-partitions": 2, "state": str(tmp_path / f"alone-{number}")}
        made.nodes[number + 7] = lambda letter, config=config: answer(app, letter, config)  # type: ignore[misc]
    run(made, app, tmp_path / "net")
    assert weights(tmp_path / "net") == serial_weights(values, tmp_path / "serial")
    kept = list((tmp_path / "alone-0" / "own").rglob("*.safetensors"))
    assert 2 <= len(kept) <= 2 * 4, "versions that can never count again are deleted"


def test_a_bad_answer_is_left_out_and_its_node_is_told(room: Rooms, tmp_path: Path) -> None:
    made, app = room({**VALUES, "cohort": {"quorum": 0.5, "deadline": "1m"}})
    honest = made.nodes[8]

    def poisoned(letter: Letter) -> Letter:
        def poison(path: str, leaf: torch.Tensor) -> torch.Tensor:
            return leaf * torch.nan if "/update/" in path and path.startswith("1/") else leaf

        return changed(honest(letter), poison) if "ask" in letter.header else honest(letter)

    made.nodes[8] = poisoned
    run(made, app, tmp_path / "net")
    rounds = participants(tmp_path / "net")
    assert rounds == [(1, ("0", "2", "3")), (2, ("0", "2", "3"))]
    told = [why for node, letter in made.letters for why in letter.header.get("rejected", []) if node == 8]
    assert len(told) == 1
    assert "client 1, not-finite" in told[0]
    events = [json.loads(line) for line in (tmp_path / "state-1" / "audit.jsonl").read_text().splitlines()]
    assert any(event["event"] == "rejected" and "not-finite" in event["why"] for event in events)


def participants(folder: Path) -> list[tuple[int, tuple[str, ...]]]:
    from fedloom.experiment.store import Store

    with Store(folder, read_only=True) as store:
        found: dict[int, list[str]] = {}
        for row in store.rows("participants"):
            found.setdefault(row["round"], []).append(row["client"])
        return [(round, tuple(sorted(clients))) for round, clients in sorted(found.items())]


def test_a_node_whose_app_fails_and_one_that_never_answers_do_not_stop_the_round(room: Rooms, tmp_path: Path) -> None:
    made, app = room({**VALUES, "cohort": {"quorum": 0.5, "deadline": "3s"}})
    honest = made.nodes[8]
    asked: list[str] = []

    def broken(letter: Letter) -> Any:
        if "ask" not in letter.header:
            return honest(letter)
        asked.append(letter.header["ask"]["id"])
        if len(asked) == 1:
            raise RuntimeError("out of memory")
        return None

    made.nodes[8] = broken
    run(made, app, tmp_path / "net")
    assert len(asked) == 2
    assert participants(tmp_path / "net") == [(1, ("0", "2")), (2, ("0", "2"))]


class Nested(Letter):
    """A letter whose header is nested deeper than JSON's reader goes."""

    def content(self) -> Any:
        from flwr.app import ArrayRecord, ConfigRecord, RecordDict

        return RecordDict({HEADER: ConfigRecord({"json": "[" * 100_000}), BODIES: ArrayRecord({})})


@pytest.mark.parametrize(
    "nonsense", [Letter({"failure": ""}), Letter({"failures": [{"x" * 50: 1}] * 2000}), Nested({})]
)
def test_nonsense_does_not_end_the_server(nonsense: Letter, room: Rooms, tmp_path: Path) -> None:
    made, app = room({**VALUES, "rounds": 1, "cohort": {"quorum": 0.5, "deadline": "1m"}})
    honest = made.nodes[8]
    made.nodes[8] = lambda letter: nonsense if "ask" in letter.header else honest(letter)
    made.nodes[9] = lambda letter: nonsense  # it does not even say who it is
    run(made, app, tmp_path / "net")
    assert participants(tmp_path / "net") == [(1, ("0", "2"))]


def test_a_node_that_comes_back_under_another_number_goes_on_with_its_state(room: Rooms, tmp_path: Path) -> None:
    values = {**VALUES, "rounds": 3, "algorithm": {"scaffold": {}}}
    made, app = room(values)
    worker, asks = made.nodes[8], 0

    def restarts(letter: Letter) -> Any:
        nonlocal asks
        asks += "ask" in letter.header
        if asks < 2:
            return worker(letter)
        del made.nodes[8]  # it takes the message with it
        made.nodes[99] = worker
        return None

    made.nodes[8] = restarts
    run(made, app, tmp_path / "net")
    assert weights(tmp_path / "net") == serial_weights(values, tmp_path / "serial")


def test_a_run_that_was_broken_off_goes_on(room: Rooms, tmp_path: Path) -> None:
    values = {**VALUES, "rounds": 3, "algorithm": {"scaffold": {}}}
    made, app = room(values)
    worker, asks = made.nodes[7], 0

    class PowerCut(BaseException):
        pass

    def cut(letter: Letter) -> Letter:
        nonlocal asks
        asks += "ask" in letter.header
        if asks == 2:
            raise PowerCut
        return worker(letter)

    made.nodes[7] = cut
    with pytest.raises(PowerCut):
        run(made, app, tmp_path / "net")
    made.nodes[7] = worker
    run(made, app, tmp_path / "net")
    assert weights(tmp_path / "net") == serial_weights(values, tmp_path / "serial")


def test_a_site_that_refuses_is_named(room: Rooms, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made, app = room({**VALUES, "cohort": {"start_when": 1}})
    site = tmp_path / "kerry.toml"
    site.write_text('[data]\nsource = "digits"\n[policy]\nalgorithms = ["scaffold"]\n')
    del made.nodes[7]
    made.nodes[8], stays = (lambda letter: answer(app, letter, {"site": str(site)})), made.nodes[8]
    made.nodes[9] = stays
    with pytest.raises(InputError, match="do not make up one numbering"):
        run(made, app, tmp_path / "net")  # the one that is left has half of the clients
    said = capsys.readouterr().out
    assert "node 8 does not take part: This site does not take part: the policy does not allow the algorithm" in said


def test_nonsense_does_not_end_a_worker(room: Rooms) -> None:
    made, _ = room()
    for header, words in (
        ({"plan": {}}, "does not have the form"),
        ({"nonsense": 1}, "KeyError"),
        ({"run": "unknown", "ask": {}}, "a run that it does not know"),
    ):
        assert words in made.nodes[7](Letter(header)).header["failure"]


def test_a_letter_is_the_same_after_either_way() -> None:
    letter = Letter({"a": [1, "é"]}, {"x": b"\0\1" * 1000, "y": b"z"})
    assert Letter.read(letter.content()) == letter
    here, there = Pipe()
    letter.send(here)
    assert Letter.receive(there) == letter


def test_a_message_of_somebody_else_is_refused() -> None:
    from flwr.app import ConfigRecord, RecordDict

    with pytest.raises(NoLetter, match="not one of fedloom's"):
        Letter.read(RecordDict({"config": ConfigRecord({"lr": 0.1})}))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "--node-config must say whose data this is"),
        ({"partition-id": 2, "num-partitions": 2}, "partition-id=2 and num-partitions=2"),
        ({"partition-id": 0}, "num-partitions=None"),
    ],
)
def test_a_wrong_node_config_is_told_to_the_server(config: dict[str, Any], words: str, tmp_path: Path) -> None:
    assert words in answer(tmp_path, Letter({}), config).header["failure"]


def test_a_worker_that_is_not_ready_yet_is_waited_for(
    room: Rooms, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, app = room()
    config = {"partition-id": 0, "num-partitions": 2, "state": str(tmp_path / "mine")}
    letter, starting = Letter({"run": "unknown"}), ExitStack()
    starting.enter_context(claimed(tmp_path / "mine"))
    with monkeypatch.context() as patience:
        patience.setattr(client, "PATIENCE", 0.0)
        assert "Another agent is running" in answer(app, letter, config).header["failure"]
    timer = threading.Timer(0.7, starting.close)
    timer.start()
    assert "a run that it does not know" in answer(app, letter, config).header["failure"]
    timer.join()


def test_a_worker_that_was_started_for_other_data_is_not_asked(room: Rooms, tmp_path: Path) -> None:
    _, app = room()
    config = {"partition-id": 0, "num-partitions": 2, "state": str(tmp_path / "mine")}
    mark, letter = data_mark(app, config), Letter({"run": "unknown"})
    (tmp_path / "mine").mkdir()
    with TemporaryDirectory() as short, Listener(f"{short}/worker", "AF_UNIX", authkey=b"secret") as listener:
        address = {"socket": f"{short}/worker", "secret": b"secret".hex()}

        def asked(data: str) -> str:
            def work() -> None:
                with suppress(EOFError), listener.accept() as connection:
                    Letter.receive(connection)
                    Letter({"failure": "I was asked"}).send(connection)

            (tmp_path / "mine" / ADDRESS).write_text(json.dumps({**address, "data": data}))
            worker = threading.Thread(target=work)
            worker.start()
            found = answer(app, letter, config).header["failure"]
            worker.join()
            return str(found)

        assert "started for an app with other data" in asked("other")
        assert asked(mark) == "I was asked"
    assert "a run that it does not know" in answer(app, letter, config).header["failure"]  # nobody listens any more


def test_data_is_told_apart_by_what_it_is_made_of(tmp_path: Path) -> None:
    def mark(loader: str = "a", **config: Any) -> str:
        (tmp_path / "mine.py").write_text(loader)
        (tmp_path / "experiment.toml").write_text('[data]\nsource = "mine.py:load"\n')
        return data_mark(tmp_path, {"partition-id": 0, "num-partitions": 2, **config})

    assert mark() == mark()
    assert mark() != mark("b")
    assert mark(site="kerry.toml") == ""


def test_where_a_node_keeps_its_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    assert state_folder({"site": "/data/kerry.toml"}) == Path("/data/kerry-state")
    assert state_folder({"site": "/data/kerry.toml", "state": "/var/kerry"}) == Path("/var/kerry")
    config = {"partition-id": 1, "num-partitions": 3}
    assert partition(config) == (1, 3)
    assert state_folder(config) == tmp_path / "fedloom" / "partitions" / "1-of-3"
