"""Cells side by side: where there are several, each gets workers of its own, so that nobody waits at the end of rounds.

A cell's bits do not depend on the number of its workers, so they do not depend on this either.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from threading import Lock, Thread
from typing import Protocol, TypeVar

from fedloom.backends.vector import Workers

MOST_DATA = 1_000_000_000  # bytes of examples in shared memory: every track of cells has a copy
TRACK = TypeVar("TRACK")
TAKEN = TypeVar("TAKEN", contravariant=True)


class Trainable(Protocol[TAKEN]):
    """A cell."""

    def train(self, track: TAKEN, should_stop: Callable[[], bool]) -> bool:
        """Run to the end; false when asked to stop before that."""


def tracks(cells: int, workers: int, data: int = 0) -> int:
    """How many cells to run at once: as many as leave no worker idle for long.

    >>> tracks(cells=21, workers=2), tracks(cells=3, workers=2), tracks(cells=2, workers=8), tracks(cells=1, workers=8)
    (2, 1, 2, 1)
    """
    side_by_side = min(cells, workers)
    uneven = cells < 2 * workers and cells % max(side_by_side, 1)  # the last cells would have most workers idle
    too_large = side_by_side * data > MOST_DATA
    return 1 if side_by_side < 2 or uneven or too_large else side_by_side


def divide(workers: Workers, count: int) -> list[Workers]:
    """The same processes in several groups of about equal size."""
    groups = [Workers(0) for _ in range(count)]
    for number, (process, connection) in enumerate(zip(workers.processes, workers.connections, strict=True)):
        groups[number % count].processes.append(process)
        groups[number % count].connections.append(connection)
    return groups


def train(
    cells: Sequence[Trainable[TRACK]],
    tracks: Sequence[TRACK],
    should_stop: Callable[[], bool],
    kill: Sequence[Callable[[], None]],
) -> None:
    """Every track takes the next cell when it has finished one; the first failure stops all, and is raised.

    `kill` makes cells under way fail at once: for whoever cannot wait for the end of their rounds.
    """
    if len(tracks) == 1:  # in this thread, in order
        for cell in cells:
            if not cell.train(tracks[0], should_stop):
                return
        return
    waiting, lock = deque(cells), Lock()
    failures: list[BaseException] = []
    stopped = False

    def stop() -> bool:
        return stopped or bool(failures) or should_stop()

    def work(track: TRACK) -> None:
        nonlocal stopped
        while True:
            with lock:
                if stopped or failures or not waiting:
                    return
                cell = waiting.popleft()
            try:
                stopped = not cell.train(track, stop) or stopped
            except BaseException as failure:
                failures.append(failure)
                return

    threads = [Thread(target=work, args=(track,), daemon=True) for track in tracks]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            while thread.is_alive():
                thread.join(0.2)  # not for ever: Ctrl-C is handled in between
    except BaseException:
        stopped = True
        for end in kill:
            end()
        for thread in threads:
            thread.join(10)
        raise
    if failures:
        raise failures[0]
