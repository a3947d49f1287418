"""Connecting to a Ray cluster: addresses, waiting, and which nodes compute. None of this needs Ray."""

import socket
import sys
import time
from types import ModuleType
from typing import Any

import pytest

from fedloom.backends import ray_cluster
from fedloom.backends.ray_cluster import Cluster, Node, _check_reachable
from fedloom.errors import InputError


def test_without_ray_the_message_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r'backend = "ray" needs Ray: pip install "fedloom\[ray\]"'):
        Cluster()


def test_nodes_that_are_alive_and_have_processors_are_listed_the_largest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def node(number: int, alive: bool = True, **resources: float) -> dict[str, Any]:
        return {"NodeID": f"{number}" * 8, "NodeManagerHostname": "host", "Alive": alive, "Resources": resources}

    fake = ModuleType("ray")
    fake.is_initialized = lambda: True  # type: ignore[attr-defined]
    fake.nodes = lambda: [  # type: ignore[attr-defined]
        node(1, CPU=2.0, object_store_memory=5.0, memory=7.0),
        node(2, CPU=4.0),
        node(3, alive=False, CPU=8.0),
        node(4),
    ]
    monkeypatch.setitem(sys.modules, "ray", fake)
    cluster = Cluster(workers=3)
    assert cluster.nodes() == [
        Node("2" * 8, "host (222222)", workers=3, store_bytes=0, memory_bytes=0),
        Node("1" * 8, "host (111111)", workers=2, store_bytes=5, memory_bytes=7),
    ]
    assert str(cluster) == "5 worker processes on host (222222), host (111111)"


@pytest.mark.parametrize("address", ["nowhere", "ray://127.0.0.1:10001", "host:port", ""])
def test_what_is_not_an_address_is_refused(address: str) -> None:
    with pytest.raises(InputError, match=rf'\[run\] address must be "local", "auto" .* Got "{address}" instead'):
        _check_reachable(address)


def test_a_slow_start_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**settings: Any) -> None:
        time.sleep(0.3)
        raise ConnectionError("gave up")

    fake = ModuleType("ray")
    fake.init, fake.is_initialized = init, lambda: False  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setattr(ray_cluster, "SLOW_START", 0.01)
    told: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(InputError, match="gave up"):
            Cluster(address, tell=told.append)
    assert told == [f"Still waiting for Ray at {address}. Is a head node there, and not something else?"]


def test_an_address_where_nothing_answers_is_refused() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(InputError, match=rf'address = "{address}": no Ray answered there'):
            _check_reachable(address)
