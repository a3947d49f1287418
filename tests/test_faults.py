"""Tests can kill a process at a named point and move its clock; without their variables nothing happens."""

import os
import signal
import subprocess
import sys
import time

import pytest

from fedloom import faults


def run(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key not in (faults.VARIABLE, faults.CLOCK)}
    return subprocess.run(
        [sys.executable, "-c", f"from fedloom import faults\n{code}"],
        env={**environment, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


PASS_TWICE = 'faults.point("own.write"); print("once", flush=True); faults.point("own.write"); print("twice")'


@pytest.mark.parametrize(
    ("variables", "said", "code"),
    [
        ({}, ["once", "twice"], 0),
        ({faults.VARIABLE: "own.write:1"}, [], -signal.SIGKILL),
        ({faults.VARIABLE: "own.write"}, [], -signal.SIGKILL),
        ({faults.VARIABLE: "own.write:2"}, ["once"], -signal.SIGKILL),
        ({faults.VARIABLE: "own.write:3"}, ["once", "twice"], 0),
        ({faults.VARIABLE: "own.rename:1"}, ["once", "twice"], 0),
    ],
)
def test_a_process_is_killed_when_it_passes_the_named_point_for_the_nth_time(
    variables: dict[str, str], said: list[str], code: int
) -> None:
    found = run(PASS_TWICE, **variables)
    assert (found.stdout.split(), found.returncode) == (said, code)


def test_the_clock_is_the_time_of_day_unless_it_is_moved() -> None:
    assert abs(faults.clock() - time.time()) < 60
    moved = run("print(faults.clock())", **{faults.CLOCK: "3600@0"})
    assert 3500 < float(moved.stdout) - time.time() < 3700
    later = run("print(faults.clock())", **{faults.CLOCK: "3600@1000"})
    assert abs(float(later.stdout) - time.time()) < 60
