"""A rehearsal's agents: processes that end with the coordinator."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedloom.errors import FedloomError, InputError
from fedloom.experiment.experiment_file import parse, tomllib
from fedloom.network.coordinator.local_agents import LocalAgents
from tests.network.conftest import EXPERIMENT, wait_for


def agents(folder: Path, count: int) -> LocalAgents:
    def token() -> Path:
        path = folder / "invited.token"
        path.write_text("not a token")
        return path

    folder.mkdir()
    return LocalAgents(folder, parse(EXPERIMENT), count, token)


def test_more_agents_than_clients_are_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(InputError, match="--local 5: there are only 4 clients to host"),
        agents(tmp_path / "local", 5).running("http://127.0.0.1:1", 4, print),
    ):
        pass


def test_an_agent_that_ended_is_named_with_its_last_words(tmp_path: Path) -> None:
    local, said = agents(tmp_path / "local", 1), list[str]()
    with local.running("http://127.0.0.1:1", 4, said.append):
        (process,) = local._processes
        wait_for(lambda: process.poll() is not None)
        with pytest.raises(FedloomError, match=r"The agent local-1 ended: .*not an enrolment token"):
            local.check()
    assert said == ["Rehearsal: 1 agents on this machine host 4 clients."]
    site = tomllib.loads((tmp_path / "local" / "local-1" / "site.toml").read_text())
    assert site["site"]["hosts"] == [0, 1, 2, 3]
