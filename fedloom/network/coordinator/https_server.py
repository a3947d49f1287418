"""The coordinator's HTTPS port, served by uvicorn in its own thread."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from typing import Any

import uvicorn

from fedloom.errors import InputError
from fedloom.network.coordinator.agent_pool import AgentPool
from fedloom.network.coordinator.http_api import make_app
from fedloom.network.protocol.certificates import Certificates


class HttpsServer:
    """A port that is open while its context is; `operator` is the hash of the operator's token."""

    def __init__(
        self, pool: AgentPool, host: str, port: int, certificates: Certificates | None = None, operator: str = ""
    ) -> None:
        self.pool = pool
        app = make_app(pool, certificates.authority if certificates else b"", operator=operator)
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
        settings["timeout_keep_alive"] = 120  # longer than agents keep an idle connection
        if certificates is not None:
            settings |= {"ssl_certfile": str(certificates.certificate), "ssl_keyfile": str(certificates.key)}
        self.server = uvicorn.Server(uvicorn.Config(app, timeout_graceful_shutdown=2, **settings))
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
        self._thread.join(timeout=10)
