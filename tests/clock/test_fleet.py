"""Machines drawn by key, or read from files."""

import math
from pathlib import Path

import numpy as np
import pytest

from fedloom.clock.fleet import Fleet
from fedloom.clock.system import System
from fedloom.errors import InputError
from tests.conftest import federation

MANY = federation((1,) * 2000)


def test_a_clients_time_by_hand() -> None:
    system = System(step=0.5, speed=2.0, download=8.0, upload=4.0, latency=0.25)
    fleet = Fleet.of(system, federation((10, 10)))
    taken, computing = fleet.seconds(np.array([1]), 1_000_000, np.array([12.0]), 250_000)
    # 8 Mbit/s are 10⁶ bytes a second, so: 0.25 + 1 + 12 · 0.5 / 2 + 0.5
    assert taken.tolist() == [4.75]
    assert computing.tolist() == [3.0]


def test_without_limits_only_steps_take_time() -> None:
    fleet = Fleet.of(System(step=0.5), federation((10, 10)))
    assert fleet.seconds(np.array([0]), 1e12, np.array([3.0]), 10**12)[0].tolist() == [1.5]


def test_distributions_are_what_they_say() -> None:
    spreads = {"speed": {"name": "lognormal", "median": 2.0, "sigma": 0.5}}
    fleet = Fleet.of(System(step=1.0, **spreads, latency={"name": "uniform", "low": 1.0, "high": 3.0}), MANY)
    logs = np.log(fleet.speed / 2.0)
    assert abs(logs.mean()) < 0.05
    assert logs.std() == pytest.approx(0.5, abs=0.03)
    assert fleet.latency.min() >= 1.0
    assert fleet.latency.max() <= 3.0
    assert fleet.latency.mean() == pytest.approx(2.0, abs=0.05)
    assert abs(np.corrcoef(logs, fleet.latency)[0, 1]) < 0.1


def test_a_machine_does_not_depend_on_how_many_others_there_are() -> None:
    system = System(step=1.0, speed={"name": "lognormal"})
    assert Fleet.of(system, MANY).speed[:3].tolist() == Fleet.of(system, federation((1, 1, 1))).speed.tolist()


def test_seeds_share_a_fleet_unless_they_are_to_draw_their_own() -> None:
    shared, own = (System(step=1.0, speed={"name": "lognormal"}, seed=seed) for seed in (0, "run"))
    assert (Fleet.of(shared, MANY, 1).speed == Fleet.of(shared, MANY, 2).speed).all()
    assert (Fleet.of(own, MANY, 1).speed != Fleet.of(own, MANY, 2).speed).all()


def test_numbers_too_far_apart_to_compute_with_are_refused() -> None:
    with pytest.raises(InputError, match="speed with sigma = 500 is 0 or infinite"):
        Fleet.of(System(step=1.0, speed={"name": "lognormal", "sigma": 500.0}), MANY)


def test_clients_vanish_as_often_as_asked_and_at_any_time() -> None:
    fleet = Fleet.of(System(step=1.0, vanish=0.2), MANY)
    when = fleet.vanish(np.arange(2000), key=7)
    assert np.isfinite(when).mean() == pytest.approx(0.2, abs=0.03)
    assert when[np.isfinite(when)].mean() == pytest.approx(0.5, abs=0.05)
    assert fleet.vanish(np.array([5, 3]), key=7).tolist() == [when[5], when[3]]
    assert np.isinf(Fleet.of(System(step=1.0), MANY).vanish(np.arange(9), key=7)).all()


def test_a_column_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "fleet.csv").write_text("client,speed,net\n1,2.0,5\n0,0.5,10\n")
    system = System(
        step=1.0,
        speed={"name": "file", "file": "fleet.csv"},
        upload={"name": "file", "file": "fleet.csv", "column": "net"},
    )
    fleet = Fleet.of(system, federation((3, 3), names=None), base=tmp_path)
    assert fleet.speed.tolist() == [0.5, 2.0]
    assert fleet.upload.tolist() == [1_250_000.0, 625_000.0]
    assert fleet.download.tolist() == [math.inf, math.inf]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("0,1\n", "has no row for 1 of 2 clients, such as '1'"),
        ("0,1\n1,1\n0,2\n", "two rows for client '0'"),
        ("0,1\n1,0\n", "upload of client '1' must be more than 0. Got 0 instead"),
    ],
)
def test_a_column_with_mistakes_is_refused(tmp_path: Path, rows: str, message: str) -> None:
    (tmp_path / "fleet.csv").write_text("client,upload\n" + rows)
    system = System(step=1.0, upload={"name": "file", "file": "fleet.csv"})
    with pytest.raises(InputError, match=message):
        Fleet.of(system, federation((3, 3), names=None), base=tmp_path)


def test_a_step_that_nobody_measured_is_refused() -> None:
    with pytest.raises(InputError, match="needs a measured step"):
        Fleet.of(System(), federation((3, 3), names=None))
