"""Assignments and their tensors: fetched once, checked, and laid out for one client."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom.network.agent.connection import Connection
from fedloom.network.agent.parcel_cache import ParcelCache
from fedloom.network.protocol.messages import AssignedClient, Assignment, ParcelInfo
from fedloom.network.protocol.tensors import Parcel, WireError, compressed
from tests.network.conftest import World

SHARED = Parcel({}, {"model/w": torch.arange(3.0)})
PRIVATE = Parcel({}, {"hint/v": torch.tensor([[5.0], [6.0]])})
PEERS = Parcel({"senders": [0, 3], "width": 4}, {"model/w": torch.tensor([[1.0], [2.0]])})


def received(world: World, cache: ParcelCache, **parcels: Parcel) -> Assignment:
    """An assignment with these parcels, as an agent receives it."""
    agent = world.speaker() if not world.pool.agents else None
    if agent is not None:
        agent.hello()
        world.agent = agent  # type: ignore[attr-defined]
    speaker: Any = world.agent  # type: ignore[attr-defined]
    call = world.open_call(speaker, clients=2)
    infos = tuple(ParcelInfo(role=role, sha256=one.sha256, bytes=one.size) for role, one in parcels.items())  # type: ignore[arg-type]
    assignment = call.assignments[speaker.signer.agent]
    call.assignments[speaker.signer.agent] = assignment.model_copy(update={"parts": infos})
    call.parcels.update({parcel.sha256: parcel for parcel in parcels.values()})
    found = cache.next_assignment(speaker.connection())
    assert isinstance(found, Assignment)
    world.bytes = call.sent[speaker.signer.agent]  # type: ignore[attr-defined]
    return found


def test_tensors_arrive_with_the_assignment_and_are_not_sent_again(world: World, tmp_path: Path) -> None:
    cache = ParcelCache(tmp_path / "tensors")
    first = received(world, cache, shared=SHARED)
    sent = world.bytes  # type: ignore[attr-defined]
    assert torch.equal(cache.groups(first, "shared")["model"]["w"], torch.arange(3.0))
    again = received(world, cache, shared=SHARED)
    assert sent - world.bytes >= SHARED.size - 100  # type: ignore[attr-defined]
    assert torch.equal(cache.groups(again, "shared")["model"]["w"], torch.arange(3.0))


@pytest.mark.parametrize("compress", [False, True])
def test_all_assignments_come_over_one_connection(world: World, tmp_path: Path, compress: bool) -> None:
    """A reply that is not read to its end costs its connection: agents would make a new one for every assignment."""
    agent, content = world.speaker(), b"".join(SHARED.pieces())
    agent.hello()
    part = ParcelInfo(role="shared", sha256=SHARED.sha256, bytes=SHARED.size)
    assignment = world.open_call(agent).assignments[agent.signer.agent].model_copy(update={"parts": (part,)})
    header = json.dumps({**assignment.model_dump(mode="json"), "missing": [SHARED.sha256]}).encode()
    message = len(header).to_bytes(4, "little") + header + content
    message, encoding = (b"".join(compressed([message])), "zstd") if compress else (message, "identity")
    replies = [(200, message), (204, b""), (200, message), (200, message)]
    connections = []

    class Coordinator(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            connections.append(self.client_address)
            super().setup()

        def do_GET(self) -> None:
            status, body = replies.pop(0)
            self.send_response(status)
            self.send_header("content-encoding", encoding)
            if status == 200:
                self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Coordinator) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        connection = Connection(f"http://127.0.0.1:{server.server_port}", agent.signer, True)
        cache = ParcelCache(tmp_path / "tensors")
        found = [cache.next_assignment(connection) for _ in range(4)]
        connection.close()
        server.shutdown()
    assert [one if isinstance(one, str) else one.id for one in found] == ["ask", "", "ask", "ask"]
    assert len(connections) == 1


def test_large_tensors_go_to_the_disk(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedloom.network.agent.parcel_cache.SMALL", 10)
    cache = ParcelCache(tmp_path / "tensors")
    found = received(world, cache, shared=SHARED)
    assert [file.name for file in (tmp_path / "tensors").iterdir()] == [SHARED.sha256]
    assert torch.equal(cache.groups(found, "shared")["model"]["w"], torch.arange(3.0))
    ParcelCache(tmp_path / "tensors")  # a new process does not know what they are
    assert list((tmp_path / "tensors").iterdir()) == []


def test_a_client_gets_its_own_row_and_its_peers_trees(world: World, tmp_path: Path) -> None:
    cache = ParcelCache(tmp_path / "tensors")
    found = received(world, cache, shared=SHARED, private=PRIVATE, peers=PEERS)
    one = AssignedClient(client=1, local=1, row=1, receives=(3,))
    private = cache.private(found, one)
    assert private is not None
    assert private["hint"]["v"].tolist() == [[6.0]]
    trees, graph = cache.peers(found, one)
    assert trees is not None
    assert graph is not None
    assert trees["model"]["w"].tolist() == [[1.0], [0.0], [0.0], [2.0]]
    assert graph.tolist() == [[False, False, False, True]]
    with pytest.raises(WireError, match="lacks the message for one of its clients"):
        cache.private(found, AssignedClient(client=2, local=2, row=2))
    with pytest.raises(WireError, match="lacks some of the trees"):
        cache.peers(found, AssignedClient(client=1, local=1, receives=(1,)))
