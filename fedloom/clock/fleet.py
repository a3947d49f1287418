"""The clients of a run as machines: what [system] says of each, drawn by key."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom import keys
from fedloom.clock.availability import Cycle, Ids, Times, Trace
from fedloom.clock.system import Spread, System
from fedloom.clock.table_file import read_columns
from fedloom.data.federation import Federation
from fedloom.data.sources.base import locate
from fedloom.errors import InputError
from fedloom.record import seconds

BYTES = 125_000.0  # in a megabit


@dataclass(frozen=True)
class Fleet:
    """The machines of all clients."""

    system: System
    step: float  # seconds of a training step at speed 1
    speed: Times
    download: Times  # bytes in a second
    upload: Times
    latency: Times
    windows: Cycle | Trace

    @staticmethod
    def of(
        system: System, federation: Federation, seed: int = 0, *, step: float | None = None, base: Path = Path()
    ) -> Fleet:
        """Draw the machines of a federation's clients. `step` is the measured cost of a step, if it is measured."""
        step = step if system.step == "measure" else system.step
        if step is None:
            raise InputError('[system] step = "measure" needs a measured step. Give the seconds of one, such as 0.02.')
        seed = seed if system.seed == "run" else system.seed
        names: dict[str, int] = {}
        if any(True for _ in system.files()):
            names = {federation.name(client): client for client in range(federation.clients)}
        numbers = {
            key: _numbers(key, getattr(system, key), federation.clients, seed, names, base)
            for key in ("speed", "download", "upload", "latency")
        }
        windows: Cycle | Trace
        when = system.availability
        if when != "always" and when.file is not None:
            windows = Trace.read(locate(base, when.file), names, when.repeat)
        else:
            period, share = ("24h", 1.0) if when == "always" else (when.period or "24h", when.share or 1.0)
            windows = Cycle.drawn(seconds(period), share, federation.clients, seed)
        return Fleet(
            system,
            step,
            numbers["speed"],
            numbers["download"] * BYTES,
            numbers["upload"] * BYTES,
            numbers["latency"],
            windows,
        )

    def __len__(self) -> int:
        return len(self.speed)

    def seconds(
        self, ids: Ids, received: Times | float, steps: Times, sent: float, exchanges: int = 1
    ) -> tuple[Times, Times]:
        """Return how long clients take for a call, and how long of that they compute."""
        computing = steps * self.step / self.speed[ids]
        waiting = exchanges * self.latency[ids] + received / self.download[ids]
        return waiting + computing + sent / self.upload[ids], computing

    def vanish(self, ids: Ids, key: int) -> Times:
        """Return after which share of its time each client vanishes; ∞ for those that do not."""
        if not self.system.vanish:
            return np.full(len(ids), math.inf)
        drawn = keys.hashes_at(key, ids) / 2**32
        return np.where(drawn < self.system.vanish, drawn / self.system.vanish, math.inf)


def _numbers(
    key: str, value: float | Spread | None, population: int, seed: int, names: dict[str, int], base: Path
) -> NDArray[np.float64]:
    """Return one number for each client."""
    if not isinstance(value, Spread):
        return np.full(population, math.inf if value is None else value, dtype=np.float64)
    if value.file is not None:
        return _of_file(key, value, population, names, base)
    share = (keys.hashes(keys.key(seed, "system", key), population) + 0.5) / 2**32
    if value.name == "uniform":
        return (value.low or 0.0) + ((value.high or 0.0) - (value.low or 0.0)) * share
    normal = torch.special.ndtri(torch.from_numpy(share)).numpy()
    with np.errstate(over="ignore", under="ignore"):
        found = np.asarray((value.median or 1.0) * np.exp((value.sigma or 0.5) * normal))
    if not (np.isfinite(found) & (found > 0)).all():
        raise InputError(f"[system] {key} with sigma = {value.sigma or 0.5:g} is 0 or infinite. Use a smaller sigma.")
    return found


def _of_file(key: str, value: Spread, population: int, names: dict[str, int], base: Path) -> NDArray[np.float64]:
    assert value.file is not None
    file, column = locate(base, value.file), value.column or key
    found = np.full(population, math.nan)
    known = list(names)
    for client, (number,) in read_columns(file, (column,), names):
        if not math.isnan(found[client]):
            raise InputError(f"{file} has two rows for client '{known[client]}'. Keep one.")
        if number < 0 or (number == 0 and key != "latency"):
            least = "at least 0" if key == "latency" else "more than 0"
            raise InputError(f"{file}: {column} of client '{known[client]}' must be {least}. Got {number:g} instead.")
        found[client] = number
    absent = np.flatnonzero(np.isnan(found))
    if len(absent):
        raise InputError(
            f"{file} has no row for {len(absent)} of {population} clients, such as '{known[absent[0]]}'. Add them."
        )
    return found
