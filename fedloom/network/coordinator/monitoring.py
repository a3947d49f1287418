"""What the coordinator counts, in Prometheus' text format."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fedloom.network.coordinator.agent_pool import AgentPool


class Traffic:
    """Counts of requests since the process started. Only the thread of the port changes them."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str]] = Counter()  # by path and status
        self.rejections: Counter[str] = Counter()  # by code
        self.bytes_in = self.bytes_out = 0  # of bodies, as they were sent


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
                route = scope.get("route")  # a path that is not one of ours is not told apart: there is no end of them
                self.traffic.requests[route.path if route else "other", str(message["status"])] += 1
            self.traffic.bytes_out += len(message.get("body", b""))
            await send(message)

        await self.app(scope, counting_receive, counting_send)


def metrics(pool: AgentPool, traffic: Traffic) -> str:
    """Return all numbers as text. Labels are codes, states and paths of fedloom, never a name that somebody chose."""
    status, call = pool.counts(), pool.call
    open_for = time.monotonic() - call.opened if call is not None else 0.0
    rounds, answers = pool.ledger.round_counts(), {"accepted": status["accepted"], **pool.rejected}
    requests = {f'path="{path}",status="{code}"': count for (path, code), count in traffic.requests.items()}
    lines = [
        *_family("agents", "gauge", "Agents by state.", _labelled("state", status["agents"])),
        *_family("awaited_clients", "gauge", "Clients that the open call waits for.", status["awaited_clients"]),
        *_family("call_seconds", "gauge", "Seconds since the open call began; 0 if none is open.", open_for),
        *_family("rounds", "gauge", "Rounds in the ledger by status.", _labelled("status", rounds)),
        *_family("answers_total", "counter", "Answers of clients, by verdict.", _labelled("verdict", answers)),
        *_family("requests_total", "counter", "Requests by path and status.", requests),
        *_family("rejections_total", "counter", "Rejected requests by code.", _labelled("code", traffic.rejections)),
        *_family("received_bytes_total", "counter", "Bytes of bodies that came in.", traffic.bytes_in),
        *_family("sent_bytes_total", "counter", "Bytes of bodies that went out.", traffic.bytes_out),
        *_family("ledger_bytes", "gauge", "Bytes of the ledger and of the updates in it.", pool.ledger.size()),
    ]
    return "\n".join([*lines, ""])


def _labelled(label: str, values: Mapping[str, float]) -> dict[str, float]:
    return {f'{label}="{value}"': number for value, number in values.items()}


def _family(name: str, kind: str, meaning: str, values: float | Mapping[str, float]) -> Iterator[str]:
    yield f"# HELP fedloom_{name} {meaning}"
    yield f"# TYPE fedloom_{name} {kind}"
    if isinstance(values, Mapping):
        yield from (f"fedloom_{name}{{{labels}}} {number}" for labels, number in sorted(values.items()))
    else:
        yield f"fedloom_{name} {values}"
