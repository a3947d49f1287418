"""Requests that nobody signs: for the certificate to pin, for an agent's number, and for the status.

This module imports no torch, so that `fedloom status` answers at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from fedloom.errors import FedloomError, InputError
from fedloom.network.protocol.certificates import fingerprint, trusting, unverified
from fedloom.network.protocol.token import Token
from fedloom.results.safe_text import plain

NEVER_REACHED = " Nothing has answered there yet: check the address and the port, and that `fedloom serve` runs."


class Unreachable(FedloomError):
    """The coordinator does not answer, or cannot work at the moment."""


class NotConnected(Unreachable):
    """There is no connection to the coordinator: perhaps the address is wrong."""


def fetch_certificate(url: str, token: Token) -> str:
    """Return the certificate to pin if it is the one that the token names; empty to trust the system's."""
    if url.startswith("http://") and token.fingerprint:
        raise InputError(f"The token is for a coordinator with TLS: use https://… instead of {url}.")
    if not token.fingerprint:
        return ""
    with httpx.Client(verify=unverified(), timeout=20.0) as client:
        certificate = client.get(f"{url}/v1/ca").raise_for_status().text
    if fingerprint(certificate.encode()) != token.fingerprint:
        raise InputError(
            f"The coordinator at {url} does not have the certificate that the token names. Either the connection is "
            "being intercepted, or the token belongs to another coordinator: ask for a token again."
        )
    return certificate


def tls(certificate: str) -> Any:
    """Return what httpx should trust: a pinned certificate, or the system's if there is none."""
    return trusting(certificate.encode()) if certificate else True


def fetch_status(url: str, token: Token | None) -> dict[str, Any]:
    """Return a coordinator's status; the operator's token also shows the agents' names."""
    with expecting_a_coordinator(url):
        verify = unverified() if token is None else tls(fetch_certificate(url, token))
        headers = {} if token is None else {"authorization": f"Bearer {token.secret.hex()}"}
        return request("GET", f"{url}/v1/status", verify, headers=headers)


def request(method: str, url: str, verify: Any, **more: Any) -> dict[str, Any]:
    """Send a request; return the reply's JSON, or raise the coordinator's reason as an error."""
    with httpx.Client(verify=verify, timeout=20.0) as client:
        reply = client.request(method, url, **more)
    if reply.status_code == 429:
        raise Unreachable(plain(str(reply.json()["message"])))
    if reply.status_code in (401, 422):
        raise InputError(plain(str(reply.json()["message"])))
    return dict(reply.raise_for_status().json())


@contextmanager
def expecting_a_coordinator(url: str) -> Iterator[None]:
    """Raise `InputError` if what answers at this address is not a coordinator."""
    try:
        with reaching(url):
            yield
    except InputError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError):
        raise InputError(f"{url} did not respond as a fedloom coordinator.") from None


@contextmanager
def reaching(url: str) -> Iterator[None]:
    """Raise `Unreachable` if the connection fails, and `InputError` if the address cannot be one."""
    try:
        yield
    except httpx.InvalidURL as error:
        raise InputError(f"{url} is not an address: {error}") from None
    except (httpx.HTTPError, httpx.StreamError, OSError) as error:
        raise NotConnected(
            f"The coordinator at {url} cannot be reached: {str(error).rstrip('.') or type(error).__name__}."
        ) from error
