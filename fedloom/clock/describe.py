"""Describe a fleet in a table."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from rich.table import Table

from fedloom.clock.fleet import BYTES, Fleet
from fedloom.clock.system import System
from fedloom.data.federation import Federation

MOMENTS = 24  # at which availability is counted


def table(system: System, federation: Federation, seed: int, base: Path) -> Table:
    """Return a table of what clients are as machines: the slowest, the median and the fastest of each number."""
    fleet = Fleet.of(system, federation, seed, step=1.0, base=base)
    step = "measured when a run begins" if system.step == "measure" else f"{system.step:g} s"
    found = Table(title=f"{len(fleet):,} machines, a step at speed 1: {step}", caption_justify="left")
    found.add_column("machine", no_wrap=True)
    for name in ("5 %", "median", "95 %"):
        found.add_column(name, justify="right", no_wrap=True)
    numbers = {
        "speed": fleet.speed,
        "download, Mbit/s": fleet.download / BYTES,
        "upload, Mbit/s": fleet.upload / BYTES,
        "latency, s": fleet.latency,
    }
    for name, values in numbers.items():
        if math.isinf(values[0]):
            found.add_row(name, "", "no limit", "")
        else:
            found.add_row(name, *(f"{value:.3g}" for value in np.quantile(values, (0.05, 0.5, 0.95))))
    if system.availability != "always":
        shares = _available(fleet)
        found.add_row("available", *(f"{value:.0%}" for value in np.quantile(shares, (0.05, 0.5, 0.95))))
    if system.vanish:
        found.add_row("vanish when asked", "", f"{system.vanish:.1%}", "")
    return found


def _available(fleet: Fleet) -> list[float]:
    """Return which share of clients is available at moments of the first cycle, or of the file's time."""
    everyone = np.arange(len(fleet))
    moments = np.linspace(0.0, fleet.windows.span, MOMENTS, endpoint=False)
    return [float((fleet.windows.until(everyone, now) > now).mean()) for now in moments]
