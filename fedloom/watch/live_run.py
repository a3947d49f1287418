"""A run's folder that may still grow: read again when it changes, and only what is new."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import overload

import numpy as np

from fedloom.errors import FedloomError
from fedloom.experiment.store import Store
from fedloom.results.report_warnings import cautions
from fedloom.results.run_data import RunData
from fedloom.results.run_values import Floats

MAKING = 10.0  # seconds within which a new database becomes readable
SHARE = 200  # cautions need the whole run: they take at most one part in this many of the time
# why an answer of a client did not count: a mark of the round, in words, and what the virtual clock calls it
MARKS: dict[str, tuple[str, tuple[str, ...]]] = {
    "left_out": ("left out", ()),
    "outlier": ("left out as an outlier", ()),
    "late": ("too late", ("late",)),
    "gone": ("went away", ("left", "vanished")),
    "surplus": ("faster ones sufficed", ("surplus",)),
    "refused": ("refused", ()),
    "failed": ("failed", ()),
    "revoked": ("revoked", ()),
}


@dataclass
class Cell:
    """What is known about who took part in one cell, up to a round."""

    upto: int = 0
    participations: Floats = field(default_factory=lambda: np.empty((0, 4)))
    marked: dict[str, Floats] = field(default_factory=lambda: {name: np.empty((0, 2)) for name in MARKS})


class LiveRun:
    """Reads one run's folder. Several threads may use it.

    The run's database is only read: a writer never waits for a reader. Nothing happens until somebody asks.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock, self._warning = threading.Lock(), threading.Lock()
        self._stamp: object = None
        self._data = RunData.read(folder)  # raises an error if this is not a run
        self._cells: dict[int, Cell] = {}
        self._cautions: tuple[object, list[str]] = (None, [])
        self._due = 0.0

    def stamp(self) -> tuple[int, ...]:
        """Return numbers that change when the run's process has written something; they cost two or three stats."""
        found: list[int] = []
        for name in ("run.db", "run.db-wal", "control.json"):
            try:
                status = (self.folder / name).stat()
                # a reader of a run that has ended makes an empty WAL
                found += [status.st_ino, status.st_mtime_ns, status.st_size] if status.st_size else [0, 0, 0]
            except OSError:
                found += [0, 0, 0]
        return tuple(found)

    def data(self) -> RunData:
        """Return the run as it is now."""
        with self._lock:
            return self._current()

    def _current(self) -> RunData:
        stamp = self.stamp()  # first: what is written while we read is read the next time
        if stamp != self._stamp:
            fresh = isinstance(self._stamp, tuple) and self._stamp[0] != stamp[0]
            self._data = RunData.read(self.folder) if fresh or self._stamp is None else self._data.reread()
            if fresh:  # another run has taken the folder's place
                self._cells.clear()
            self._stamp = stamp
        return self._data

    def cell(self, label: str, seed: int) -> tuple[RunData, Cell]:
        """Return the run, and who took part in one of its cells."""
        with self._lock:
            run = self._current()
            row = run.cells[label, seed]
            known = self._cells.get(row["id"], Cell())
            if row["rounds_done"] < known.upto:  # some rounds were taken back
                known = Cell()
            with Store(self.folder, read_only=True) as store:
                later = store.participations(row["id"], known.upto)
                marked = {
                    name: np.concatenate([before, store.marked(row["id"], name, MARKS[name][1], known.upto)])
                    for name, before in known.marked.items()
                }
            rounds = np.concatenate([later[:, 0], *(table[:, 0] for table in marked.values()), [known.upto]])
            found = Cell(int(rounds.max()), np.concatenate([known.participations, later]), marked)
            self._cells[row["id"]] = found
            return run, found

    def cautions(self, now: Callable[[], float] = time.monotonic) -> list[str]:
        """Return what the report would warn of, perhaps of a moment ago: it is computed rarely in a large run."""
        with self._warning:  # other views need not wait for it
            with self._lock:
                run, current = self._current(), self._stamp
            stamp, known = self._cautions
            # those of a finished run stay, so they must be its own
            if stamp != current and (run.done or now() >= self._due or stamp is None):
                began = now()
                known = cautions(run)
                self._cautions, self._due = (current, known), now() + SHARE * (now() - began)
            return known


class RunOnceItExists(Sequence[LiveRun]):
    """A run that may not have begun: there is none until its database is there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._run: LiveRun | None = None
        self._lock = threading.Lock()

    def __len__(self) -> int:
        with self._lock:
            if self._run is None and (self.folder / "run.db").is_file():
                try:
                    self._run = LiveRun(self.folder)
                except FedloomError:
                    if time.time() - (self.folder / "run.db").stat().st_mtime > MAKING:
                        raise
                    return 0  # it is being made
            return int(self._run is not None)

    @overload
    def __getitem__(self, place: int) -> LiveRun: ...
    @overload
    def __getitem__(self, place: slice) -> list[LiveRun]: ...
    def __getitem__(self, place: int | slice) -> LiveRun | list[LiveRun]:
        return ([self._run] if len(self) and self._run is not None else [])[place]
