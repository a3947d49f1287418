"""The coordinator's connections: strangers get few of them, for seconds, so that agents and checkpoints find room.

A connection is a stranger's until its first signed request. A flood of silent connections, half headers or TLS
handshakes that never finish costs a bounded number of descriptors: the oldest of the flood give way to new ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

STRANGERS = 512  # connections without a signed request, in all
FROM_ONE_ADDRESS = 256  # of these
OF_ONE_AGENT = 16  # connections with signed requests: an agent needs two
INTRODUCTION = 10.0  # seconds until a connection must have sent a signed request
RESERVE = 128  # descriptors for the ledger, checkpoints and everything else
BACKLOG = 128  # connections that the system holds until they are accepted
HEADER_LIMIT = 32 << 10  # bytes of a request before its body

Peer = tuple[str, int]


def descriptors() -> int:
    """Raise the limit of open descriptors as far as this process may; return it."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return 1 << 14
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return soft if soft != resource.RLIM_INFINITY else 1 << 20


def one_address(host: str) -> str:
    """Return what counts as one address: the first 64 bits of IPv6, because one subscriber has all the others.

    >>> one_address("192.0.2.7"), one_address("2001:db8::1:2:3:4"), one_address("::ffff:192.0.2.7")
    ('192.0.2.7', '2001:db8::/64', '192.0.2.7')
    """
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    mapped = address.ipv4_mapped
    return str(mapped) if mapped is not None else str(ipaddress.ip_network((address, 64), strict=False))


class Connections:
    """The open connections of a port, each a stranger's or an agent's; used in the event loop's thread alone."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = descriptors() if limit is None else limit
        self.strangers: dict[Peer, tuple[socket.socket, str, float]] = {}  # with address and time, the oldest first
        self.agents: dict[Peer, tuple[socket.socket, str]] = {}  # with the agent's number, the oldest first
        self.ended = 0  # connections that were closed for a limit

    def add(self, connection: socket.socket, peer: Peer) -> None:
        """Add a stranger's connection; close others if there are too many."""
        self.strangers[peer] = (connection, one_address(peer[0]), time.monotonic())
        if len(self.strangers) > min(self._room(), FROM_ONE_ADDRESS):
            self._forget_closed()
            self._make_room()

    def recognise(self, peer: Peer, agent: str) -> None:
        """Note that an agent's signed request came over this connection."""
        if peer in self.agents and self.agents[peer][1] == agent:
            return
        known = self.strangers.pop(peer, None) or self.agents.pop(peer, None)
        if known is None:
            return
        self.agents[peer] = (known[0], agent)
        if sum(owner == agent for _, owner in self.agents.values()) > OF_ONE_AGENT:
            self._forget_closed()
            own = [one for one, (_, owner) in self.agents.items() if owner == agent]
            for one in own[:-OF_ONE_AGENT]:
                self._end(self.agents.pop(one)[0])

    def counts(self) -> dict[str, int]:
        """Return how many connections are open."""
        self._forget_closed()
        return {"agent": len(self.agents), "stranger": len(self.strangers)}

    def end_strangers(self, seconds: float) -> None:
        """Close the connections of strangers that have been open for so long."""
        self._forget_closed()
        latest = time.monotonic() - seconds
        for peer in [peer for peer, (_, _, since) in self.strangers.items() if since <= latest]:
            self._end(self.strangers.pop(peer)[0])

    def _room(self) -> int:
        """Return how many strangers may connect; an agent may be uploading into a file, which is two descriptors."""
        return min(STRANGERS, self.limit // 4, self.limit - RESERVE - 2 * len(self.agents))

    def _make_room(self) -> None:
        """Close the oldest connections of strangers, of the address that has most, until the limits hold."""
        counts = Counter(address for _, address, _ in self.strangers.values())
        while self.strangers:
            busiest = max(counts, key=lambda address: counts[address])
            if len(self.strangers) <= self._room() and counts[busiest] <= FROM_ONE_ADDRESS:
                return
            oldest = next(peer for peer, (_, address, _) in self.strangers.items() if address == busiest)
            self._end(self.strangers.pop(oldest)[0])
            counts[busiest] -= 1

    def _forget_closed(self) -> None:
        self.strangers = {peer: one for peer, one in self.strangers.items() if one[0].fileno() >= 0}
        self.agents = {peer: one for peer, one in self.agents.items() if one[0].fileno() >= 0}

    def _end(self, connection: socket.socket) -> None:
        """End a connection; the event loop notices, and frees its descriptor."""
        self.ended += 1
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


class BoundedHttp(HttpToolsProtocol):
    """Reads requests whose headers have a bounded size; `recognise` in their scope tells whose connection it is."""

    def __init__(self, connections: Connections, **settings: Any) -> None:
        super().__init__(**settings)
        self._known, self._unread = connections, 0

    def data_received(self, data: bytes) -> None:
        self._unread += len(data)
        super().data_received(data)
        if self._unread > HEADER_LIMIT:
            self.transport.abort()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self.client is not None:  # before uvicorn replaces it by what a trusted proxy says
            scope: dict[str, Any] = self.scope  # type: ignore[assignment]
            scope["recognise"] = partial(self._known.recognise, self.client)

    def on_headers_complete(self) -> None:
        self._unread = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unread = 0
        super().on_body(body)


class LimitedServer(uvicorn.Server):
    """uvicorn, with the connections of one listening socket accepted here, where they are counted."""

    def __init__(self, config: uvicorn.Config, connections: Connections) -> None:
        super().__init__(config)
        self.connections = connections
        self._tasks: set[asyncio.Task[None]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        for one in sockets or []:
            one.listen(BACKLOG)
            one.setblocking(False)
            self._start(self._accept(one))
        self._start(self._watch())
        await super().startup(sockets=[])

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.connections.end_strangers(0.0)  # only agents may finish what they are sending
        await super().shutdown(sockets)

    def _start(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)  # the loop itself keeps no reference
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket) -> None:
        make = partial(BoundedHttp, self.connections, config=self.config, server_state=self.server_state, app_state={})
        while True:
            try:
                connection, peer = await asyncio.get_running_loop().sock_accept(listener)
                self.connections.add(connection, (str(peer[0]), int(peer[1])))
                self._start(self._open(connection, make))
            except OSError:  # no descriptor is left, or the stranger has gone already
                await asyncio.sleep(0.05)
            await asyncio.sleep(0)  # others must get their turn while connections come faster than this

    async def _open(self, connection: socket.socket, make: Callable[[], asyncio.Protocol]) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(make, connection, ssl=self.config.ssl)
        except (OSError, asyncio.TimeoutError):  # TLS failed, or was not finished
            connection.close()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            self.connections.end_strangers(INTRODUCTION)
