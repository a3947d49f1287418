"""Foreign hosts, foreign pages and wrong tokens are refused."""

from __future__ import annotations

import socket

import pytest
from starlette.datastructures import Headers
from starlette.requests import Request

from fedloom.watch.guard import LASTS, MOST_SESSIONS, Sessions, own_hosts, refusal

OWN = own_hosts(["watch.example.org"])


def refused(method: str = "GET", **headers: str) -> bool:
    given = {"host": "127.0.0.1:8600", **{name.replace("_", "-"): value for name, value in headers.items()}}
    return refusal(method, Headers(given), OWN) is not None


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1:8600",
        "localhost:8600",
        "LOCALHOST",
        "[::1]:8600",
        "192.0.2.7:1",
        "watch.example.org",
        socket.gethostname(),
    ],
)
def test_own_names_and_addresses_are_accepted(host: str) -> None:
    assert not refused(host=host)


@pytest.mark.parametrize(
    "host",
    ["evil.example:8600", "127.0.0.1.evil.example", "localhost.evil.example", "", "[", "127.0.0.1@evil.example:80x"],
)
def test_a_forged_host_is_refused(host: str) -> None:
    assert refused(host=host)


def test_two_host_headers_are_refused() -> None:
    raw = [(b"host", b"localhost"), (b"host", b"evil.example")]
    assert refusal("GET", Headers(raw=raw), OWN) is not None


@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.example",
        "null",
        "http://127.0.0.1:9999",
        "http://localhost:8600",
        "https://127.0.0.1.evil.example:8600",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_foreign_origin_is_refused(method: str, origin: str) -> None:
    assert refused(method, origin=origin)


def test_what_changes_something_must_come_from_the_page() -> None:
    assert refused("POST")
    assert refused("DELETE")
    assert not refused("POST", origin="http://127.0.0.1:8600")
    assert refused("POST", origin="http://127.0.0.1:8600", sec_fetch_site="cross-site")


def test_a_link_elsewhere_may_open_the_page_but_not_read_it() -> None:
    assert not refused(sec_fetch_site="cross-site", sec_fetch_mode="navigate")
    for mode in ("cors", "no-cors", "websocket"):
        assert refused(sec_fetch_site="cross-site", sec_fetch_mode=mode)
        assert refused(sec_fetch_site="same-site", sec_fetch_mode=mode)
    assert not refused(sec_fetch_site="same-origin", sec_fetch_mode="cors")
    assert not refused(sec_fetch_site="none", sec_fetch_mode="navigate")


def request(cookie: str = "", scheme: str = "http", port: int = 8600) -> Request:
    headers = [(b"host", f"localhost:{port}".encode()), (b"cookie", cookie.encode())]
    return Request({"type": "http", "scheme": scheme, "path": "/", "headers": headers, "server": ("localhost", port)})


def test_a_session_needs_the_token_lasts_twelve_hours_and_can_be_ended() -> None:
    now = [0.0]
    sessions = Sessions(lambda _, token: token == "right", lambda: now[0])
    assert sessions.open(request(), "wrong") is None
    cookie = sessions.open(request(), " right\n")
    assert cookie is not None
    pair, *rest = cookie.split("; ")
    assert pair.startswith("fedloom-8600=")
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= {*rest}
    assert "Secure" not in rest
    assert sessions.is_open(request(pair))
    assert not sessions.is_open(request(pair + "x"))
    assert not sessions.is_open(request(pair, port=8601))  # browsers send it to other ports of the host as well
    assert not sessions.is_open(request())
    now[0] = LASTS + 1
    assert not sessions.is_open(request(pair))
    now[0] = 0.0
    assert "Max-Age=0" in sessions.close(request(pair))
    assert not sessions.is_open(request(pair))


def test_sessions_have_names_that_do_not_tell_their_secrets() -> None:
    sessions = Sessions(lambda _, token: True)
    one, two = (str(sessions.open(request(), "x")).split("; ")[0] for _ in range(2))
    assert sessions.name(request(one)) == sessions.name(request(one)) != sessions.name(request(two))
    assert sessions.name(request(one)) not in one


def test_over_tls_the_cookie_is_secure() -> None:
    cookie = Sessions(lambda _, token: True).open(request(scheme="https"), "x")
    assert cookie is not None
    assert cookie.endswith("; Secure")


def test_sessions_are_bounded() -> None:
    sessions = Sessions(lambda _, token: True)
    pairs = [str(sessions.open(request(), "x")).split("; ")[0] for _ in range(MOST_SESSIONS + 1)]
    assert [sessions.is_open(request(pair)) for pair in (pairs[0], pairs[1], pairs[-1])] == [False, True, True]


def test_odd_cookies_of_other_pages_do_not_hide_the_session() -> None:
    sessions = Sessions(lambda _, token: True)
    pair = str(sessions.open(request(), "x")).split("; ")[0]
    assert sessions.is_open(request(f'other=[{{"a": 1}}]; bad name; ="; {pair}'))
    assert not sessions.is_open(request(f'other="{pair}"'))
