"""Who may see the page and change something: a known host, the page's own origin, and the operator's token.

A page elsewhere that the same browser has open cannot use this one. A foreign name that leads here (DNS rebinding) is
refused by its Host header, a request from another site by its Origin and Sec-Fetch-Site headers, and the cookie of a
session is neither sent along by other sites (SameSite) nor readable by scripts (HttpOnly).
"""

from __future__ import annotations

import hashlib
import ipaddress
import secrets
import socket
import time
from collections.abc import Callable, Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

POLICY = "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; object-src 'none'"
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
    "cache-control": "no-store",
}
LASTS = 12 * 3600.0  # seconds of a session
MOST_SESSIONS = 64
MOST_BODY = 16_384  # bytes of a request: forms of the page are far smaller


class Guarded:
    """A layer around the application: refuses foreign hosts and origins, and adds headers that bind the browser.

    It reads a request's body before the application does, which would read any amount before it asks who sends it.
    """

    def __init__(self, app: ASGIApp, is_own_host: Callable[[str], bool]) -> None:
        self.app, self.is_own_host = app, is_own_host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        why = refusal(scope["method"], Headers(scope=scope), self.is_own_host)
        app: ASGIApp = self.app if why is None else PlainTextResponse(f"{why}\n", status_code=403)
        if why is None and scope["method"] not in ("GET", "HEAD"):
            body = await _small_body(receive)
            if body is None:
                app = PlainTextResponse("The request is too large.\n", status_code=413, headers={"connection": "close"})
            receive = _once({"type": "http.request", "body": body or b"", "more_body": False}, receive)
        await app(scope, receive, with_headers)


async def _small_body(receive: Receive) -> bytes | None:
    """Return the whole body of a request, or None if it is too large."""
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        if len(body) > MOST_BODY:
            return None
        more = message.get("more_body", False)
    return body


def _once(message: Message, receive: Receive) -> Receive:
    """Return what receives a message first, and then whatever else comes."""
    first = [message]

    async def replayed() -> Message:
        return first.pop() if first else await receive()

    return replayed


def refusal(method: str, headers: Headers, is_own_host: Callable[[str], bool]) -> str | None:
    """Return why a request is refused, if it is."""
    hosts, origin, site = headers.getlist("host"), headers.get("origin"), headers.get("sec-fetch-site")
    name = _host_name(hosts[0]) if len(hosts) == 1 else None
    if name is None or not is_own_host(name):
        return "This name does not lead here: open the address that fedloom printed."
    if origin is not None and urlsplit(origin).netloc.lower() != hosts[0].lower():
        return "Requests from other pages are refused."
    if method not in ("GET", "HEAD") and origin is None:
        return "A request that changes something must say which page it is from."
    opens_the_page = method == "GET" and headers.get("sec-fetch-mode") == "navigate"
    if site in ("cross-site", "same-site") and not opens_the_page:
        return "Requests from other pages are refused."
    return None


def _host_name(host: str) -> str | None:
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


def own_hosts(names: Collection[str]) -> Callable[[str], bool]:
    """Return whether a name is this machine's: one of these, or an address, which no foreign name can pass for."""
    known = {"localhost", socket.gethostname().lower(), *(name.lower() for name in names)}

    def is_own(name: str) -> bool:
        return name in known or is_address(name)

    return is_own


def is_address(name: str) -> bool:
    """Return whether a host is written as an IP address."""
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True


class Sessions:
    """The browsers in which somebody gave the operator's token. The server remembers only hashes of their cookies."""

    def __init__(self, is_token: Callable[[Request, str], bool], now: Callable[[], float] = time.monotonic) -> None:
        self.is_token, self.now = is_token, now
        self._ends: dict[str, float] = {}

    def open(self, request: Request, token: str) -> str | None:
        """Return the cookie of a new session if the token is the operator's."""
        if not self.is_token(request, token.strip()):
            return None
        secret, now = secrets.token_urlsafe(32), self.now()
        self._ends = {one: end for one, end in self._ends.items() if end > now}
        while len(self._ends) >= MOST_SESSIONS:
            del self._ends[next(iter(self._ends))]  # the oldest
        self._ends[_digest(secret)] = now + LASTS
        secure = "; Secure" if request.url.scheme == "https" else ""
        return f"{_name(request)}={secret}; HttpOnly; SameSite=Strict; Path=/; Max-Age={LASTS:.0f}{secure}"

    def is_open(self, request: Request) -> bool:
        """Return whether a request belongs to a session."""
        return self._ends.get(_digest(_cookie(request)), 0.0) > self.now()

    def name(self, request: Request) -> str:
        """Return a name for the session of a request, which does not tell its secret."""
        return _digest(_cookie(request))[:16]

    def close(self, request: Request) -> str:
        """End the session of a request; return a cookie that makes the browser forget it."""
        self._ends.pop(_digest(_cookie(request)), None)
        return f"{_name(request)}=; HttpOnly; SameSite=Strict; Path=/; Max-Age=0"


def _name(request: Request) -> str:
    """Return the cookie's name. Browsers share cookies between the ports of a host, so the port is in it."""
    return f"fedloom-{request.url.port or (443 if request.url.scheme == 'https' else 80)}"


def _cookie(request: Request) -> str:
    # by hand: the standard library stops at the first odd cookie of another page, and is slow for hostile ones
    pairs = (pair.partition("=") for pair in request.headers.get("cookie", "").split(";"))
    return next((value.strip() for name, _, value in pairs if name.strip() == _name(request)), "")


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
