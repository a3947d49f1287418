"""The ledger of what a cell has released: charged and on disk before anything is released, and never taken back.

`privacy.key` is the cell's secret, and `privacy.jsonl` has one line for every release. The same release, which a
restart computes again, is charged once. Another sum for the same round, after a rollback, is another release. Both
files stay when checkpoints are removed.
"""

from __future__ import annotations

import json
import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from fedloom import faults
from fedloom.errors import FRESH, StoreError
from fedloom.privacy.dp.accounting import Epsilon, Mechanism, epsilon

KEY, LEDGER = "privacy.key", "privacy.jsonl"


class Ledger:
    """What was spent in one folder. Without a folder, everything is kept in memory.

    >>> ledger = Ledger(None, 1e-5, lambda: {"clip": 1.0})
    >>> ledger.charge("round 1", Mechanism(1.0)), ledger.charge("round 1", Mechanism(1.0)), ledger.releases
    (True, False, 1)
    """

    def __init__(self, folder: Path | None, delta: float, begin: Callable[[], Mapping[str, Any]]) -> None:
        """Open the ledger. A new one gets a header from `begin`: settings that hold until the end."""
        self.folder, self.delta = folder, delta
        self.spent: Counter[Mechanism] = Counter()
        self.charged: set[str] = set()
        if folder is None:
            self.header = dict(begin())
            self.secret = secrets.token_bytes(32)
            return
        folder.mkdir(parents=True, exist_ok=True)
        self.secret = _secret(folder / KEY, begun=(folder / LEDGER).exists())
        lines = _lines(folder / LEDGER, mend=True)
        if not lines:
            self.header = dict(begin())
            self._append({"format": 1, **self.header})
            return
        first, *entries = lines
        self.header = {key: value for key, value in first.items() if key != "format"}
        self.charged = {entry["release"] for entry in entries}
        self.spent = _sum(entries)

    @property
    def releases(self) -> int:
        """How many different releases were charged."""
        return len(self.charged)

    def epsilon(self, more: Mapping[Mechanism, int] | None = None) -> Epsilon:
        """Return the ε of everything that was charged, and of some more."""
        return epsilon(self.spent + Counter(more or {}), self.delta)

    def notes(self, kind: str) -> dict[str, float]:
        """Return a kind of ε that was spent, and the numbers behind it, if all releases are alike."""
        found = {kind: self.epsilon().value}
        used = [(mechanism, count) for mechanism, count in self.spent.items() if count]
        if len(used) == 1:
            ((mechanism, count),) = used
            numbers = {"noise_multiplier": mechanism.noise_multiplier, "sampling_rate": mechanism.q, "steps": count}
            found |= {f"{kind}_{name}": float(value) for name, value in numbers.items()}
        return found

    def charge(self, release: str, mechanism: Mechanism, count: int = 1) -> bool:
        """Charge a release, which this text identifies, before it is made; return False if it was charged before."""
        if release in self.charged:
            return False
        entry = {"release": release, "noise_multiplier": mechanism.noise_multiplier}
        discrete = {"discrete": True} if mechanism.discrete else {}
        self._append({**entry, "q": mechanism.q, "of": mechanism.of, "count": count, **discrete})
        self.charged.add(release)
        self.spent[mechanism] += count
        faults.point("privacy.charged")
        return True

    def _append(self, entry: Mapping[str, Any]) -> None:
        if self.folder is None:
            return
        path = self.folder / LEDGER
        try:
            _write(path, os.O_APPEND, json.dumps(entry).encode() + b"\n")
        except OSError as error:
            raise StoreError(f"Nothing was released, because {path} cannot be written: {error}.") from error


def spent_in(path: Path) -> Counter[Mechanism]:
    """Return what was charged in a ledger's file, which another process may be writing."""
    return _sum(_lines(path)[1:])


def _sum(entries: Iterable[Mapping[str, Any]]) -> Counter[Mechanism]:
    spent: Counter[Mechanism] = Counter()
    for entry in entries:
        kind = Mechanism(entry["noise_multiplier"], entry["q"], entry["of"], entry.get("discrete", False))
        spent[kind] += entry.get("count", 1)
    return spent


def _write(path: Path, how: int, content: bytes) -> None:
    """Write to a file that only its owner may read. The content is on the disk when this returns."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | how, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _secret(path: Path, begun: bool) -> bytes:
    """Return the folder's secret; a new folder gets one."""
    try:
        if not begun and not path.exists():
            _write(path, os.O_EXCL, secrets.token_bytes(32))
        found = path.read_bytes()
    except OSError as error:
        raise StoreError(
            f"The secret of the noise, {path}, cannot be used: {error.strerror}. Without it, this run cannot continue; "
            f"start it again with {FRESH}."
        ) from error
    if len(found) != 32:
        raise StoreError(f"{path} is damaged: it must have 32 bytes, and has {len(found)}. Start again with {FRESH}.")
    return found


def _lines(path: Path, mend: bool = False) -> list[dict[str, Any]]:
    """Return the entries. A last line without its end was never complete, so nothing was released for it.

    Only the process that adds entries may `mend` the file.
    """
    if not path.exists():
        return []
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if mend and whole != content:
        os.truncate(path, len(whole))
    try:
        return [json.loads(line) for line in whole.splitlines()]
    except ValueError as error:
        raise StoreError(
            f"The privacy ledger {path} is damaged, so nobody knows what was spent: {error}. Start again with {FRESH}."
        ) from error
