"""The coordinator's port, its tokens, and the folder of a run of `fedloom serve`."""

from __future__ import annotations

import threading
from pathlib import Path

import httpx
import pytest

from fedloom.errors import InputError, StoreError
from fedloom.experiment.experiment_file import parse
from fedloom.experiment.run_folder import locked
from fedloom.network.agent.connection import Connection
from fedloom.network.coordinator.serve import (
    HttpsRun,
    HttpsServer,
    coordinator_ledger,
    invite,
    operator_token,
    prepare_folder,
)
from fedloom.network.protocol.token import Token
from tests.network.conftest import EXPERIMENT, World


def test_every_token_has_its_own_file_and_is_in_the_ledger_as_a_hash(world: World) -> None:
    world.ledger.set_fact("fingerprint", "ab" * 32)
    first, second = (Token.parse(path.read_text()) for path in invite(world.ledger, 2))
    assert first != second
    assert first.fingerprint == "ab" * 32
    assert world.ledger.unused_tokens() == 2
    assert world.ledger.enrol(first.digest, "kerry", "00" * 32)
    assert world.ledger.unused_tokens() == 1


def test_the_operators_token_stays_until_the_certificate_changes(tmp_path: Path) -> None:
    path, token = operator_token(tmp_path, "ab" * 32)
    assert operator_token(tmp_path, "ab" * 32) == (path, token)
    assert operator_token(tmp_path, "cd" * 32)[1] != token


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

        def seen(*given: str) -> object:
            asked.set()
            return mark_seen(*given)

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


def test_a_fresh_start_moves_the_old_run_aside_unless_a_coordinator_uses_it(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "network").mkdir(parents=True)
    with locked(folder / "network"), pytest.raises(StoreError, match="Another process is running"):
        prepare_folder(folder, fresh=True)
    prepare_folder(folder, fresh=False)
    assert (folder / "network").is_dir()
    prepare_folder(folder, fresh=True)
    assert not (folder / "network").exists()
    assert len(list(tmp_path.iterdir())) == 2


def test_a_folder_without_a_ledger_is_not_a_coordinators(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is not the folder of a run of `fedloom serve`"):
        coordinator_ledger(tmp_path)
