"""`fedloom serve`: the coordinator's port in one thread, the engine in another, and perhaps some agents to rehearse."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tomli_w
import uvicorn

from fedloom.errors import FedloomError, InputError, StoreError
from fedloom.experiment.folder import claimed
from fedloom.experiment.spec import Experiment
from fedloom.network.coordinator import make_app
from fedloom.network.hosted import data_facts
from fedloom.network.hub import Hub
from fedloom.network.identity import Certificates, Token, given, local_authority, write_private
from fedloom.network.ledger import Ledger
from fedloom.network.policy import rehearsal
from fedloom.network.session import Session

GOODBYE = 5.0  # seconds in which agents may hear that the run is over


class Port:
    """The HTTPS port, served by uvicorn in a thread of its own."""

    def __init__(self, hub: Hub, host: str, port: int, certificates: Certificates | None) -> None:
        self.hub = hub
        app = make_app(hub, certificates.authority if certificates else b"")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # asyncio turns Nagle's algorithm off only where the protocol is named: without it every reply waits 40 ms
        self.socket = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self.socket.bind((host, port))
        except OSError as error:
            raise InputError(f"--listen {host}:{port} cannot be used: {error.strerror or error}.") from None
        self.number = int(self.socket.getsockname()[1])
        settings: dict[str, Any] = {"log_level": "error", "access_log": False, "lifespan": "off", "backlog": 2048}
        settings["timeout_keep_alive"] = 120  # longer than agents keep a connection that they do not use
        if certificates is not None:
            settings |= {"ssl_certfile": str(certificates.certificate), "ssl_keyfile": str(certificates.key)}
        self.server = uvicorn.Server(uvicorn.Config(app, timeout_graceful_shutdown=2, **settings))
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        sys.setswitchinterval(0.0005)  # requests must not wait for the thread that checks or adds up
        make = self.server.config.get_loop_factory()  # uvloop, where it is installed
        self.hub.loop = make() if make is not None else asyncio.new_event_loop()
        self.hub.loop.run_until_complete(self.server.serve(sockets=[self.socket]))
        self.hub.loop.close()

    def __enter__(self) -> Port:
        self._thread.start()
        while not self.server.started and self._thread.is_alive():
            time.sleep(0.01)
        if not self.server.started:
            raise InputError("The coordinator's port could not be opened.")
        return self

    def __exit__(self, *failure: object) -> None:
        self.server.should_exit = True
        self._thread.join(timeout=10)


class Served(Session):
    """A session with a port of its own, to which agents come; in a rehearsal they are on this machine."""

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
        self.local = local
        self.processes: list[subprocess.Popen[bytes]] = []
        self.certificates = None
        if tls:
            own = certificate is not None
            self.certificates = given(*certificate) if own and certificate else local_authority(self.network, names)
        self.port = Port(self.hub, host, port, self.certificates)
        shown = host if host not in ("0.0.0.0", "::") else socket.gethostname()
        self.url = f"{'https' if tls else 'http'}://{f'[{shown}]' if ':' in shown else shown}:{self.port.number}"

    @contextlib.contextmanager
    def _carrying(self) -> Iterator[None]:
        with self.port, self._agents():
            if not self.local:
                self._print_join()
            yield

    def _offer(self) -> None:
        if self.local:
            self.ledger.set_fact("data", data_facts(self.plan.federation(self.experiment.seeds[0])))
        super()._offer()

    def _start_when(self) -> int | tuple[str, ...]:
        return self.local or super()._start_when()

    def invite(self, count: int) -> list[Path]:
        """New one-time tokens, each in a file of its own."""
        return invite(self.ledger, self.network, self.certificates, count)

    def _print_join(self) -> None:
        wanted = self._start_when()
        missing = (wanted if isinstance(wanted, int) else len(wanted)) - len(self.ledger.agents())
        files = self.invite(missing) if missing > 0 and not self.ledger.unused_tokens() else []
        if self.certificates is not None:
            self.tell(f"Serving {self.url}, certificate authority {self.certificates.fingerprint}")
        else:
            self.tell(f"Serving {self.url} without TLS: only behind a proxy that has it.")
        for file in files:
            self.tell(f"To join, once: fedloom join {self.url} --token-file {file} --site SITE.toml")
        self.tell("Without secure aggregation, the coordinator can read each site's update.")

    @contextlib.contextmanager
    def _agents(self) -> Iterator[None]:
        """Agents on this machine, for a rehearsal: each hosts some of the partition's clients."""
        if not self.local:
            yield
            return
        count = self.plan.federation(self.experiment.seeds[0]).clients
        if self.local > count:
            raise InputError(f"--local {self.local}: there are only {count} clients to host.")
        self.tell(f"Rehearsal: {self.local} agents on this machine host {count} clients.")
        self.processes = processes = [self._agent(number, count) for number in range(self.local)]
        try:
            yield
        finally:
            for process in processes:
                if process.stdin is not None:
                    process.stdin.close()  # which tells it to end
            for process in processes:
                try:
                    process.wait(timeout=GOODBYE)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    def _check_coming(self) -> None:
        """A rehearsal's agent that ended will not come back: say why."""
        for number, process in enumerate(self.processes):
            if process.poll() is not None:
                log = self.network / "local" / f"local-{number + 1}" / "log.txt"
                said = log.read_text(errors="replace").strip().splitlines()
                raise FedloomError(f"The agent local-{number + 1} ended: {' '.join(said[-2:])} (see {log})")

    def _agent(self, number: int, clients: int) -> subprocess.Popen[bytes]:
        name = f"local-{number + 1}"
        folder = self.network / "local" / name
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        site = rehearsal(self.experiment, name, range(number, clients, self.local))
        write_private(folder / "site.toml", tomli_w.dumps(site).encode())
        token = folder / "token"
        if not (folder / "state" / "coordinator.json").is_file():
            (made,) = self.invite(1)
            made.replace(token)
        command = [sys.executable, "-m", "fedloom", "join", self.url, "--site", str(folder / "site.toml")]
        command += ["--state", str(folder / "state"), "--wait", "--while-stdin"]
        command += ["--token-file", str(token)] if token.is_file() else []
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        with open(folder / "log.txt", "ab") as log:
            return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment)


def invite(ledger: Ledger, network: Path, certificates: Certificates | None, count: int) -> list[Path]:
    """New one-time tokens, each in a file of its own."""
    files = []
    for _ in range(count):
        token = Token.new(certificates.fingerprint if certificates else "")
        ledger.invite(token.digest)
        path = network / "tokens" / f"{token.digest[:8]}.token"
        write_private(path, f"{token}\n".encode())
        files.append(path)
    return files


def prepare_folder(folder: Path, fresh: bool) -> None:
    """Move an old run aside if it is to be begun anew, before anything is written beside it."""
    if fresh:
        with claimed(folder, fresh=True):
            pass


def coordinator_ledger(folder: Path) -> Ledger:
    """The ledger of a run's coordinator."""
    if not (folder / "network" / "ledger.db").is_file():
        raise StoreError(f"{folder} is not the folder of a run that was served: there is no network/ledger.db in it.")
    return Ledger(folder / "network", existing=True)
