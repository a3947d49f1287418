"""Versions of clients' states on an agent's disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedloom.errors import TrainingError
from fedloom.network.agent.state_versions import StateVersions
from fedloom.network.protocol.messages import NEW


def own(value: float) -> dict[str, dict[str, torch.Tensor]]:
    return {"control": {"w": torch.full((2,), value)}}


def test_only_a_replaced_agent_may_start_again_without_the_version_that_counts(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"The state of client 0 is missing.*`fedloom agents replace`"):
        StateVersions(tmp_path).load("c-1", 0, (3, 1, 0), own(0.0))
    versions, initial = StateVersions(tmp_path, replaced=True), own(0.0)
    assert versions.load("c-1", 0, (3, 1, 0), initial) is initial
    versions.save("c-1", 0, (4, 1, 0), own(4.0))
    assert torch.equal(versions.load("c-1", 0, (4, 1, 0), initial)["control"]["w"], own(4.0)["control"]["w"])
    with pytest.raises(TrainingError, match="The state of client 0 is missing"):
        versions.load("c-1", 0, (5, 1, 0), initial)  # it was made here, so it must be here


def test_a_clients_state_has_versions_until_the_coordinator_has_them_on_its_disk(tmp_path: Path) -> None:
    versions = StateVersions(tmp_path)
    initial = own(0.0)
    assert versions.load("c-1", 0, NEW, initial) is initial
    for round in (1, 2, 3):
        versions.save("c-1", 0, (round, 1, 0), own(float(round)))
    versions.save("c-1", 0, (3, 2, 0), own(3.5))  # another attempt at the same round

    def kept() -> list[str]:
        return sorted(path.name.split(".")[0] for path in (tmp_path / "c-1" / "0").iterdir())

    versions.prune("c-1", 0, (1, 1, 0), durable=0)
    assert kept() == ["1-1-0", "2-1-0", "3-1-0", "3-2-0"]
    versions.prune("c-1", 0, (3, 2, 0), durable=1)  # the attempt that counts is named; round 1 is the oldest needed
    assert kept() == ["1-1-0", "3-2-0"]
    versions.prune("c-1", 0, (3, 2, 0), durable=3)
    assert kept() == ["3-2-0"]
    assert torch.equal(versions.load("c-1", 0, (3, 2, 0), own(0.0))["control"]["w"], torch.full((2,), 3.5))
    with pytest.raises(TrainingError, match="missing"):
        versions.load("c-1", 0, (2, 1, 0), own(0.0))
    (tmp_path / "c-1" / "0" / "3-2-0.safetensors").write_bytes(b"half")
    with pytest.raises(TrainingError, match="damaged"):
        versions.load("c-1", 0, (3, 2, 0), own(0.0))


def test_an_abandoned_round_deletes_no_version_that_counts(tmp_path: Path) -> None:
    versions = StateVersions(tmp_path)
    for ticket in ((5, 1, 0), (6, 1, 0)):
        versions.save("c-1", 0, ticket, own(float(ticket[0])))
        versions.prune("c-1", 0, ticket, durable=4)
    # the second call of round 6 failed: what counts is that of round 5 again, and 6 is on the coordinator's disk
    versions.prune("c-1", 0, (5, 1, 0), durable=6)
    assert torch.equal(versions.load("c-1", 0, (5, 1, 0), own(0.0))["control"]["w"], torch.full((2,), 5.0))
