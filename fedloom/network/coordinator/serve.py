"""`fedloom serve`: the coordinator's port in one thread, the engine in another, and agents in a rehearsal."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import uvicorn

from fedloom.errors import InputError
from fedloom.experiment.experiment_file import Experiment
from fedloom.files import write_private
from fedloom.network.coordinator.agent_pool import AgentPool
from fedloom.network.coordinator.connections import Connections, LimitedServer
from fedloom.network.coordinator.http_api import make_app
from fedloom.network.coordinator.network_folder import (
    change_certificate,
    invite,
    join_command,
    operator_token,
    set_certificate,
    token_file,
)
from fedloom.network.coordinator.network_run import NetworkRun
from fedloom.network.coordinator.operator_page import certified_names
from fedloom.network.protocol.certificates import Certificates, local_authority, user_certificate


def _is_news(record: logging.LogRecord) -> bool:
    """Whether to show a line of uvicorn: not that it closes connections of agents that still poll when a run ends."""
    return "timeout graceful shutdown exceeded" not in record.getMessage()


class HttpsServer:
    """The port, served by uvicorn in a thread while the context is open; `operator` is the hash of its token."""

    def __init__(
        self, pool: AgentPool, host: str, port: int, certificates: Certificates | None = None, operator: str = ""
    ) -> None:
        self.pool = pool
        connections, authority = Connections(), certificates.authority if certificates else b""
        names = None if certificates is None else [host, *certified_names(certificates.certificate.read_bytes())]
        app = make_app(pool, authority, operator=operator, connections=connections, hosts=names)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # asyncio turns Nagle's algorithm off only where the protocol is named: without it every reply waits 40 ms
        self.socket = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self.socket.bind((host, port))
        except OSError as error:
            self.socket.close()
            raise InputError(f"--listen {host}:{port} cannot be used: {error.strerror or error}.") from None
        self.number = int(self.socket.getsockname()[1])
        settings: dict[str, Any] = {"log_level": "error", "access_log": False, "lifespan": "off", "ws": "none"}
        settings["timeout_keep_alive"] = 120  # longer than agents keep an idle connection
        if certificates is not None:
            settings |= {"ssl_certfile": str(certificates.certificate), "ssl_keyfile": str(certificates.key)}
        self.server = LimitedServer(uvicorn.Config(app, timeout_graceful_shutdown=2, **settings), connections)
        logging.getLogger("uvicorn.error").addFilter(_is_news)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        make = self.server.config.get_loop_factory()  # uvloop, where it is installed
        self.pool.loop = make() if make is not None else asyncio.new_event_loop()
        self.pool.loop.run_until_complete(self.server.serve(sockets=[self.socket]))
        self.pool.loop.close()

    def __enter__(self) -> HttpsServer:
        self._thread.start()
        while not self.server.started and self._thread.is_alive():
            time.sleep(0.01)
        if not self.server.started:
            raise InputError("The coordinator's port could not be opened.")
        return self

    def __exit__(self, *failure: object) -> None:
        self.server.should_exit = True
        self.pool.end_polls()
        self._thread.join(timeout=10)


class HttpsRun(NetworkRun):
    """A run whose agents connect to this process's port."""

    def __init__(
        self,
        experiment: Experiment,
        folder: Path,
        *,
        host: str = "127.0.0.1",
        port: int = 8443,
        certificate: tuple[Path, Path] | None = None,
        tls: bool = True,
        tell: Callable[[str], None] = print,
    ) -> None:
        super().__init__(experiment, folder, tell)
        self.certificates = None
        if tls and certificate:
            self.certificates = user_certificate(*certificate)
        elif tls:
            change_certificate(self.ledger, tell)
            self.certificates = local_authority(self.network, known=self.ledger.fact("fingerprint"))
        if self.certificates is not None:
            set_certificate(self.ledger, self.certificates.authority)
        self.fingerprint = self.certificates.fingerprint if self.certificates else ""
        self.ledger.set_fact("fingerprint", self.fingerprint)
        self.operator, token = operator_token(self.network, self.fingerprint)
        write_private(self.network / "metrics.token", f"{token.digest}\n".encode())  # shows numbers, not names
        self.server = HttpsServer(self.pool, host, port, self.certificates, token.digest)
        shown = host if host not in ("0.0.0.0", "::") else socket.gethostname()
        self.url = f"{'https' if tls else 'http'}://{f'[{shown}]' if ':' in shown else shown}:{self.server.number}"
        self.ledger.set_fact("url", self.url)  # for the commands that later invitations print

    @contextlib.contextmanager
    def _connected(self) -> Iterator[None]:
        torch.set_num_threads(1)  # answers are checked in parallel and must not compete for the processor
        with self.server:
            self._announce()
            yield

    def _announce(self) -> None:
        """Print the commands with which agents join and the operator watches."""
        wanted = self._start_when()
        missing = (wanted if isinstance(wanted, int) else len(wanted)) - len(self.ledger.agents())
        if missing > 0 and not self.ledger.unused_tokens():
            invite(self.ledger, missing)
        files = [token_file(self.ledger, row["digest"]) for row in self.ledger.unused_tokens()]
        if self.certificates is not None:
            self.tell(f"Serving {self.url}, certificate authority {self.certificates.fingerprint}")
        else:
            self.tell(f"Serving {self.url} without TLS: use it only behind a proxy that has TLS.")
        for file in (file for file in files if missing > 0 and file.is_file()):
            self.tell(join_command(self.ledger, file))
        self.tell(f"To watch: fedloom status {self.url} --token-file {self.operator}")
        self._announce_page()
        if self.experiment.privacy.secure_aggregation is None:
            self.tell("Without secure aggregation, the coordinator can read each site's update.")

    def _announce_page(self) -> None:
        self.tell(f"To watch in a browser, with the token in {self.operator}: {self.url}/watch/")
