"""The named instants at which the fault matrix kills processes are those that the code passes."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

import fedloom
from tests.network.points import AGENT_POINTS, COORDINATOR_POINTS

PACKAGE = Path(fedloom.__file__).parent


def test_every_instant_in_the_code_is_listed_and_every_listed_one_is_in_the_code() -> None:
    code = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py") if path.name != "faults.py")
    named = set(re.findall(r'faults\.point\("([^"]+)"\)', code))
    # files that take another's place pass three instants each, named after what they are
    kinds = {"checkpoint", *re.findall(r'replacing\([^)]*"(\w+)"\)', code)} - {"file"}
    named |= {f"{kind}.{step}" for kind in kinds for step in re.findall(r'faults\.point\(f"\{what\}\.(\w+)"\)', code)}
    assert named == {*COORDINATOR_POINTS, *AGENT_POINTS}


def test_every_point_has_a_different_name() -> None:
    points = [*COORDINATOR_POINTS, *AGENT_POINTS]
    assert len(set(points)) == len(points)


@pytest.mark.skipif(not os.environ.get("FEDLOOM_FAULTS"), reason="takes minutes: set FEDLOOM_FAULTS=1")
@pytest.mark.slow
def test_no_bit_changes_whatever_fails() -> None:
    from tests.network.faults import FAULTS, attempt

    for name in FAULTS:
        struck, why = attempt(name, 0)
        assert (struck > 0, why) == (True, ""), name
