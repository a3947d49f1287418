"""`fedloom watch`: the page on a port of this machine, until Ctrl-C."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import uvicorn

from fedloom.errors import InputError
from fedloom.watch.app import Page, make_app, same_token
from fedloom.watch.guard import is_address
from fedloom.watch.live_run import LiveRun, RunOnceItExists

LOOPBACK = "127.0.0.1"


class WatchServer:
    """The page of some runs on a port. The port is taken at once; `serving` answers requests in a thread."""

    def __init__(self, folders: Sequence[Path] | Path, host: str = LOOPBACK, port: int = 0) -> None:
        """Watch runs that exist, or the one in a folder that may be made later."""
        runs: Sequence[LiveRun]
        runs = RunOnceItExists(folders) if isinstance(folders, Path) else [LiveRun(folder) for folder in folders]
        self.token = secrets.token_hex(16)
        self.socket = _listen(host, port)
        self.port = int(self.socket.getsockname()[1])
        everywhere = host in ("0.0.0.0", "::")
        shown = socket.gethostname() if everywhere else f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self.port}/"
        self.private = not is_loopback(host)
        page = Page(runs, same_token(self.token), [host], self.private, closing=lambda: self.server.should_exit)
        settings: dict[str, Any] = {"log_level": "error", "access_log": False, "lifespan": "off", "ws": "none"}
        self.server = uvicorn.Server(uvicorn.Config(make_app(page), timeout_graceful_shutdown=1, **settings))

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Answer requests while the context is open."""
        thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.socket]}, daemon=True)
        thread.start()
        try:
            while not self.server.started and thread.is_alive():
                time.sleep(0.01)
            yield
        finally:
            self.server.should_exit = True
            thread.join(timeout=5)
            self.socket.close()

    def announce(self, tell: Callable[[str], None]) -> None:
        """Say where the page is, and with which token it can change something."""
        tell(f"Watching at {self.url}")
        if self.private:
            tell(f"Other machines can reach this port without TLS. The page asks for this token: {self.token}")
        else:
            tell(f"To pause or stop a run from the page, enter this token there: {self.token}")


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a host.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    return host == "localhost" or (is_address(host) and (host == "::1" or host.startswith("127.")))


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    one = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        one.bind((host, port))
        one.listen(64)
    except OSError as error:
        one.close()
        options = "--port" if host == LOOPBACK else "--port or --host"  # the demo has no --host
        raise InputError(
            f"The page cannot use {host}, port {port}: {error.strerror or error}. Choose another with {options}."
        ) from None
    return one
