"""An agent's requests: signed, corrected when clock or session are wrong, and clear when nobody answers."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from fedloom.network.agent.connection import Connection, ReplyReader
from fedloom.network.agent.unsigned_requests import Unreachable
from fedloom.network.protocol.messages import Heartbeat
from fedloom.network.protocol.rejection import Rejected
from fedloom.network.protocol.tensors import compressed
from tests.network.conftest import World


def test_a_wrong_clock_and_an_old_session_are_corrected(world: World) -> None:
    agent = world.speaker()
    agent.signer.session, agent.signer.offset = "of an earlier process", -1000.0
    assert agent.connection().post("/v1/heartbeat", Heartbeat()) == {"finished": "", "ask": "", "trust": ""}
    assert agent.signer.session == world.verifier.session
    assert abs(agent.signer.offset) < 10


def test_a_rejection_is_raised_with_its_code(world: World) -> None:
    agent = world.speaker()
    world.ledger.revoke("kerry")
    with pytest.raises(Rejected, match="This agent was revoked") as why:
        agent.connection().get("/v1/plan")
    assert (why.value.code, why.value.status) == ("revoked", 401)


def test_the_words_of_a_rejection_cannot_move_the_cursor(world: World) -> None:
    with pytest.raises(Rejected) as why:
        answering(world, 409, r'{"code": "a\r", "message": "b\u001b[2J\u202e\nerror: c"}').get("/v1/plan")
    assert (why.value.code, str(why.value)) == (r"a\r", r"b\x1b[2J\u202e" + "\n  | error: c")


def answering(world: World, status: int, text: str) -> Connection:
    connection = world.speaker().connection()
    page = httpx.MockTransport(lambda request: httpx.Response(status, text=text))
    connection._client = httpx.Client(transport=page)
    return connection


def test_a_coordinator_that_cannot_work_and_a_proxys_page_count_as_unreachable(world: World) -> None:
    with pytest.raises(Unreachable, match="cannot work at the moment: the disk is full"):
        answering(world, 507, '{"code": "disk", "message": "the disk is full"}').get("/v1/plan")


def test_a_page_of_another_server_counts_as_unreachable(world: World) -> None:
    with pytest.raises(Unreachable, match="http://coordinator did not respond as a fedloom coordinator"):
        answering(world, 200, "<html>").get("/v1/plan")


def test_a_port_where_nobody_listens_is_unreachable(world: World) -> None:
    connection = world.speaker().connection()

    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("connection refused")

    connection._client = httpx.Client(transport=httpx.MockTransport(refuse))
    with pytest.raises(Unreachable, match=r"coordinator cannot be reached: connection refused\.$"):
        connection.get("/v1/plan")


def test_a_reply_is_read_in_pieces_and_checked(tmp_path: Path) -> None:
    def reader(content: bytes, **headers: str) -> ReplyReader:
        return ReplyReader(httpx.Response(200, stream=httpx.ByteStream(content), headers=headers))

    assert reader(b"abcdef").take(4) == b"abcd"
    packed = b"".join(compressed([b"abcdef"]))
    assert reader(packed, **{"content-encoding": "zstd"}).take(6) == b"abcdef"
    with pytest.raises(Unreachable, match="ended too early"):
        reader(b"abc").take(4)
    longer = reader(b"abcdef")
    longer.take(4)
    with pytest.raises(Unreachable, match="longer than it says"):
        longer.end()
    with pytest.raises(Unreachable, match="not valid zstd"):
        reader(b"nonsense", **{"content-encoding": "zstd"}).take(4)
    with pytest.raises(Unreachable, match="damaged on the way"):
        reader(b"abc").into(tmp_path / "file", 3, "0" * 64)
    assert list(tmp_path.iterdir()) == []
