"""What the coordinator knows about clients: names and sizes, but no example."""

from __future__ import annotations

from fedloom.network.coordinator.roster import Roster
from fedloom.network.protocol.messages import ClientFacts
from tests.network.conftest import HELLO

ROWS = [{"client": 0, "agent": "x", "local": 0, "name": "a"}, {"client": 1, "agent": "y", "local": 1, "name": "b"}]


def test_a_roster_has_sizes_and_names_and_changes_with_the_marks() -> None:
    first = HELLO.model_copy(update={"clients": (ClientFacts(name="a", train=6, validation=2, test=1),)})
    others = tuple(ClientFacts(name="b", train=train, validation=0, test=4) for train in (9, 3))
    second = HELLO.model_copy(update={"clients": others})
    roster = Roster.of(ROWS, {"x": first, "y": second})
    assert (roster.clients, roster.name(1), len(roster.x)) == (2, "b", 0)
    assert roster.hosts == {0: ("x", 0), 1: ("y", 1)}
    assert roster.sizes("train").tolist() == [6, 3]
    assert roster.counts([1], "test").tolist() == [4]
    changed = second.model_copy(update={"data_mark": "another"})
    assert roster.fingerprint != Roster.of(ROWS, {"x": first, "y": changed}).fingerprint


def test_the_clients_of_a_rehearsal_are_found_by_their_numbers() -> None:
    numbered = [
        HELLO.model_copy(update={"clients": (ClientFacts(name="c", number=n, train=5 + n, validation=0, test=0),)})
        for n in (0, 1)
    ]
    rows = [{**ROWS[0], "agent": "y", "local": 1}, {**ROWS[1], "agent": "x", "local": 0}]
    assert Roster.of(rows, dict(zip("xy", numbered, strict=True))).sizes("train").tolist() == [6, 5]
