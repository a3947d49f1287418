"""What the coordinator knows about clients: names and sizes, but no example."""

from __future__ import annotations

from fedloom.network.coordinator.roster import Roster


def test_a_roster_has_sizes_and_names_and_changes_with_the_marks() -> None:
    sizes = [{"train": 6, "validation": 2, "test": 1}, {"train": 3, "validation": 0, "test": 4}]
    roster = Roster.of(["a", "b"], sizes, ["x", "y"], ["mark"])
    assert (roster.clients, roster.name(1), len(roster.x)) == (2, "b", 0)
    assert roster.sizes("train").tolist() == [6, 3]
    assert roster.counts([1], "test").tolist() == [4]
    assert roster.fingerprint != Roster.of(["a", "b"], sizes, ["x", "y"], ["another"]).fingerprint
