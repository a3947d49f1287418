"""The table [system]: what it takes and what it refuses."""

from pathlib import Path
from typing import Any

import pytest

from fedloom.clock.system import Availability, Spread, System
from fedloom.errors import InputError


def test_numbers_may_be_constants_distributions_or_columns_of_files() -> None:
    system = System(
        step=0.1,
        speed={"name": "lognormal", "sigma": 1.0},
        download=20.0,
        upload={"name": "file", "file": "fleet.csv"},
        availability={"name": "file", "file": "trace.csv", "repeat": "24h"},
    )
    assert system.speed == Spread(name="lognormal", sigma=1.0)
    assert system.availability == Availability(name="file", file=Path("trace.csv"), repeat="24h")
    assert [*system.files()] == [Path("fleet.csv"), Path("trace.csv")]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"download": 0.0}, "'download' parameter of System must be more than 0"),
        ({"upload": {"name": "uniform", "low": 0.0, "high": 2.0}}, r"\[system.upload\] low must be more than 0"),
        ({"speed": {"name": "uniform", "low": 3.0, "high": 2.0}}, "'low' must not be larger. Got 3.0 and 2.0"),
        ({"speed": {"name": "uniform", "low": 3.0}}, "needs 'low' and 'high'"),
        ({"speed": {"name": "file"}}, "needs its path: 'file'"),
        ({"speed": {"name": "lognormal", "low": 1.0}}, '\'low\' is for name = "uniform". Got name = "lognormal"'),
        ({"speed": {"name": "normal"}}, r"\[system.speed\] name must be 'lognormal', 'uniform' or 'file'"),
        ({"vanish": 0.999}, "'vanish' parameter of System must be at most 0.99"),
        ({"availability": {"name": "cycle"}}, "needs 'share'"),
        ({"availability": {"name": "cycle", "share": 0.0}}, r"\[system.availability\] share must be more than 0"),
        ({"availability": {"name": "file"}}, "needs 'file'"),
        ({"availability": {"name": "cycle", "share": 0.5, "repeat": "1h"}}, "'repeat' is for name = \"file\""),
        ({"step": "fast"}, "'step' parameter of System must be"),
    ],
)
def test_bad_values_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        System(**values)
