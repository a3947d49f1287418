"""The coordinator's port, and what `fedloom serve` prints."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import httpx
import pytest

from fedloom.errors import InputError
from fedloom.experiment.experiment_file import parse
from fedloom.network.agent.connection import Connection
from fedloom.network.coordinator.serve import HttpsRun, HttpsServer
from tests.network.conftest import EXPERIMENT, World


def test_a_port_that_is_taken_is_named(world: World) -> None:
    with HttpsServer(world.pool, "127.0.0.1", 0) as server:
        assert httpx.get(f"http://127.0.0.1:{server.number}/v1/status").json()["accepted"] == 0
        with pytest.raises(InputError, match=f"--listen 127.0.0.1:{server.number} cannot be used"):
            HttpsServer(world.pool, "127.0.0.1", server.number).socket.listen()


def test_polls_end_when_the_port_closes(world: World) -> None:
    agent = world.speaker()
    agent.hello()
    replies: list[int] = []
    with HttpsServer(world.pool, "127.0.0.1", 0) as server:
        connection = Connection(f"http://127.0.0.1:{server.number}", agent.signer, True)
        asked = threading.Event()
        mark_seen = world.pool.mark_seen

        def seen(*given: str, **more: str) -> object:
            asked.set()
            return mark_seen(*given, **more)

        world.pool.mark_seen = seen  # type: ignore[assignment, method-assign]

        def poll() -> None:
            with connection.stream("/v1/work") as response:
                replies.append(response.status_code)

        thread = threading.Thread(target=poll)
        thread.start()
        assert asked.wait(30)
    thread.join(30)
    assert replies == [204]
    connection.close()


def test_the_commands_to_join_are_printed_with_a_token_for_every_missing_agent(tmp_path: Path) -> None:
    said: list[str] = []
    experiment = parse({**EXPERIMENT, "cohort": {"start_when": 2}})
    run = HttpsRun(experiment, tmp_path / "run", port=0, tls=False, tell=said.append)
    with run._connected():
        pass
    run.server.socket.close()
    run.ledger.close()
    run._held.close()
    assert said[0] == f"Serving {run.url} without TLS: use it only behind a proxy that has TLS."
    assert len([line for line in said if line.startswith(f"To join (once): fedloom join {run.url}")]) == 2


def test_closing_idle_connections_is_no_error_to_show(world: World, caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("uvicorn.error")
    with HttpsServer(world.pool, "127.0.0.1", 0):
        logger.addHandler(caplog.handler)  # uvicorn's lines do not reach the root
        try:
            for text in ("Cancel %s running task(s), timeout graceful shutdown exceeded", "%s is wrong"):
                logger.error(text, 0)
        finally:
            logger.removeHandler(caplog.handler)
    assert [record.getMessage() for record in caplog.records] == ["0 is wrong"]
