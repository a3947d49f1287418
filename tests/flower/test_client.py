"""What a ClientApp does with and without a worker."""

from __future__ import annotations

import json
import threading
from contextlib import ExitStack, suppress
from multiprocessing.connection import Listener
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedloom[flower]'")

from fedloom.flower import client
from fedloom.flower.client import answer
from fedloom.flower.messages import Payload
from fedloom.flower.paths import ADDRESS, data_mark
from fedloom.network.agent.enrolment import locked_state
from tests.flower.conftest import Grids


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "--node-config must say whose data this is"),
        ({"partition-id": 2, "num-partitions": 2}, "partition-id=2 and num-partitions=2"),
        ({"partition-id": 0}, "num-partitions=None"),
    ],
)
def test_a_wrong_node_config_is_told_to_the_server(config: dict[str, Any], words: str, tmp_path: Path) -> None:
    assert words in answer(tmp_path, Payload({}), config).header["failure"]


def test_a_worker_that_is_not_ready_yet_is_waited_for(
    fake_grid: Grids, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, app = fake_grid()
    config = {"partition-id": 0, "num-partitions": 2, "state": str(tmp_path / "mine")}
    payload, starting = Payload({"run": "unknown"}), ExitStack()
    starting.enter_context(locked_state(tmp_path / "mine"))
    with monkeypatch.context() as patience:
        patience.setattr(client, "WORKER_START_SECONDS", 0.0)
        assert "Another agent is running" in answer(app, payload, config).header["failure"]
    timer = threading.Timer(0.7, starting.close)
    timer.start()
    assert "work of an unknown run" in answer(app, payload, config).header["failure"]
    timer.join()


def test_a_worker_that_was_started_for_other_data_is_not_asked(fake_grid: Grids, tmp_path: Path) -> None:
    _, app = fake_grid()
    config = {"partition-id": 0, "num-partitions": 2, "state": str(tmp_path / "mine")}
    mark, payload = data_mark(app, config), Payload({"run": "unknown"})
    (tmp_path / "mine").mkdir()
    with TemporaryDirectory() as short, Listener(f"{short}/worker", "AF_UNIX", authkey=b"secret") as listener:
        address = {"socket": f"{short}/worker", "secret": b"secret".hex()}

        def asked(data: str) -> str:
            def work() -> None:
                with suppress(EOFError), listener.accept() as connection:
                    Payload.receive(connection)
                    Payload({"failure": "I was asked"}).send(connection)

            (tmp_path / "mine" / ADDRESS).write_text(json.dumps({**address, "data": data}))
            worker = threading.Thread(target=work)
            worker.start()
            found = answer(app, payload, config).header["failure"]
            worker.join()
            return str(found)

        assert "started for an app with other data" in asked("other")
        assert asked(mark) == "I was asked"
    assert "work of an unknown run" in answer(app, payload, config).header["failure"]  # nobody listens any more
