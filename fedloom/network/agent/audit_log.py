"""An agent's audit log: a JSON line for every event, signed by the agent, with the hash of the line before it.

So nobody without the agent's key can change, insert or remove a line without a trace, except at the end of the file.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import threading
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from fedloom import faults
from fedloom.errors import InputError, StoreError
from fedloom.network.protocol.signatures import Signer, signed_by

NEW_KEY = "new key"  # the event from which on a new key signs; it names the key before
SIGNATURE = b', "signature": "'
FIRST = "0" * 64  # stands for the line before the first one


class AuditLog:
    """A file to which signed lines are only ever appended."""

    def __init__(self, path: Path, signer: Signer) -> None:
        self.path, self.signer = path, signer
        self._lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not path.exists():
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
        elif path.stat().st_size:  # a crash may have left half a line
            with open(path, "rb+") as file:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.write(b"\n")
        self._previous = FIRST
        for line in _lines(path):
            self._previous = _sha256(line)

    def write(self, event: str, **facts: Any) -> None:
        """Append one line."""
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        with self._lock:
            body = json.dumps({"time": now, "event": event, **facts, "previous": self._previous})
            line = f'{body[:-1]}, "signature": "{self.signer.sign(body.encode())}"}}'.encode()
            try:
                with open(self.path, "ab", buffering=0) as file:
                    begin = file.tell()
                    if file.write(line + b"\n") != len(line) + 1:
                        file.truncate(begin)
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError as error:
                raise StoreError(f"The audit log {self.path} cannot be written: {error}.") from error
            self._previous = _sha256(line)
        faults.point("audit.written")

    def events(self) -> Iterator[dict[str, Any]]:
        """Return all events, without lines that a crash cut off."""
        for line in _lines(self.path):
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if isinstance(found, dict):
                yield found


def verify(path: Path, public_key: str) -> Iterator[str]:
    """Yield lines for people about an audit log; raise `InputError` at the first line that somebody changed."""
    signed = unsigned = 0
    previous = FIRST
    # the last key is known, and each one signs for the key before it
    keys = [*(json.loads(line)["before"] for line in _lines(path) if _is_new_key(line)), public_key]
    for number, line in enumerate(_lines(path), 1):
        body, separator, rest = line.rpartition(SIGNATURE)
        if _is_new_key(line):
            del keys[0]
        if not separator:  # written by an earlier version, or cut off by a crash: the next line has its hash
            unsigned += 1
        elif not signed_by(keys[0], body + b"}", rest.removesuffix(b'"}').decode(errors="replace")):
            raise InputError(f"{path}, line {number}: this agent did not sign it, or somebody changed it.")
        elif json.loads(body + b"}")["previous"] != previous:
            raise InputError(f"{path}, line {number}: the line before it was changed, added or removed.")
        else:
            signed += 1
        previous = _sha256(line)
    if unsigned:
        yield f"{unsigned} line(s) have no signature: an earlier version wrote them, or a crash cut them off."
    yield f"{signed} signed line(s) are as the agent wrote them. The last one has the hash {previous}."
    yield "Lines removed from the end leave no trace: compare this hash with one that you noted before."


def _is_new_key(line: bytes) -> bool:
    return f'"event": "{NEW_KEY}"'.encode() in line and SIGNATURE in line


def _lines(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        for line in file:
            yield line.removesuffix(b"\n")


def _sha256(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()
