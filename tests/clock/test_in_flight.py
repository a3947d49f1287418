"""Versions of the state, as leaves of a checkpoint."""

import torch

from fedloom.clock.in_flight import leaves_of, versions_of


def test_versions_survive_a_checkpoint_with_groups_and_without() -> None:
    versions = {3: {"model": {"a/b": torch.ones(2)}, "control": {}}, 5: {}}
    found = versions_of({"now": torch.zeros(()), **leaves_of(versions)})
    assert {version: {group: [*tree] for group, tree in shared.items()} for version, shared in found.items()} == {
        3: {"model": ["a/b"], "control": []},
        5: {},
    }
    assert found[3]["model"]["a/b"].tolist() == [1.0, 1.0]
