"""The table of a fleet."""

import re
from io import StringIO
from pathlib import Path

from rich.console import Console

from fedloom.clock.describe import table
from fedloom.clock.system import System
from tests.conftest import federation


def shown(system: System) -> str:
    text = StringIO()
    Console(width=80, file=text).print(table(system, federation((3,) * 50), 1, Path()))
    return text.getvalue()


def test_it_has_the_numbers_of_the_fleet() -> None:
    cycle = {"name": "cycle", "period": "1h", "share": 0.4}
    text = shown(System(step=0.5, upload=4.0, vanish=0.03, availability=cycle))
    assert "50 machines, a step at speed 1: 0.5 s" in text
    rows = {cells[1]: cells[2:5] for line in text.splitlines() if len(cells := re.split(r" *[│┃] *", line)) == 6}
    assert rows["download, Mbit/s"] == ["", "no limit", ""]
    assert rows["upload, Mbit/s"] == ["4", "4", "4"]
    assert rows["vanish when asked"] == ["", "3.0%", ""]
    assert all(20 < float(share.rstrip("%")) < 60 for share in rows["available"])


def test_a_step_may_still_have_to_be_measured() -> None:
    text = shown(System())
    assert "measured when a run begins" in " ".join(text.split())
    assert "available" not in text
