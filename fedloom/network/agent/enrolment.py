"""How an agent gets to know its coordinator: it exchanges a token for a certificate to pin and an agent's number."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from fedloom import files
from fedloom.errors import InputError
from fedloom.files import write_private
from fedloom.network.agent.connection import Unreachable, reaching
from fedloom.network.protocol.certificates import clock_problem, fingerprint, trusting, unverified
from fedloom.network.protocol.messages import Enrolment
from fedloom.network.protocol.signatures import LOST_KEY, Signer
from fedloom.network.protocol.token import Token

TRIES = 60.0  # seconds


@contextmanager
def locked_state(folder: Path, seconds: float = 20.0) -> Iterator[None]:
    """Hold an agent's state folder for this process alone; wait a little for a process that is just ending."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with files.locked(folder, f"Another agent is running with the state folder {folder}.", seconds):
        yield


def registered(state: Path) -> dict[str, Any]:
    """Return what a state folder knows about its coordinator; nothing before the enrolment."""
    path = state / "coordinator.json"
    if not path.is_file():
        return {}
    try:
        found = dict(json.loads(path.read_text()))
        found["url"], found["authority"], found["agent"], found["token"]
        tls(found["authority"])
    except (ValueError, TypeError, KeyError, OSError):
        raise InputError(
            f"{path} is damaged. Restore it from a copy; or delete it, and join with a token that the operator makes "
            "with `fedloom agents invite`: this agent keeps its key and what its clients keep."
        ) from None
    if not (state / "agent.key").is_file():
        raise InputError(f"The key {state / 'agent.key'} is missing. {LOST_KEY}")
    return found


def enrol(
    url: str, token: Token | None, name: str, state: Path, *, wait: bool = False, tell: Callable[[str], None] = print
) -> None:
    """Register the coordinator in the state folder; without a token it must be registered there already."""
    path, known = state / "coordinator.json", registered(state)
    if known and (token is None or token.digest == known["token"]):
        if url.startswith("http://") and known["url"].startswith("https://"):
            raise InputError(
                f"This agent enrolled at {known['url']} with TLS, and {url} has none: anybody on the way could read "
                "and change everything. Use https://."
            )
        if why := clock_problem(known["authority"].encode()) if known["authority"] else "":
            tell(
                f"Note: by this machine's clock, the coordinator's certificate is not valid: {why}. It is pinned, so "
                "the agent trusts it at any time. If the clock is wrong, times in the audit log are wrong too."
            )
        if known["url"] != url.rstrip("/"):  # the same coordinator under another address: its certificate is pinned
            write_private(path, json.dumps({**known, "url": url.rstrip("/")}).encode())
        return
    if token is None:
        raise InputError(
            f"No coordinator is registered in {state}. Pass --token or --token-file with the enrolment "
            "token that `fedloom serve` printed."
        )
    signer = Signer(state / "agent.key")
    end = time.monotonic() + TRIES
    while True:
        try:
            certificate, reply = _enrol(url.rstrip("/"), token, name, signer)
            break
        except Unreachable as error:
            if not wait and time.monotonic() > end:
                raise
            tell(f"{error} Trying again …")
            time.sleep(1.0)
    content = {
        "url": url.rstrip("/"),
        "authority": certificate,
        "agent": str(reply["agent"]),
        "token": token.digest,
        "replaced": bool(reply.get("replaced")),
    }
    write_private(path, json.dumps(content).encode())
    tell(f"Enrolled as {name} at {url}.")


def _enrol(url: str, token: Token, name: str, signer: Signer) -> tuple[str, dict[str, Any]]:
    with _expecting_a_coordinator(url):
        certificate = fetch_certificate(url, token)
        message = Enrolment(secret=token.secret.hex(), name=name, public_key=signer.public)
        reply = _request("POST", f"{url}/v1/enrol", tls(certificate), json=message.model_dump(mode="json"))
        return certificate, {"agent": reply["agent"], **reply}


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
    with _expecting_a_coordinator(url):
        verify = unverified() if token is None else tls(fetch_certificate(url, token))
        headers = {} if token is None else {"authorization": f"Bearer {token.secret.hex()}"}
        return _request("GET", f"{url}/v1/status", verify, headers=headers)


def _request(method: str, url: str, verify: Any, **more: Any) -> dict[str, Any]:
    with httpx.Client(verify=verify, timeout=20.0) as client:
        reply = client.request(method, url, **more)
    if reply.status_code == 429:
        raise Unreachable(str(reply.json()["message"]))
    if reply.status_code in (401, 422):
        raise InputError(str(reply.json()["message"]))
    return dict(reply.raise_for_status().json())


@contextmanager
def _expecting_a_coordinator(url: str) -> Iterator[None]:
    try:
        with reaching(url):
            yield
    except InputError:
        raise
    except (ValueError, KeyError, TypeError):
        raise InputError(f"{url} did not respond as a fedloom coordinator.") from None
