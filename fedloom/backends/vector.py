"""Spread clients over worker processes with one torch thread each."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from multiprocessing.connection import wait
from typing import Any

from fedloom.backends.protocol import Backend
from fedloom.data.federation import Federation
from fedloom.errors import InputError, TrainingError, WorkerTraceback
from fedloom.federation.work import Place, Work
from fedloom.task import Task
from fedloom.training.clients import Setup

# A worker reuses the memory of large batches. By default, glibc returns blocks above 32 MB to the system, and fresh
# pages took a quarter of the processor time of rounds with mnist_cnn.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": f"{1 << 30}", "MALLOC_TRIM_THRESHOLD_": f"{1 << 30}"}
MOST_DEATHS = 2  # of workers without an answer in between, besides one death of each


class WorkerDied(Exception):
    """A worker process ended, and did not answer."""


class Workers:
    """Processes that wait for work. They start while this process loads data, and end with it."""

    def __init__(self, count: int, note: Callable[[str], None] = logging.getLogger("fedloom").warning) -> None:
        if os.name != "posix":
            raise InputError('The vector backend needs Linux or macOS. Use run.backend = "serial".')
        self.note = note  # told when a worker is replaced
        self.place: object = None  # the backend whose data and task the workers have now
        self.tickets = 0
        self.deaths = 0  # since the last answer
        self.stopped = False
        self.processes: list[subprocess.Popen[bytes]] = []
        self.connections: list[socket.socket] = []
        for _ in range(count):
            process, connection = _start()
            self.processes.append(process)
            self.connections.append(connection)

    def __len__(self) -> int:
        return len(self.connections)

    def __str__(self) -> str:
        return "1 worker process" if len(self) == 1 else f"{len(self)} worker processes"

    def tell(self, number: int, kind: str, message: Sequence[Any], ticket: int = 0) -> None:
        """Send a packed message to a worker."""
        from fedloom.backends import worker_messages

        try:
            worker_messages.send(self.connections[number], [f"{kind} {ticket}".encode(), *message])
        except (BrokenPipeError, ConnectionError):
            raise WorkerDied from None

    def answer(self, number: int, ticket: int) -> Any:
        """Return a worker's answer to the part with this ticket. Drop older answers: nothing waits for them."""
        from fedloom.backends import worker_messages

        found = None
        while found != ticket:
            try:
                head, *message = worker_messages.receive(self.connections[number])
                found = int(head)
            except (EOFError, ConnectionError):
                raise WorkerDied from None
        self.deaths = 0
        kind, payload = worker_messages.unpack(message)
        if kind == "failed":
            error, text = payload
            raise error from WorkerTraceback(text)
        return payload

    def replace(self, number: int) -> None:
        """Start a process in the place of one that ended. Raise if too many ended, one after the other."""
        code = self.processes[number].wait(timeout=10)
        why = f"signal {-code} (9 often means out of memory)" if code < 0 else f"exit code {code}"
        ended = f"Worker process {number + 1} of {len(self)} ended: {why}."
        self.deaths += 1
        if self.stopped or self.deaths > len(self) + MOST_DEATHS:
            raise TrainingError(f"{ended} Fewer workers need less memory.")
        self.connections[number].close()
        self.processes[number], self.connections[number] = _start()
        self.note(f"{ended} Another one takes its place. The results stay the same.")

    def kill(self) -> None:
        """End all workers at once. They are not replaced."""
        self.stopped = True
        for process in self.processes:
            process.kill()

    def close(self) -> None:
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.connections.clear()
        self.processes.clear()


def environment() -> dict[str, str]:
    """Return the environment of a worker process."""
    return {**KEEP_MEMORY, **os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def _start() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a worker process. Return it and the socket that leads to it."""
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):  # a model should fit, so that neither side waits for the other to read
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
    arguments = [str(theirs.fileno()), str(os.getpid())]
    process = subprocess.Popen(
        [sys.executable, "-m", "fedloom.backends.worker_process", *arguments],
        pass_fds=[theirs.fileno()],
        env=environment(),
        stdin=subprocess.DEVNULL,
    )
    theirs.close()
    return process, ours


class Vector(Backend):
    """Spreads work over processes. The results do not depend on their number, nor on which of them are replaced."""

    def __init__(self, federation: Federation, task: Task, setup: Setup, workers: Workers | int = 2) -> None:
        from fedloom.backends.shared_memory import share

        self.workers = Workers(workers) if isinstance(workers, int) else workers
        self._closes_workers = isinstance(workers, int)
        self.place = Place(federation, task, setup)
        self.setup = setup
        self._handle = share(federation)  # kept, because the memory is freed with it
        self._settle()

    def _settle(self) -> None:
        """Send this backend's data and task to the workers, unless they have them: backends may share workers."""
        if self.workers.place is not self:
            messages = self._equipment()
            for number in range(len(self.workers)):
                self._equip(number, messages)
            self.workers.place = self

    def _equipment(self) -> list[tuple[str, Sequence[Any]]]:
        """Return the messages that a worker needs before it can perform work of this backend."""
        from fedloom.backends.worker_messages import pack

        # your code may have set a variable after the workers started, such as KERAS_BACKEND
        return [
            ("surroundings", pack((sys.path, dict(os.environ)))),
            ("place", pack((self._handle, self.place.task, self.setup))),
        ]

    def _equip(self, number: int, messages: Sequence[tuple[str, Sequence[Any]]]) -> None:
        """Send messages to a worker. If it has ended, start another, and send it everything."""
        try:
            for kind, message in messages:
                self.workers.tell(number, kind, message)
        except WorkerDied:
            self.workers.replace(number)
            self._equip(number, self._equipment())

    def run(self, work: Work) -> Any:
        """Hand out ranges of clients. A worker that is free takes the next; the range of one that dies goes back."""
        from fedloom.backends.worker_messages import pack

        self._settle()
        borders = shares(work.costs(self.place), len(self.workers), once=self.setup.group > 1)
        common = pack({name: getattr(work, name) for name in work.common})
        waiting = deque(enumerate(pairwise(borders)))
        results: dict[int, Any] = {}
        busy: dict[int, tuple[int, int]] = {}  # worker → part and ticket
        told: set[int] = set()
        idle = list(range(len(self.workers)))

        def replace(number: int, part: int) -> None:
            waiting.appendleft((part, (borders[part], borders[part + 1])))
            self.workers.replace(number)
            self._equip(number, self._equipment())
            told.discard(number)
            idle.append(number)

        while waiting or busy:
            while waiting and idle:
                number, (part, (begin, end)) = idle.pop(0), waiting.popleft()
                self.workers.tickets += 1
                try:
                    if number not in told:
                        self.workers.tell(number, "common", common)
                        told.add(number)
                    self.workers.tell(number, "part", pack(without_common(work, begin, end)), self.workers.tickets)
                    busy[number] = (part, self.workers.tickets)
                except WorkerDied:
                    replace(number, part)
            ready = {id(connection) for connection in wait([self.workers.connections[number] for number in busy])}
            for number in [n for n in busy if id(self.workers.connections[n]) in ready]:
                part, ticket = busy.pop(number)
                try:
                    results[part] = self.workers.answer(number, ticket)
                    idle.append(number)
                except WorkerDied:
                    replace(number, part)
        return work.merge(results[part] for part in sorted(results))

    def close(self) -> None:
        if self._closes_workers:
            self.workers.close()


def without_common(work: Work, begin: int, end: int) -> Work:
    """Return a range of clients without the fields that every worker has already."""
    part: Work = replace(work.part(begin, end), **dict.fromkeys(work.common))  # type: ignore[type-var]
    return part


def shares(costs: Sequence[int], workers: int, once: bool = False) -> list[int]:
    """Return the borders of one range for each worker if that is fair or `once` is set; else of several ranges.

    >>> shares([5] * 10, 2)
    [0, 5, 10]
    """
    borders = cut(costs, workers)
    largest = max((sum(costs[begin:end]) for begin, end in pairwise(borders)), default=0)
    fair = largest * workers <= 1.05 * sum(costs)
    return borders if once or fair else cut(costs, 4 * workers)


def cut(costs: Sequence[int], pieces: int) -> list[int]:
    """Return the borders of at most `pieces` ranges of about equal cost.

    >>> cut([1, 1, 1, 3], 2)
    [0, 3, 4]
    """
    total, borders, running = sum(costs), [0], 0
    for unit, cost in enumerate(costs):
        if running >= total * len(borders) / pieces and unit > borders[-1]:
            borders.append(unit)
        running += cost
    return [*borders, len(costs)] if len(costs) else borders
