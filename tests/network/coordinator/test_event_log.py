"""Events of agents are bounded, counted, and safe to print."""

from __future__ import annotations

import pytest

from fedloom.network.coordinator import event_log
from fedloom.network.coordinator.event_log import QUOTA
from fedloom.network.protocol.messages import Failure
from fedloom.results.safe_text import LONGEST
from tests.network.conftest import World


def _stored(world: World) -> list[str]:
    return [row["message"] for row in world.ledger.audit_records() if row["record"] == "event"]


def test_an_agent_can_store_few_events_and_the_others_are_counted(world: World) -> None:
    agent, other = world.speaker(), world.speaker("clare")
    agent.hello()
    other.hello()
    failure = Failure(kind="error", message="x" * 20_000).model_dump_json().encode()
    before = world.ledger.size()
    for _ in range(QUOTA + 100):
        assert agent.send("POST", "/v1/failures", failure).status_code == 200
    assert world.ledger.size() - before < 5 * QUOTA * LONGEST
    assert world.pool.events.counts["error"] == QUOTA + 100
    shown = [line for line in _stored(world) if line.startswith("kerry failed")]
    assert len(shown) < QUOTA  # its connecting and its hello count too
    assert "further ones are only counted" in _stored(world)[-1]
    other.send("POST", "/v1/failures", failure)
    assert _stored(world)[-1].startswith("clare failed")


def test_after_an_hour_the_log_says_how_many_were_left_out(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "QUOTA", 2)
    for number in range(5):
        world.pool.log("denied", f"message {number}")
    monkeypatch.setattr(event_log, "PERIOD", 0.0)
    world.pool.log("denied", "message 5")
    world.pool.log("denied", "message 6")
    expected = ["message 0", "message 1", "There are too many messages of this kind", "3 messages of this kind"]
    expected += ["message 5", "message 6"]
    assert [line for line, start in zip(_stored(world), expected, strict=True) if not line.startswith(start)] == []
    assert world.said == _stored(world)


def test_the_same_rejection_is_shown_once_a_minute(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = world.speaker()
    agent.hello()
    world.ledger.revoke("kerry")
    for _ in range(3):
        assert agent.send("GET", "/v1/plan").status_code == 401
    assert sum("as 'kerry' was rejected: This agent was revoked" in line for line in world.said) == 1
    assert world.pool.events.counts["denied"] == 3
    monkeypatch.setattr(event_log, "REPEAT", 0.0)
    agent.send("GET", "/v1/plan")
    assert sum("as 'kerry' was rejected: This agent was revoked" in line for line in world.said) == 2


def test_messages_of_the_coordinator_itself_have_no_quota(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "QUOTA", 1)
    for number in range(3):
        world.pool.log("note", f"message {number}")
    assert len(_stored(world)) == 3


@pytest.mark.parametrize("sign", ["\x1b", "\x9b", "\r", "\x07", "\u202e", "\u2066", "\u2028", "\x00", "\u200b"])
def test_control_and_direction_characters_reach_neither_terminal_nor_status(world: World, sign: str) -> None:
    agent = world.speaker()
    agent.hello()
    failure = Failure(kind="refused", message=f"a{sign}[2Jb\nround 9: accepted").model_dump_json().encode()
    agent.send("POST", "/v1/failures", failure)
    agent.send("POST", "/v1/heartbeat", f'{{"doing": "a{ascii(sign)[1:-1]}"}}'.replace("\\x", "\\u00").encode())
    status = world.pool.status()["agents"][0]
    for text in (*world.said, *_stored(world), status["why"], status["doing"]):
        assert sign not in text
        assert not text.startswith("round 9")
        assert "\nround 9" not in text
    assert status["doing"] != ""
