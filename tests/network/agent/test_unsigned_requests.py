"""What can be asked without a signature: the certificate and the status."""

from __future__ import annotations

import re
import subprocess
import sys

import httpx
import pytest

from fedloom.errors import InputError
from fedloom.network.agent.unsigned_requests import Unreachable, fetch_status
from fedloom.network.coordinator.serve import HttpsServer
from fedloom.network.protocol.token import Token
from tests.network.conftest import World


def test_a_token_with_a_fingerprint_needs_https() -> None:
    with pytest.raises(InputError, match="use https://"):
        fetch_status("http://host:1", Token.new("ab" * 32))


def test_another_server_at_the_address_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    page = httpx.Response(200, text="<html>", request=httpx.Request("GET", "https://host"))
    monkeypatch.setattr(httpx.Client, "request", lambda *given, **more: page)
    with pytest.raises(InputError, match="https://host did not respond as a fedloom coordinator"):
        fetch_status("https://host", None)


@pytest.mark.parametrize("url", ["https://host:port", "https://[::1"])
def test_an_address_that_cannot_be_one_is_named(url: str) -> None:
    with pytest.raises(InputError, match=f"{re.escape(url)} is not an address: "):
        fetch_status(url, None)


def test_an_agent_that_must_wait_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = httpx.Response(429, json={"code": "guesses", "message": "Try again in 9 s."})
    monkeypatch.setattr(httpx.Client, "request", lambda *given, **more: wait)
    with pytest.raises(Unreachable, match=r"Try again in 9 s\."):
        fetch_status("https://host", None)


@pytest.mark.parametrize("status", [401, 422, 429])
def test_a_coordinators_words_cannot_reach_the_terminal_as_they_are(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply = httpx.Response(status, json={"code": "token", "message": "a\x1b[2J\u202eb\nerror: paste this"})
    monkeypatch.setattr(httpx.Client, "request", lambda *given, **more: reply)
    with pytest.raises((InputError, Unreachable)) as caught:
        fetch_status("https://host", None)
    assert str(caught.value) == r"a\x1b[2J\u202eb" + "\n  | error: paste this"


def test_the_status_is_shown_without_torch(world: World) -> None:
    script = (
        "import sys\nfrom fedloom.cli import app\n"
        "app(sys.argv[1:], standalone_mode=False)\nprint('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    with HttpsServer(world.pool, "127.0.0.1", 0) as server:
        command = [sys.executable, "-c", script, "status", f"http://127.0.0.1:{server.number}"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[0] == "agents, by their last messages: none; 0 client(s) awaited"
    assert done.stdout.splitlines()[-1] == "False False"
