"""How an agent comes to know its coordinator: a token for a certificate to pin and a place among the agents."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from fedloom.errors import InputError, StoreError
from fedloom.network.agent.connection import Unreachable
from fedloom.network.protocol.identity import Signer, Token, fingerprint, pinned, unverified, write_private
from fedloom.network.protocol.messages import Enrolment

TRIES = 60.0  # seconds


@contextmanager
def claimed(state: Path, seconds: float = 20.0) -> Iterator[None]:
    """An agent's folder, for this process alone; one that is just ending is waited for."""
    state.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        import fcntl
    except ImportError:  # no such lock on this system
        yield
        return
    with open(state / ".lock", "w") as lock:
        end = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > end:
                    raise StoreError(f"Another agent is running with the state folder {state}.") from None
                time.sleep(0.1)
        yield


def enrol(
    url: str, token: Token | None, name: str, state: Path, *, wait: bool = False, tell: Callable[[str], None] = print
) -> None:
    """Make sure that the state folder knows the coordinator; without a token it must know it already."""
    path = state / "coordinator.json"
    known: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    if known and (token is None or token.digest == known["token"]):
        if known["url"] != url.rstrip("/"):  # the same coordinator under another address: its certificate is pinned
            write_private(path, json.dumps({**known, "url": url.rstrip("/")}).encode())
        return
    if token is None:
        raise InputError(f"{state} knows no coordinator: give the enrolment token that `fedloom serve` printed.")
    signer = Signer(state / "agent.key")
    end = time.monotonic() + TRIES
    while True:
        try:
            authority, agent = _enrol(url.rstrip("/"), token, name, signer)
            break
        except Unreachable as error:
            if not wait and time.monotonic() > end:
                raise
            tell(f"{error} Trying again …")
            time.sleep(1.0)
    content = {"url": url.rstrip("/"), "authority": authority, "agent": agent, "token": token.digest}
    write_private(path, json.dumps(content).encode())
    tell(f"Enrolled as {name} at {url}.")


def _enrol(url: str, token: Token, name: str, signer: Signer) -> tuple[str, str]:
    with _in_words(url):
        authority = authority_of(url, token)
        wanted = Enrolment(secret=token.secret.hex(), name=name, public_key=signer.public)
        with httpx.Client(verify=verifying(authority), timeout=20.0) as client:
            reply = client.post(f"{url}/v1/enrol", json=wanted.model_dump(mode="json"))
        if reply.status_code in (401, 422):
            raise InputError(str(reply.json()["message"]))
        return authority, str(reply.raise_for_status().json()["agent"])


def authority_of(url: str, token: Token) -> str:
    """The certificate to pin, if it is the one that the token names; empty where the system's are to be trusted."""
    if url.startswith("http://") and token.fingerprint:
        raise InputError(f"The token is for a coordinator with TLS: use https://… instead of {url}.")
    if not token.fingerprint:
        return ""
    with httpx.Client(verify=unverified(), timeout=20.0) as client:
        authority = client.get(f"{url}/v1/ca").raise_for_status().text
    if fingerprint(authority.encode()) != token.fingerprint:
        raise InputError(
            f"The coordinator at {url} does not have the certificate that the token names. Either somebody is in "
            "between, or the token is another coordinator's: ask for its token again."
        )
    return authority


def verifying(authority: str) -> Any:
    """What httpx is to trust."""
    return pinned(authority.encode()) if authority else True


def status_of(url: str, token: Token | None) -> dict[str, Any]:
    """What a coordinator tells about itself; the operator's token shows who is there."""
    with _in_words(url):
        verify = unverified() if token is None else verifying(authority_of(url, token))
        headers = {} if token is None else {"authorization": f"Bearer {token.secret.hex()}"}
        with httpx.Client(verify=verify, timeout=10.0) as client:
            reply = client.get(f"{url}/v1/status", headers=headers)
        if reply.status_code == 401:
            raise InputError(str(reply.json()["message"]))
        return dict(reply.raise_for_status().json())


@contextmanager
def _in_words(url: str) -> Iterator[None]:
    try:
        yield
    except (httpx.HTTPError, OSError) as error:
        raise Unreachable(f"The coordinator at {url} cannot be reached: {error or type(error).__name__}") from error
    except InputError:
        raise
    except (ValueError, KeyError):
        raise InputError(f"What answers at {url} is no fedloom coordinator.") from None
