"""Floods of connections by strangers: rounds go on, and agents behind the same address get in."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.network.conftest import EXPERIMENT, Federation, serial_weights, wait_for, weights
from tests.network.flood import KINDS, end_flood, flood

VALUES = {**EXPERIMENT, "rounds": 3, "cohort": {"deadline": "2m", "quorum": 1.0}}


def _run_in_a_flood(world: Federation, kind: str, count: int, descriptors: int, folder: Path) -> int:
    """Run with agents that enrol and work during a flood from their own address; return its connections."""
    coordinator = world.serve()
    resource.prlimit(coordinator.pid, resource.RLIMIT_NOFILE, (descriptors, descriptors))
    world.tokens()
    strangers = flood(world.port, count, kind)
    try:
        for number in range(world.agents):
            world.join(number)
        assert world.finish() == 0, world.log()
    finally:
        opened = end_flood(strangers)
    assert weights(world.out) == serial_weights({**EXPERIMENT, "rounds": 3}, folder / "serial")
    assert "Traceback" not in world.log(), world.log()
    return opened


@pytest.mark.slow
def test_a_flood_of_connections_leaves_descriptors_for_agents_and_checkpoints(
    federation: Callable[..., Federation], tmp_path: Path
) -> None:
    opened = _run_in_a_flood(federation(VALUES), "silent", 300, 256, tmp_path)
    assert opened >= 300  # and more, if the coordinator closed some while the flood lasted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "count"), [(kind, 10_000 if kind in ("silent", "half a handshake") else 1_000) for kind in KINDS]
)
def test_ten_thousand_connections_do_not_stop_a_run(
    federation: Callable[..., Federation], tmp_path: Path, kind: str, count: int
) -> None:
    assert _run_in_a_flood(federation(VALUES), kind, count, 1024, tmp_path) >= count


def test_a_flood_is_over_when_the_port_closes(federation: Callable[..., Federation]) -> None:
    world = federation({**EXPERIMENT, "rounds": 1})
    coordinator = world.serve()
    world.tokens()
    strangers = flood(world.port, 50, "silent")
    coordinator.terminate()
    wait_for(lambda: coordinator.poll() is not None, 30)
    end_flood(strangers)
