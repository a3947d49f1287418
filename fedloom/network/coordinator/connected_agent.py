"""One agent, as the coordinator sees it: what it said about itself, and how long ago it was heard from."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from fedloom.network.protocol.messages import Hello
from fedloom.results.safe_text import plain

HEARTBEAT = 3.0  # seconds between an agent's heartbeats, unless the deadline is short
LATE = 2  # heartbeats after which an agent is silent: the operator sees it, and nothing else changes
MISSED = 5  # heartbeats after which an agent is gone: a round that can do without it does not wait for it
STATES = ("ready", "joining", "refused", "silent", "gone", "revoked")


@dataclass
class ConnectedAgent:
    """An agent, as the coordinator sees it now."""

    agent: str
    name: str
    seen: float
    hello: Hello | None = None  # sent when it is ready to work
    doing: str = ""
    refused: str = ""  # why it does not take part
    process: str = ""  # the number of its process: two may not use one key
    contacted: bool = False  # whether this process of the coordinator has heard from it
    pins: str = ""  # the SHA-256 of the certificates that it trusts
    told_to_stop: bool = False  # whether it knows that the run is over
    missed: bool = False  # whether the operator knows that it is gone
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    heartbeat: float = HEARTBEAT

    def silence(self) -> float:
        """Return the seconds since it was heard from."""
        return time.monotonic() - self.seen

    def lost(self) -> bool:
        return self.silence() > MISSED * self.heartbeat

    @property
    def state(self) -> str:
        if self.lost() or not self.contacted:
            return "gone"
        if self.silence() > LATE * self.heartbeat:
            return "silent"
        return "ready" if self.hello is not None else "refused" if self.refused else "joining"

    def shown(self, awaited: bool) -> dict[str, Any]:
        """Describe this agent for the operator."""
        silence, state = self.silence(), self.state
        missing = self.contacted and state in ("silent", "gone")  # what it did last is no news
        return {
            "name": self.name,
            "state": state,
            "doing": f"not heard from for {silence:.0f} s" if missing else plain(self.doing),
            "clients": len(self.hello.clients) if self.hello else 0,
            "seconds_since_seen": round(silence, 1),
            "awaited": awaited,
            "why": plain(self.refused),
        }
