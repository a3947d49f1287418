"""What becomes of an answer: accepted once, or rejected with a code; limits, compression, files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom.network.coordinator import intake
from fedloom.network.coordinator.request_guard import RequestBody
from fedloom.network.protocol.tensors import Parcel, compressed
from tests.network.conftest import HELLO, World, code
from tests.network.hostile_bodies import described, empty_tensors, many_clients, nested, send


def test_an_answer_is_accepted_once(world: World) -> None:
    agent = world.speaker()
    agent.hello()
    call = world.open_call(agent)
    body = agent.answer().whole
    for _ in range(2):  # the same body again is the reply that was lost, not a second answer
        reply = agent.send("POST", "/v1/answers", body)
        assert reply.json()["results"] == [{"client": "0", "status": "accepted"}]
    assert world.pool.accepted == 1
    other = agent.send("POST", "/v1/answers", agent.answer(scale=2.0).whole).json()["results"][0]
    assert (other["status"], other["code"]) == ("rejected", "duplicate")
    world.pool.wait(call, 1)
    assert float(call.answers[0].update.groups["model"]["w"][0, 0]) == 1.0
    late = agent.send("POST", "/v1/answers", body).json()["results"][0]
    assert late["code"] == "late"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "malformed"),
        (b"nonsense", "malformed"),
        (b"\xff" * 64, "malformed"),
        (Parcel({}, {}).whole, "malformed"),
        (Parcel({"ask": "ask", "results": []}).whole, "malformed"),
        (Parcel({"ask": "ask", "results": [{"client": 0}]}, {"1/update/model/w": torch.ones(1)}).whole, "malformed"),
        (Parcel({"ask": "ask", "results": [{"client": 0}, {"client": 0}]}).whole, "malformed"),
        (Parcel({"ask": "ask", "results": [{"client": -1}]}).whole, "malformed"),
        (Parcel({"ask": "ask", "results": [{"client": 0}]}, {"0/update/model/w": torch.ones(1)}).whole, "malformed"),
    ],
)
def test_a_body_that_is_not_an_answer_is_rejected(world: World, body: bytes, reason: str) -> None:
    agent = world.speaker()
    agent.hello()
    call = world.open_call(agent)
    reply = agent.send("POST", "/v1/answers", body)
    assert (reply.status_code, code(reply)) == (422, reason)
    assert 0 in call.waiting
    assert not list(world.ledger.updates.iterdir())


def test_answers_for_other_agents_clients_and_of_other_attempts_are_rejected(world: World) -> None:
    agent, other = world.speaker(), world.speaker("clare")
    agent.hello()
    other.hello()
    world.open_call(agent, other)
    (result,) = agent.send("POST", "/v1/answers", agent.answer(client=1).whole).json()["results"]
    assert result["code"] == "not-asked"
    (result,) = agent.send("POST", "/v1/answers", agent.answer(ask="another attempt").whole).json()["results"]
    assert result["code"] == "late"


def test_when_memory_is_short_answers_are_mapped_from_their_files(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedloom.network.coordinator.intake.MEMORY", 10)
    agent = world.speaker()
    agent.hello()
    call = world.open_call(agent)
    agent.send("POST", "/v1/answers", agent.answer(scale=3.0).whole)
    assert call.in_memory == 0
    assert torch.equal(call.answers[0].update.groups["model"]["w"], torch.full((1, 3), 3.0))


def test_of_two_answers_at_the_same_time_one_is_stored_and_the_other_must_be_sent_again(world: World) -> None:
    agent = world.speaker()
    agent.hello()
    call = world.open_call(agent)
    call.claimed.add(0)  # as while the other is being written
    busy = agent.send("POST", "/v1/answers", agent.answer(scale=2.0).whole)
    assert (busy.status_code, code(busy)) == (503, "busy")
    call.claimed.discard(0)
    assert agent.send("POST", "/v1/answers", agent.answer().whole).json()["results"][0]["status"] == "accepted"
    assert not call.claimed


def test_an_answer_that_cannot_be_stored_must_be_sent_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedloom.errors import StoreError

    agent = world.speaker()
    agent.hello()
    call = world.open_call(agent)
    accept = world.ledger.accept

    def full(*given: Any) -> None:
        raise StoreError("the disk is full")

    monkeypatch.setattr(world.ledger, "accept", full)
    reply = agent.send("POST", "/v1/answers", agent.answer().whole)
    assert (reply.status_code, code(reply)) == (507, "disk")
    assert (list(call.waiting), call.answers) == ([0], {})
    monkeypatch.setattr(world.ledger, "set_hello", full)
    said = agent.send("POST", "/v1/hello", HELLO.model_dump_json().encode())
    assert (said.status_code, code(said)) == (507, "disk")
    monkeypatch.setattr(world.ledger, "accept", accept)
    assert agent.send("POST", "/v1/answers", agent.answer().whole).json()["results"][0]["status"] == "accepted"


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
    monkeypatch.setattr("fedloom.network.coordinator.request_guard.SMALL", 10)
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


@pytest.fixture
def contents(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The SHA-256 of every body whose tensors were read."""
    read: list[str] = []
    content = RequestBody.content

    def counted(body: RequestBody) -> Any:
        read.append(body.sha256)
        return content(body)

    monkeypatch.setattr(RequestBody, "content", counted)
    return read


def test_tensors_that_nobody_waits_for_are_not_read(world: World, contents: list[str]) -> None:
    agent, other = world.speaker(), world.speaker("clare")
    agent.hello()
    other.hello()
    world.open_call(agent, other)
    found = []
    for body in (agent.answer(ask="another attempt"), agent.answer(client=1)):
        found += agent.send("POST", "/v1/answers", body.whole).json()["results"]
    assert contents == []
    found += agent.send("POST", "/v1/answers", agent.answer().whole).json()["results"]
    assert len(contents) == 1
    found += agent.send("POST", "/v1/answers", agent.answer().whole).json()["results"]
    found += agent.send("POST", "/v1/answers", agent.answer(scale=2.0).whole).json()["results"]
    world.pool.call = None
    found += other.send("POST", "/v1/answers", other.answer(client=1).whole).json()["results"]
    assert len(contents) == 1
    codes = [one.get("code", one["status"]) for one in found]
    assert codes == ["late", "not-asked", "accepted", "accepted", "duplicate", "late"]


@pytest.mark.parametrize(
    "body",
    [
        many_clients(20_000, 6_000),
        many_clients(2, 10),
        empty_tensors(20_000),
        empty_tensors(1_100),
        nested(100_000),
        nested(2_000),
        (1 << 40).to_bytes(8, "little") + b"{}",
        described({"ask": "ask", "results": [{"client": 0}], "more": "x" * (2 << 20)}, []),
        described([], []),
        b"\x02" + bytes(7) + b"[]",
        b"\x02" + bytes(7) + b"{}",
    ],
)
def test_a_description_that_is_too_long_is_rejected_before_any_tensor_is_read(
    world: World, contents: list[str], body: bytes
) -> None:
    agent = world.speaker()
    agent.hello()
    call = world.open_call(agent)
    for reply in (agent.send("POST", "/v1/answers", body), send(agent, body)):
        assert (reply.status_code, code(reply)) == (422, "malformed")
    assert contents == []
    assert 0 in call.waiting


def test_an_answer_may_have_as_many_tensors_as_its_method_returns(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = world.speaker()
    agent.hello()
    world.open_call(agent)
    monkeypatch.setattr(intake, "TENSORS_OF_CLIENT", 0)
    for most, expected in ((2, (422, "malformed")), (3, (200, "accepted"))):
        world.pool.most_tensors = most
        reply = agent.send("POST", "/v1/answers", agent.answer().whole)
        told = reply.json()
        assert (reply.status_code, told["code"] if "code" in told else told["results"][0]["status"]) == expected


@pytest.mark.slow
def test_hostile_bodies_take_little_memory() -> None:
    command = [sys.executable, "-m", "tests.network.hostile_bodies"]
    done = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["accepted"]
    assert max(found["bytes"]) > 55 << 20
    assert found["most"] - found["before"] < 100 << 10, found  # kB: it was gigabytes
