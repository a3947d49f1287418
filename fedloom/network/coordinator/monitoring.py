"""What the coordinator counts, in Prometheus' text format."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fedloom.network.coordinator.agent_pool import AgentPool


class Traffic:
    """Counts of requests since the process started. Only the thread of the port changes them."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str]] = Counter()  # by path and status
        self.rejections: Counter[str] = Counter()  # by code
        self.wrong_clocks: deque[float] = deque(maxlen=100)  # when requests were rejected for their time
        self.bytes_in = self.bytes_out = 0  # of bodies, as they were sent

    def reject(self, code: str) -> None:
        """Count a rejected request."""
        self.rejections[code] += 1
        if code == "clock":
            self.wrong_clocks.append(time.time())


class CountTraffic:
    """A layer around the application that counts every request and the bytes of its bodies."""

    def __init__(self, app: ASGIApp, traffic: Traffic) -> None:
        self.app, self.traffic = app, traffic

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counting_receive() -> Message:
            message = await receive()
            self.traffic.bytes_in += len(message.get("body", b""))
            return message

        async def counting_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = scope.get("route")  # paths that are not ours share one label: anybody can make up more of them
                self.traffic.requests[route.path if route else "other", str(message["status"])] += 1
            self.traffic.bytes_out += len(message.get("body", b""))
            await send(message)

        await self.app(scope, counting_receive, counting_send)


def metrics(pool: AgentPool, traffic: Traffic, connections: Mapping[str, int], ended: int) -> str:
    """Return all numbers as text. Labels are codes, states and paths of fedloom, never a name that somebody chose."""
    status, call = pool.counts(), pool.call
    open_for = time.monotonic() - call.opened if call is not None else 0.0
    answers = {"accepted": status["accepted"], **pool.rejected}
    families: tuple[tuple[str, str, str, Mapping[Any, float] | float], ...] = (  # name, labels, meaning, numbers
        ("agents", "state", "Agents by state.", status["agents"]),
        ("awaited_clients", "", "Clients that have been asked and not answered.", status["awaited_clients"]),
        ("call_seconds", "", "Seconds since the open call began; 0 if none is open.", open_for),
        ("rounds", "status", "Rounds in the ledger by status.", pool.ledger.round_counts()),
        ("answers_total", "verdict", "Answers of clients by verdict.", answers),
        ("requests_total", "path status", "Requests by path and status.", traffic.requests),
        ("rejections_total", "code", "Rejected requests by code.", traffic.rejections),
        ("events_total", "kind", "Events by kind, including those beyond an agent's quota.", pool.events.counts),
        ("received_bytes_total", "", "Bytes of bodies that came in.", traffic.bytes_in),
        ("sent_bytes_total", "", "Bytes of bodies that went out.", traffic.bytes_out),
        ("connections", "of", "Open connections: of agents, by their signed requests, and of strangers.", connections),
        ("connections_ended_total", "", "Connections that were closed for a limit.", ended),
        ("ledger_bytes", "", "Bytes of the ledger and of the updates in it.", pool.ledger.size()),
    )
    return "".join(f"{line}\n" for family in families for line in _family(*family))


def _family(name: str, labels: str, meaning: str, numbers: Mapping[Any, float] | float) -> Iterator[str]:
    yield f"# HELP fedloom_{name} {meaning}"
    yield f"# TYPE fedloom_{name} {'counter' if name.endswith('_total') else 'gauge'}"
    if not isinstance(numbers, Mapping):
        yield f"fedloom_{name} {numbers}"
        return
    for key, number in sorted(numbers.items()):
        values = key if isinstance(key, tuple) else (key,)
        text = ",".join(f'{label}="{value}"' for label, value in zip(labels.split(), values, strict=True))
        yield f"fedloom_{name}{{{text}}} {number}"
