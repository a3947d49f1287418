"""Connect to a Ray cluster and list its machines. Nothing here depends on what they compute."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from fedloom import machine
from fedloom.errors import InputError, TrainingError

LONGEST_WAIT = 600.0  # seconds to wait for nodes to join
SLOW_START = 15.0  # seconds to wait for a cluster before reporting that it does not answer

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Node:
    """A machine of the cluster."""

    id: str
    name: str
    workers: int
    store_bytes: int  # size of its object store
    memory_bytes: int  # memory that its processes may use


class Cluster:
    """A connection to a running Ray cluster, or to one on this machine that starts and ends with it."""

    retries = 3  # how often a task is repeated after its process or node died
    patience = 60.0  # seconds without an answer before reporting what is pending

    def __init__(
        self,
        address: str = "local",
        nodes: int | Literal["auto"] = "auto",
        workers: int | Literal["auto"] = "auto",
        tell: Tell = logging.getLogger("fedloom").warning,
    ) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # errors of tasks whose results are no longer needed
        self.ray = _import_ray()
        self.tell = tell
        self.workers = workers
        self._tasks: dict[Any, Any] = {}
        self._tidy: Callable[[], Any] = lambda: None
        self._closes = not self.ray.is_initialized()  # do not end a Ray that was already running
        try:
            if self._closes:
                self._start(address)
            self._wait_for(1 if nodes == "auto" else nodes)
        except BaseException:
            self.close()
            raise

    def _start(self, address: str) -> None:
        quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
        if address == "local":
            # a short path, because names of sockets must be short
            folder = tempfile.mkdtemp(prefix="fedloom-ray-", dir="/tmp")
            self._tidy = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)  # also when interrupted
            count = machine.cores() if self.workers == "auto" else self.workers
            self.ray.init(address="local", num_cpus=count, include_dashboard=False, _temp_dir=folder, **quiet)
            return
        _check_reachable(address)
        slow = f"Still waiting for Ray at {address}. Is a head node there, and not something else?"
        reminder = threading.Timer(SLOW_START, self.tell, [slow])  # Ray tries for minutes before it gives up
        reminder.daemon = True
        reminder.start()
        try:
            self.ray.init(address=address, **quiet)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise InputError(
                f'[run] address = "{address}": {" ".join(str(error).split())}. If the cluster asks for a token '
                "(`ray start` says so), RAY_AUTH_MODE=token and the head's ~/.ray/auth_token are needed here too."
            ) from None
        finally:
            reminder.cancel()

    def nodes(self) -> list[Node]:
        """Return the nodes that can compute now, the largest first."""
        found = []
        for node in self.ray.nodes():
            has = node["Resources"]
            processors = int(has.get("CPU", 0))
            if node["Alive"] and processors:
                name = f"{node['NodeManagerHostname']} ({node['NodeID'][:6]})"
                workers = processors if self.workers == "auto" else min(self.workers, processors)
                store, memory = (int(has.get(kind, 0)) for kind in ("object_store_memory", "memory"))
                found.append(Node(node["NodeID"], name, workers, store, memory))
        return sorted(found, key=lambda node: (-node.workers, node.id))

    def __str__(self) -> str:
        nodes = self.nodes()
        return f"{sum(node.workers for node in nodes)} worker processes on {', '.join(node.name for node in nodes)}"

    def _wait_for(self, count: int) -> None:
        began = told = time.monotonic()
        while len(found := self.nodes()) < count:
            now = time.monotonic()
            if now - began > LONGEST_WAIT:
                raise TrainingError(f"The Ray cluster has {len(found)} of {count} nodes after {now - began:.0f} s.")
            if now - told > self.patience / 6:
                told = now
                self.tell(f"Waiting for nodes of the Ray cluster: {len(found)} of {count} have joined.")
            time.sleep(0.2)

    def on(self, node: Node, function: Any) -> Any:
        """Return a function that starts a task on a node. If the node is gone, another one runs it."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if function not in self._tasks:
            self._tasks[function] = self.ray.remote(num_cpus=1, max_retries=self.retries)(function)
        affinity = NodeAffinitySchedulingStrategy(node.id, soft=True)
        return self._tasks[function].options(scheduling_strategy=affinity).remote

    def close(self) -> None:
        if self._closes and self.ray.is_initialized():
            self.ray.shutdown()
        self._tidy()


def _import_ray() -> Any:
    try:
        import ray
    except ImportError:
        raise InputError(
            '[run] backend = "ray" needs Ray: pip install "fedloom[ray]". Ray has releases for Python 3.10 to '
            '3.14 on Linux and macOS (Apple silicon). backend = "vector" needs nothing.'
        ) from None
    return ray


def _check_reachable(address: str) -> None:
    """Raise if nothing listens at the address. Ray itself would try for minutes."""
    if address == "auto":
        return
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isdigit()) or "//" in address:
        raise InputError(
            f'[run] address must be "local", "auto" (the cluster that this machine belongs to) or "HOST:PORT" of the '
            f'head node. Got "{address}" instead.'
        )
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except (OSError, OverflowError) as error:
        raise InputError(
            f'[run] address = "{address}": no Ray answered there ({error}). `ray start --head` prints the address.'
        ) from None
