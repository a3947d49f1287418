"""Which connections stay open, and what a request's header may be."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from fedloom.network.agent.connection import Connection
from fedloom.network.coordinator import connections
from fedloom.network.coordinator.connections import Connections
from fedloom.network.coordinator.serve import HttpsServer
from fedloom.network.protocol.messages import Heartbeat
from tests.network.conftest import World, wait_for


class Pairs:
    """Connections whose other ends show whether they were closed."""

    def __init__(self) -> None:
        self.known = Connections(limit=1000)
        self.ends: dict[str, tuple[socket.socket, socket.socket]] = {}

    def add(self, *names: str) -> None:
        """Connect strangers, each named by its address and a number."""
        for name in names:
            here, there = socket.socketpair()
            there.setblocking(False)
            self.ends[name] = (here, there)
            self.known.add(here, self.peer(name))

    @staticmethod
    def peer(name: str) -> tuple[str, int]:
        address, _, number = name.partition(":")
        return address, int(number)

    def open(self) -> list[str]:
        return [name for name, (_, there) in self.ends.items() if not _ended(there)]


def _ended(connection: socket.socket) -> bool:
    with contextlib.suppress(BlockingIOError):
        return connection.recv(1) == b""
    return False


@pytest.fixture
def pairs() -> Iterator[Pairs]:
    made = Pairs()
    yield made
    for here, there in made.ends.values():
        here.close()
        there.close()


def test_the_oldest_stranger_of_the_busiest_address_gives_way(pairs: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "STRANGERS", 4)
    pairs.add("b:1", "a:1", "a:2", "a:3", "c:1")
    assert pairs.open() == ["b:1", "a:2", "a:3", "c:1"]
    pairs.add("d:1")
    assert pairs.open() == ["b:1", "a:3", "c:1", "d:1"]


def test_an_address_has_its_own_limit(pairs: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "FROM_ONE_ADDRESS", 2)
    pairs.add("a:1", "b:1", "a:2", "a:3")
    assert pairs.open() == ["b:1", "a:2", "a:3"]
    assert pairs.known.ended == 1


def test_connections_that_are_closed_already_do_not_count(pairs: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "STRANGERS", 2)
    pairs.add("a:1", "a:2")
    pairs.ends["a:2"][0].close()
    pairs.add("a:3")
    assert pairs.open() == ["a:1", "a:3"]


def test_agents_make_no_room_for_strangers_and_leave_descriptors_in_reserve(
    pairs: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs.known.limit = connections.RESERVE + 5
    pairs.add("a:1", "a:2")
    for name in ("a:1", "a:2"):
        pairs.known.recognise(pairs.peer(name), name)
    pairs.add("a:3", "a:4")
    assert pairs.open() == ["a:1", "a:2", "a:4"]


def test_an_agent_has_a_few_connections(pairs: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "OF_ONE_AGENT", 2)
    pairs.add("a:1", "a:2", "a:3", "a:4")
    for name, agent in (("a:1", "kerry"), ("a:2", "clare"), ("a:3", "kerry"), ("a:3", "kerry"), ("a:4", "kerry")):
        pairs.known.recognise(pairs.peer(name), agent)
    assert pairs.open() == ["a:2", "a:3", "a:4"]


def test_strangers_have_a_few_seconds(pairs: Pairs) -> None:
    pairs.add("a:1", "a:2")
    pairs.known.recognise(("a", 1), "kerry")
    pairs.known.end_strangers(3600.0)
    assert pairs.open() == ["a:1", "a:2"]
    pairs.known.end_strangers(0.0)
    assert pairs.open() == ["a:1"]


def test_a_signed_request_makes_a_connection_an_agents(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = world.speaker()
    with HttpsServer(world.pool, "127.0.0.1", 0) as server:
        with socket.create_connection(("127.0.0.1", server.number), timeout=30) as silent:
            connection = Connection(f"http://127.0.0.1:{server.number}", agent.signer, True)
            connection.post("/v1/heartbeat", Heartbeat())
            known = server.server.connections
            wait_for(lambda: known.strangers)
            assert [owner for _, owner in known.agents.values()] == [agent.signer.agent]
            monkeypatch.setattr(connections, "INTRODUCTION", 0.0)
            assert silent.recv(1) == b""
            connection.post("/v1/heartbeat", Heartbeat())
            assert len(known.agents) == 1
        connection.close()


@pytest.mark.parametrize(
    "sent",
    [b"GET /v1/status HTTP/1.1\r\nx: ", b"GET /", b"POST /v1/enrol HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"],
)
def test_an_endless_header_ends_the_connection(world: World, sent: bytes) -> None:
    with HttpsServer(world.pool, "127.0.0.1", 0) as server:
        address = ("127.0.0.1", server.number)
        with socket.create_connection(address, timeout=30) as stranger, contextlib.suppress(ConnectionError):
            stranger.sendall(sent + b"0" * connections.HEADER_LIMIT * 40)
            assert b" 200 " not in stranger.recv(1000)
        wait_for(lambda: not server.server.server_state.connections)
