"""`fedloom serve`: the coordinator's port in one thread, the engine in another, and agents in a rehearsal."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from fedloom.errors import StoreError
from fedloom.experiment.experiment_file import Experiment
from fedloom.experiment.run_folder import claimed, locked
from fedloom.network.coordinator.https_server import HttpsServer
from fedloom.network.coordinator.ledger import Ledger
from fedloom.network.coordinator.local_agents import LocalAgents
from fedloom.network.coordinator.network_run import NetworkRun
from fedloom.network.coordinator.token_files import invite, operator_token
from fedloom.network.protocol.certificates import local_authority, user_certificate
from fedloom.network.protocol.data_format import DataFormat


class HttpsRun(NetworkRun):
    """A run whose agents connect to this process's port; in a rehearsal they run on this machine."""

    def __init__(
        self,
        experiment: Experiment,
        folder: Path,
        *,
        host: str = "127.0.0.1",
        port: int = 8443,
        local: int = 0,
        certificate: tuple[Path, Path] | None = None,
        tls: bool = True,
        names: tuple[str, ...] = (),
        tell: Callable[[str], None] = print,
    ) -> None:
        super().__init__(experiment, folder, tell)
        self.certificates = None
        if tls:
            self.certificates = user_certificate(*certificate) if certificate else local_authority(self.network, names)
        self.fingerprint = self.certificates.fingerprint if self.certificates else ""
        self.ledger.set_fact("fingerprint", self.fingerprint)
        self.operator, token = operator_token(self.network, self.fingerprint)
        self.server = HttpsServer(self.pool, host, port, self.certificates, token.digest)
        shown = host if host not in ("0.0.0.0", "::") else socket.gethostname()
        self.url = f"{'https' if tls else 'http'}://{f'[{shown}]' if ':' in shown else shown}:{self.server.number}"
        self.local: LocalAgents | None = None
        if local:
            self.local = LocalAgents(self.network / "local", self.experiment, local, lambda: self.invite(1)[0])

    @contextlib.contextmanager
    def _connected(self) -> Iterator[None]:
        torch.set_num_threads(1)  # answers are checked in parallel and must not compete for the processor
        with self.server, self._agents():
            if self.local is None:
                self._print_commands()
            yield

    def _agents(self) -> contextlib.AbstractContextManager[None]:
        """Run agents on this machine in a rehearsal."""
        if self.local is None:
            return contextlib.nullcontext()
        return self.local.running(self.url, self.plan.federation(self.experiment.seeds[0]).clients, self.tell)

    def _check_agents(self) -> None:
        if self.local is not None:
            self.local.check()

    def _publish_plan(self) -> None:
        if self.local is not None:
            self.ledger.set_fact("data", DataFormat.of(self.plan.federation(self.experiment.seeds[0])).message())
        super()._publish_plan()

    def _start_when(self) -> int | tuple[str, ...]:
        return self.local.count if self.local is not None else super()._start_when()

    def invite(self, count: int) -> list[Path]:
        """Make one-time tokens, each in its own file."""
        return invite(self.ledger, self.network, self.fingerprint, count)

    def _print_commands(self) -> None:
        wanted = self._start_when()
        missing = (wanted if isinstance(wanted, int) else len(wanted)) - len(self.ledger.agents())
        files = self.invite(missing) if missing > 0 and not self.ledger.unused_tokens() else []
        if self.certificates is not None:
            self.tell(f"Serving {self.url}, certificate authority {self.certificates.fingerprint}")
        else:
            self.tell(f"Serving {self.url} without TLS: use it only behind a proxy that has TLS.")
        for file in files:
            self.tell(f"To join (once): fedloom join {self.url} --token-file {file} --site SITE.toml")
        self.tell(f"To watch: fedloom status {self.url} --token-file {self.operator}")
        self.tell("Without secure aggregation, the coordinator can read each site's update.")


def prepare_folder(folder: Path, fresh: bool) -> None:
    """Move an old run aside for a fresh start, before anything is written to the folder."""
    if fresh:
        if (folder / "network").is_dir():
            with locked(folder / "network"):  # fails while another coordinator waits for its agents
                pass
        with claimed(folder, fresh=True):
            pass


def coordinator_ledger(folder: Path) -> Ledger:
    """Open the ledger of a run's coordinator."""
    if not (folder / "network" / "ledger.db").is_file():
        raise StoreError(f"{folder} is not the folder of a run of `fedloom serve`: it has no network/ledger.db.")
    return Ledger(folder / "network", existing=True)
