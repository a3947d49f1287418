"""A rehearsal's agents: processes that end with the coordinator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fedloom.errors import FedloomError, InputError
from fedloom.experiment.experiment_file import parse
from fedloom.files import tomllib
from fedloom.network.coordinator.rehearsal import Rehearsal
from tests.network.conftest import EXPERIMENT, wait_for


@contextmanager
def rehearsal(folder: Path, agents: int, said: list[str]) -> Iterator[Rehearsal]:
    run = Rehearsal(parse(EXPERIMENT), folder, agents, port=0, tell=said.append)
    try:
        with run._connected():
            yield run
    finally:
        run.ledger.close()
        run._held.close()


def test_more_agents_than_clients_are_refused(tmp_path: Path) -> None:
    refused = pytest.raises(InputError, match="--local 5: there are only 4 clients to host")
    with refused, rehearsal(tmp_path / "run", 5, []):
        pass


def test_an_agent_that_ended_is_named_with_its_last_words(tmp_path: Path) -> None:
    said: list[str] = []
    folder = tmp_path / "run" / "network" / "local" / "local-1"
    (folder / "state").mkdir(parents=True)
    (folder / "state" / "coordinator.json").write_text("{}")  # as if it were enrolled, so it gets no new token
    (folder / "token").write_text("not a token")
    with rehearsal(tmp_path / "run", 1, said) as run:
        (process,) = run.processes
        wait_for(lambda: process.poll() is not None)
        with pytest.raises(FedloomError, match=r"The agent local-1 ended: .*not an enrolment token"):
            run._check_agents()
    assert said[0] == "Rehearsal: 1 agents on this machine host 4 clients."
    assert said[1].startswith(f"To watch in a browser, with the token in {tmp_path}")
    assert said[1].endswith("/watch/")
    assert tomllib.loads((folder / "site.toml").read_text())["site"]["hosts"] == [0, 1, 2, 3]


@pytest.mark.slow
def test_agents_end_with_the_coordinator(tmp_path: Path) -> None:
    with rehearsal(tmp_path / "run", 2, []) as run:
        assert [process.poll() for process in run.processes] == [None, None]
    assert all(process.poll() is not None for process in run.processes)
