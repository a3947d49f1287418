"""Bodies on their way in: limits, compression, files."""

from __future__ import annotations

import pytest
import torch

from fedloom.network.protocol.compression import compressed
from tests.network.conftest import World, code


def test_a_body_that_is_too_large_is_rejected_before_it_is_read(world: World) -> None:
    agent = world.speaker()
    agent.hello()
    world.open_call(agent)
    world.pool.largest = 100
    reply = agent.send("POST", "/v1/answers", agent.answer().whole)
    assert (reply.status_code, code(reply)) == (413, "too-large")
    assert not list(world.ledger.updates.iterdir())


def test_answers_may_be_compressed(world: World) -> None:
    agent = world.speaker()
    agent.hello()
    call = world.open_call(agent)
    whole = agent.answer().whole
    reply = agent.send(
        "POST", "/v1/answers", b"".join(compressed([whole])), signs=whole, **{"content-encoding": "zstd"}
    )
    assert reply.json()["results"][0]["status"] == "accepted"
    assert torch.equal(call.answers[0].update.groups["model"]["w"], torch.ones(1, 3))
    (kept,) = world.ledger.updates.iterdir()
    assert kept.read_bytes() == whole


@pytest.mark.parametrize(
    ("body", "encoding", "expected"),
    [
        (b"".join(compressed([bytes(1 << 20)] * 200)), "zstd", (413, "too-large")),  # a few kilobytes, 200 MB unpacked
        (b"nonsense", "zstd", (422, "malformed")),
        (b"", "zstd", (422, "malformed")),
        (b"whatever", "gzip", (415, "encoding")),
        (b"whatever", "zstd, zstd", (415, "encoding")),
    ],
)
def test_compressed_bombs_and_nonsense_are_rejected(
    world: World, body: bytes, encoding: str, expected: tuple[int, str]
) -> None:
    agent = world.speaker()
    agent.hello()
    call = world.open_call(agent)
    reply = agent.send("POST", "/v1/answers", body, signs=b"", **{"content-encoding": encoding})
    assert (reply.status_code, code(reply)) == expected
    assert 0 in call.waiting
    assert not list(world.ledger.updates.iterdir())


def test_a_large_answer_goes_through_a_file_and_is_the_same(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedloom.network.coordinator.request_body.SMALL", 10)
    agent, other = world.speaker(), world.speaker("clare")
    agent.hello()
    other.hello()
    call = world.open_call(agent, other)
    whole = agent.answer().whole
    assert agent.send("POST", "/v1/answers", whole).json()["results"][0]["status"] == "accepted"
    wrong = other.send("POST", "/v1/answers", other.answer(client=1).whole, signs=b"another")
    assert (wrong.status_code, code(wrong)) == (401, "body")
    assert torch.equal(call.answers[0].update.groups["model"]["w"], torch.ones(1, 3))
    assert [file.read_bytes() for file in world.ledger.updates.iterdir()] == [whole]
