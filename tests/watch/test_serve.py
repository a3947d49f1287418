"""The page's port: taken at once, on loopback unless told otherwise, and freed at the end."""

from __future__ import annotations

import socket
from pathlib import Path

import httpx
import pytest

from fedloom.errors import InputError, StoreError
from fedloom.watch.serve import WatchServer, is_loopback
from tests.watch.growing_run import GrowingRun


def test_it_serves_the_page_and_frees_the_port(tmp_path: Path) -> None:
    run = GrowingRun(tmp_path).add(1)
    server = WatchServer([run.folder])
    assert server.url == f"http://127.0.0.1:{server.port}/"
    with server.serving():
        assert "<title>fedloom watch</title>" in httpx.get(server.url).text
        with httpx.stream("GET", f"{server.url}api/events") as stream:  # an open stream does not hold up the end
            assert next(stream.iter_lines()) == "retry: 500"
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", server.port))


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    run = GrowingRun(tmp_path).add(1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"cannot use 127.0.0.1, port {port}: Address already in use. Choose"):
            WatchServer([run.folder], port=port)
    with pytest.raises(StoreError, match="is not a run folder"):
        WatchServer([tmp_path / "nothing"])


@pytest.mark.parametrize(("host", "private"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_beyond_this_machine_the_token_is_needed_to_see_anything(tmp_path: Path, host: str, private: bool) -> None:
    run = GrowingRun(tmp_path).add(1)
    server, said = WatchServer([run.folder], host), []
    server.announce(said.append)
    assert server.token in said[1]
    assert ("without TLS" in said[1]) == private
    with server.serving():
        reply = httpx.get(f"http://127.0.0.1:{server.port}/api/runs")
    assert reply.status_code == (401 if private else 200)


def test_loopback_is_only_this_machine() -> None:
    assert [is_loopback(host) for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost")] == [True] * 4
    assert [is_loopback(host) for host in ("0.0.0.0", "::", "192.0.2.1", "127.evil.example")] == [False] * 4
