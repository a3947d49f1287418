"""A rehearsal: agents on this machine, each with some of the partition's clients, which end with the coordinator."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import tomli_w

from fedloom.errors import FedloomError, InputError
from fedloom.experiment.experiment_file import Experiment
from fedloom.files import write_private
from fedloom.network.agent.policy import rehearsal

GOODBYE = 5.0  # seconds for agents to end by themselves


class LocalAgents:
    """Processes of `fedloom join`; agent k modulo their number hosts client k."""

    def __init__(self, folder: Path, experiment: Experiment, count: int, invite: Callable[[], Path]) -> None:
        self.folder, self.experiment, self.count, self.invite = folder, experiment, count, invite
        self._processes: list[subprocess.Popen[bytes]] = []

    @contextlib.contextmanager
    def running(self, url: str, clients: int, tell: Callable[[str], None]) -> Iterator[None]:
        """Run the agents while the context lasts."""
        if self.count > clients:
            raise InputError(f"--local {self.count}: there are only {clients} clients to host.")
        tell(f"Rehearsal: {self.count} agents on this machine host {clients} clients.")
        self._processes = [self._start(number, clients, url) for number in range(self.count)]
        try:
            yield
        finally:
            for process in self._processes:
                if process.stdin is not None:
                    process.stdin.close()  # the agent then ends
            for process in self._processes:
                try:
                    process.wait(timeout=GOODBYE)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    def check(self) -> None:
        """Raise an error if an agent has ended: it will not come back."""
        for number, process in enumerate(self._processes):
            if process.poll() is not None:
                log = self._folder(number) / "log.txt"
                said = log.read_text(errors="replace").strip().splitlines()
                raise FedloomError(f"The agent {_name(number)} ended: {' '.join(said[-2:])} (see {log})")

    def _folder(self, number: int) -> Path:
        return self.folder / _name(number)

    def _start(self, number: int, clients: int, url: str) -> subprocess.Popen[bytes]:
        folder = self._folder(number)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        site = rehearsal(self.experiment, _name(number), range(number, clients, self.count))
        write_private(folder / "site.toml", tomli_w.dumps(site).encode())
        token = folder / "token"
        if not (folder / "state" / "coordinator.json").is_file():
            self.invite().replace(token)
        command = [sys.executable, "-m", "fedloom", "join", url, "--site", str(folder / "site.toml")]
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


def _name(number: int) -> str:
    return f"local-{number + 1}"
