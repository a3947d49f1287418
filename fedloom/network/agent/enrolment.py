"""How an agent gets to know its coordinator: it exchanges a token for a certificate to pin and an agent's number."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from fedloom import files
from fedloom.errors import InputError
from fedloom.files import write_private
from fedloom.network.agent.unsigned_requests import (
    NEVER_REACHED,
    NotConnected,
    Unreachable,
    expecting_a_coordinator,
    fetch_certificate,
    request,
    tls,
)
from fedloom.network.protocol.certificates import clock_problem
from fedloom.network.protocol.messages import Enrolment
from fedloom.network.protocol.signatures import LOST_KEY, Signer
from fedloom.network.protocol.token import Token

TRIES = 60.0  # seconds
Done = TypeVar("Done")


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


def repin(state: Path, certificates: str) -> None:
    """Trust these certificates from now on, which the coordinator announced over a trusted connection."""
    tls(certificates)  # fails if they are damaged
    write_private(state / "coordinator.json", json.dumps({**registered(state), "authority": certificates}).encode())


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
    certificate, reply = until_reached(lambda: _enrol(url.rstrip("/"), token, name, signer), wait, tell)
    content = {
        "url": url.rstrip("/"),
        "authority": certificate,
        "agent": str(reply["agent"]),
        "token": token.digest,
        "replaced": bool(reply.get("replaced")),
    }
    write_private(path, json.dumps(content).encode())
    tell(f"Enrolled as {name} at {url}.")


def until_reached(attempt: Callable[[], Done], wait: bool, tell: Callable[[str], None]) -> Done:
    """Repeat something until the coordinator answers: for a minute, or with `wait` until it does."""
    end = time.monotonic() + TRIES
    advice = NEVER_REACHED  # once, until something answers
    while True:
        try:
            return attempt()
        except Unreachable as error:
            if not wait and time.monotonic() > end:
                raise
            hint = advice if isinstance(error, NotConnected) else ""
            hint += "" if time.monotonic() < end else " Is the address right? Ctrl-C ends this."
            advice = ""
            tell(f"{error}{hint} Trying again …")
            time.sleep(1.0)


def _enrol(url: str, token: Token, name: str, signer: Signer) -> tuple[str, dict[str, Any]]:
    with expecting_a_coordinator(url):
        certificate = fetch_certificate(url, token)
        message = Enrolment(secret=token.secret.hex(), name=name, public_key=signer.public)
        reply = request("POST", f"{url}/v1/enrol", tls(certificate), json=message.model_dump(mode="json"))
        return certificate, {"agent": reply["agent"], **reply}
