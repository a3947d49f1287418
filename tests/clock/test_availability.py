"""When clients are available: exact moments, and properties of cycles."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom.clock.availability import Cycle, Trace
from fedloom.errors import InputError

NAMES = {"a": 0, "b": 1, "c": 2}
ALL = np.arange(3)
NEVER = -math.inf


def trace(folder: Path, rows: str, repeat: str | None = None) -> Trace:
    file = folder / "trace.csv"
    file.write_text("client,from,to\n" + rows)
    return Trace.read(file, NAMES, repeat)


def test_always_is_always() -> None:
    always = Cycle.drawn(10.0, 1.0, 3, seed=0)
    assert always.until(ALL, 5.0).tolist() == [math.inf] * 3
    assert always.next(5.0) == 5.0
    assert always.next(5.0, ALL[:0]) == math.inf  # nobody is left


def test_a_cycle_by_hand() -> None:
    cycle = Cycle(period=10.0, share=0.3, begins=np.array([0.0, 0.5, 0.95]))
    assert cycle.until(ALL, 0.0).tolist() == [3.0, NEVER, pytest.approx(2.5)]
    assert cycle.until(ALL, 3.0).tolist() == [NEVER] * 3
    assert cycle.next(3.0) == pytest.approx(5.0)
    assert cycle.until(ALL, 16.0).tolist() == [NEVER, pytest.approx(18.0), NEVER]
    assert cycle.next(16.0) == 16.0


@given(
    begins=st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=5),
    share=st.floats(0.01, 1.0),
    period=st.floats(0.1, 1e5),
    now=st.floats(0, 1e6),
)
def test_somebody_is_available_at_the_next_moment(begins: list[float], share: float, period: float, now: float) -> None:
    cycle = Cycle(period, share, np.array(begins))
    moment = cycle.next(now)
    assert now <= moment <= now + period * (1 + 1e-9)
    assert (cycle.until(np.arange(len(begins)), moment) > moment).any()


def test_a_trace_by_hand(tmp_path: Path) -> None:
    found = trace(tmp_path, "b,5,10\na,0,4\na,6,8\nc,20,30\n")
    assert found.until(ALL, 0.0).tolist() == [4.0, NEVER, NEVER]
    assert found.until(ALL, 4.0).tolist() == [NEVER] * 3  # an end is not part of the time
    assert found.next(4.0) == 5.0
    assert found.until(np.array([1, 0]), 7.0).tolist() == [10.0, 8.0]
    assert found.next(12.0) == 20.0
    assert found.next(30.0) == math.inf


def test_a_trace_that_repeats_begins_again(tmp_path: Path) -> None:
    found = trace(tmp_path, "a,2,4\nb,2,4\nc,2,60\n", repeat="1m")
    assert found.until(ALL, 123.0).tolist() == [124.0, 124.0, 180.0]
    assert found.next(60.0) == 62.0


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("a,0,4\n", "has a gap: it has no row for 2 of 3 clients, such as 'b'"),
        ("a,4,4\nb,0,1\nc,0,1\n", "client 'a' is available from 4 to 4. Allowed: 0 ≤ from < to"),
        ("a,-1,4\nb,0,1\nc,0,1\n", "client 'a' is available from -1 to 4"),
        ("a,0,4\nb,0,1\nb,0.5,2\nc,0,1\n", "client 'b' is available twice at 0.5 seconds"),
        ("a,0,90\nb,0,1\nc,0,1\n", "client 'a' is available from 0 to 90. Allowed: 0 ≤ from < to ≤ 60"),
    ],
)
def test_a_trace_with_mistakes_is_refused(tmp_path: Path, rows: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        trace(tmp_path, rows, repeat="1m")


def test_the_next_moment_of_a_repeated_file_is_one_at_which_somebody_is_there(tmp_path: Path) -> None:
    for begin, every in ((0.2, "24h"), (0.7, "3s"), (0.1, "0.3s"), (0.0, "0.7s")):
        found = trace(tmp_path, "".join(f"{name},{begin},{begin + 0.1}\n" for name in NAMES), repeat=every)
        now = 0.0
        for _ in range(1000):
            moment = found.next(now)
            if not (found.until(np.arange(len(NAMES)), moment) > moment).any():  # rounded: a moment later, somebody is
                assert moment > now
                moment = found.next(moment)
            assert (found.until(np.arange(len(NAMES)), moment) > moment).any()
            now = float(found.until(np.arange(len(NAMES)), moment).max())
