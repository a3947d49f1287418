"""Cells side by side: several cells each get their own workers, so that no worker waits for the end of a round.

A cell's bits do not depend on its number of workers, so they do not depend on this either.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from threading import Lock, Thread
from typing import Protocol, TypeVar

from fedloom.backends.vector import Workers

MOST_DATA = 1_000_000_000  # bytes of examples in shared memory: every worker group has a copy
GROUP = TypeVar("GROUP")
TAKEN = TypeVar("TAKEN", contravariant=True)


class Trainable(Protocol[TAKEN]):
    """A cell."""

    def train(self, group: TAKEN, should_stop: Callable[[], bool]) -> bool:
        """Run to the end; false if it was asked to stop before."""


def group_count(cells: int, workers: int, data: int = 0) -> int:
    """Choose how many cells to run at once: as many as leave no worker idle for long.

    >>> [group_count(cells, workers) for cells, workers in ((21, 2), (3, 2), (2, 8), (1, 8))]
    [2, 1, 2, 1]
    """
    side_by_side = min(cells, workers)
    uneven = cells < 2 * workers and cells % max(side_by_side, 1)  # the last cells would have most workers idle
    too_large = side_by_side * data > MOST_DATA
    return 1 if side_by_side < 2 or uneven or too_large else side_by_side


def divide(workers: Workers, count: int) -> list[Workers]:
    """Divide the processes into groups of about equal size."""
    groups = [Workers(0, workers.note) for _ in range(count)]
    for number, (process, connection) in enumerate(zip(workers.processes, workers.connections, strict=True)):
        groups[number % count].processes.append(process)
        groups[number % count].connections.append(connection)
    return groups


def train(
    cells: Sequence[Trainable[GROUP]],
    groups: Sequence[GROUP],
    should_stop: Callable[[], bool],
    kill: Sequence[Callable[[], None]],
) -> None:
    """Train all cells: a group takes the next cell when it has finished one. The first failure stops all and is raised.

    `kill` makes running cells fail at once, for an interruption that does not wait for the end of their rounds.
    """
    if len(groups) == 1:  # in this thread, in order
        for cell in cells:
            if not cell.train(groups[0], should_stop):
                return
        return
    waiting, lock = deque(cells), Lock()
    failures: list[BaseException] = []
    stopped = False

    def stop() -> bool:
        return stopped or bool(failures) or should_stop()

    def work(group: GROUP) -> None:
        nonlocal stopped
        while True:
            with lock:
                if stopped or failures or not waiting:
                    return
                cell = waiting.popleft()
            try:
                stopped = not cell.train(group, stop) or stopped
            except BaseException as failure:
                failures.append(failure)
                return

    threads = [Thread(target=work, args=(group,), daemon=True) for group in groups]
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
