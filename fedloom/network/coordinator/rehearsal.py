"""`fedloom serve --local`: a run with agents on this machine, each with some of the partition's clients."""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tomli_w

from fedloom.data.federation import Federation
from fedloom.errors import FedloomError, InputError
from fedloom.experiment.experiment_file import Experiment
from fedloom.files import write_private
from fedloom.network.agent.policy import rehearsal
from fedloom.network.coordinator.network_folder import invite
from fedloom.network.coordinator.serve import HttpsRun
from fedloom.network.protocol.messages import DataFormat

GOODBYE = 5.0  # seconds for agents to end by themselves


class Rehearsal(HttpsRun):
    """A run whose agents are processes that end with this one; agent k modulo their number hosts client k."""

    def __init__(self, experiment: Experiment, folder: Path, agents: int, **settings: Any) -> None:
        if experiment.server_has_all:
            raise InputError("--local divides the data among clients, and [data] server = 1.0 leaves none for them.")
        super().__init__(experiment, folder, **settings)
        self.agents, self.pool.max_clients = agents, math.inf
        self.processes: list[subprocess.Popen[bytes]] = []

    @property
    def _data(self) -> Federation:
        return self.plan.federation(self.experiment.seeds[0])

    def _publish_plan(self) -> None:
        self.ledger.set_fact("data", DataFormat.of(self._data).message())
        super()._publish_plan()

    def _start_when(self) -> int:
        return self.agents

    def _announce(self) -> None:
        clients = self._data.clients
        if self.agents > clients:
            raise InputError(f"--local {self.agents}: there are only {clients} clients to host.")
        self.tell(f"Rehearsal: {self.agents} agents on this machine host {clients} clients.")
        self._announce_page()

    @contextlib.contextmanager
    def _connected(self) -> Iterator[None]:
        with super()._connected():
            self.processes = [self._start(number) for number in range(self.agents)]
            try:
                yield
            finally:
                for process in self.processes:
                    if process.stdin is not None:
                        process.stdin.close()  # the agent then ends
                for process in self.processes:
                    try:
                        process.wait(timeout=GOODBYE)
                    except subprocess.TimeoutExpired:
                        process.kill()
                        process.wait()

    def _check_agents(self) -> None:
        """Raise an error if an agent has ended: it will not come back."""
        for number, process in enumerate(self.processes):
            if process.poll() is not None:
                log = self._folder(number) / "log.txt"
                said = log.read_text(errors="replace").strip().splitlines()
                raise FedloomError(f"The agent {log.parent.name} ended: {' '.join(said[-2:])} (see {log})")

    def _folder(self, number: int) -> Path:
        return self.network / "local" / f"local-{number + 1}"

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        folder = self._folder(number)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        site = rehearsal(self.experiment, folder.name, range(number, self._data.clients, self.agents))
        write_private(folder / "site.toml", tomli_w.dumps(site).encode())
        token = folder / "token"
        if not (folder / "state" / "coordinator.json").is_file():
            invite(self.ledger, 1)[0].replace(token)
        command = [sys.executable, "-m", "fedloom", "join", self.url, "--site", str(folder / "site.toml")]
        command += ["--state", str(folder / "state"), "--wait", "--while-stdin"]
        command += ["--token-file", str(token)] if token.is_file() else []
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        with open(folder / "log.txt", "ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,  # Ctrl-C must reach only the coordinator, which lets agents finish the round
            )
