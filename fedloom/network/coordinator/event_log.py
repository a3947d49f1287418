"""What happened, shown to the operator and stored in the ledger; bounded and plain, because agents wrote some of it."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from fedloom.errors import StoreError
from fedloom.network.coordinator.ledger import Ledger
from fedloom.results.safe_text import plain

REPEAT = 60.0  # seconds in which the same event that strangers can cause is shown and stored only once
QUOTA, PERIOD = 200, 3600.0  # events of one agent that are stored within these seconds, and of all strangers together
OF_STRANGERS = ("denied", "disk")  # kinds of events that requests without a known sender can cause


@dataclass
class Quota:
    """What one source has used of its quota since a time."""

    since: float = field(default_factory=time.monotonic)
    stored: int = 0
    left_out: int = 0


class EventLog:
    """Shows and stores events. Those beyond a source's quota are only counted."""

    def __init__(self, ledger: Ledger, tell: Callable[[str], None]) -> None:
        self.ledger, self.tell = ledger, tell
        self.counts: Counter[str] = Counter()  # by kind, with those that were left out
        self._quotas: dict[str, Quota] = {}
        self._shown: dict[str, float] = {}  # messages that strangers caused, and when
        self._lock = threading.Lock()

    def add(self, kind: str, message: str, agent: str | None = None) -> None:
        """Show and store an event; `agent` is the number of the agent that caused it."""
        with self._lock:
            self.counts[kind] += 1
            source = agent or (kind if kind in OF_STRANGERS else None)
            if kind in OF_STRANGERS and self._is_repeated(message):  # a revoked agent may ask for hours
                return
            lines = [message] if source is None else self._within_quota(source, message)
            if kind in OF_STRANGERS and lines:
                self._shown[message] = time.monotonic()
        for line in map(plain, lines):
            self.tell(line)
            with suppress(StoreError):  # show it even if the disk is full
                self.ledger.note(kind, line, agent)

    def _is_repeated(self, message: str) -> bool:
        now = time.monotonic()
        self._shown = {text: when for text, when in self._shown.items() if now - when < REPEAT}
        return message in self._shown

    def _within_quota(self, source: str, message: str) -> list[str]:
        """Return what is to be shown and stored now: the message, or that there are too many, or nothing."""
        quota = self._quotas.setdefault(source, Quota())
        if time.monotonic() - quota.since >= PERIOD:
            self._quotas[source] = Quota(stored=1)
            missed = f"{quota.left_out} messages of this kind were only counted before this one."
            return [missed, message] if quota.left_out else [message]
        quota.stored += 1
        if quota.stored > QUOTA:
            quota.left_out += 1
            return []
        if quota.stored == QUOTA:
            return [message, "There are too many messages of this kind: further ones are only counted for an hour."]
        return [message]
