"""The operator's page: what the coordinator is doing now, its agents, alerts, and what to do about them."""

from __future__ import annotations

import hmac
import json
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cryptography import x509
from fastapi import Request
from fastapi.exceptions import HTTPException

from fedloom import machine
from fedloom.errors import InputError
from fedloom.network.coordinator.agent_pool import AgentPool, Call
from fedloom.network.coordinator.monitoring import Traffic
from fedloom.network.coordinator.network_folder import invite, token_file, withdraw
from fedloom.network.coordinator.request_guard import RequestGuard
from fedloom.network.protocol.rejection import Rejected
from fedloom.network.protocol.token import Token
from fedloom.results.safe_text import plain, visible
from fedloom.watch.app import Page
from fedloom.watch.guard import own_hosts
from fedloom.watch.live_run import RunOnceItExists

Json = dict[str, Any]
EVENTS = 200  # of the audit log: `fedloom audit export` has all of them
HOUR = 3600.0
REFUSALS = 3  # of one agent within an hour
CLOCKS = 3  # requests that were rejected for their time: an agent corrects its clock after the first
LITTLE_DISK = 0.05  # share of the disk that is free


class OperatorsView:
    """What the operator sees and does. All texts of agents are made plain."""

    def __init__(self, pool: AgentPool, traffic: Traffic) -> None:
        self.pool, self.traffic = pool, traffic

    def state(self) -> Json:
        """Return what the coordinator is doing now."""
        pool, ledger = self.pool, self.pool.ledger
        status = pool.status()
        disk = shutil.disk_usage(ledger.folder)
        events = ledger.last_events(EVENTS)
        return {
            "stage": status["stage"],
            "agents": self._agents(),
            "call": self._call(),
            "tokens": [
                {"name": row["digest"][:8], "expires": row["expires"], "made": row["made"]}
                for row in ledger.unused_tokens()
            ],
            "events": [{**row, "message": plain(row["message"])} for row in events],
            "accepted": status["accepted"],
            "rejected": status["rejected"],
            "bytes_in": self.traffic.bytes_in,
            "bytes_out": self.traffic.bytes_out,
            "disk": {"free": disk.free, "total": disk.total, "ledger": ledger.size()},
            "memory": machine.free_memory(),
            "alerts": list(self._alerts(events, disk.free, disk.total)),
        }

    def _agents(self) -> list[Json]:
        """Return every enrolled agent, also one that has not been heard from."""
        now, since = time.monotonic(), dict[str, float]()
        awaited: Counter[str] = Counter()
        with self.pool.changed:
            for call in reversed(self.pool.open_calls):
                awaited.update(call.waiting.values())
                since |= dict.fromkeys(call.waiting.values(), call.opened)
        found = []
        for row in self.pool.ledger.agents():
            known = self.pool.agents.get(row["agent"])
            shown = known.shown(row["agent"] in awaited) if known is not None else {}
            hello = known.hello if known is not None and known.hello is not None else None
            versions = hello.versions if hello is not None else json.loads(row["hello"] or "{}").get("versions", {})
            busy = bool(awaited[row["agent"]])
            state = "revoked" if row["revoked"] else shown.get("state", "enrolled")
            found.append(
                {
                    "agent": row["agent"],
                    "name": visible(row["name"]),
                    "state": "working" if state == "ready" and busy else "idle" if state == "ready" else state,
                    "doing": shown.get("doing", "") if busy else "",  # otherwise it is what it did last
                    "since": now - since[row["agent"]] if busy else None,
                    "awaited": awaited[row["agent"]],
                    "clients": shown.get("clients", 0),
                    "seen": shown["seconds_since_seen"] if known is not None and known.contacted else None,
                    "why": shown.get("why", ""),
                    "enrolled": row["enrolled"],
                    "versions": {visible(str(name)): visible(str(version)) for name, version in versions.items()},
                }
            )
        return found

    def _call(self) -> Json | None:
        """Return the open call, or all clients in flight: who has answered, who has not, and how many are needed."""
        pool, now = self.pool, time.monotonic()
        calls = [pool.call] if pool.call is not None else list(pool.flights.values())
        if not calls:
            return None
        names = {row["client"]: visible(row["name"]) for row in pool.ledger.clients()}
        clients = [one for call in calls for one in self._asked(call, names)]
        opened, deadline = min(call.opened for call in calls), min(call.deadline for call in calls)
        return {
            "title": plain(calls[0].title if pool.call is not None else pool.stage),
            "open_for": now - opened,
            "seconds_left": max(deadline - now, 0.0),
            "seconds": deadline - opened,
            "needed": calls[0].needed,
            "enough": calls[0].enough,
            "clients": clients,
        }

    def _asked(self, call: Call, names: Mapping[int, str]) -> Iterator[Json]:
        """Yield the clients of a call."""
        with self.pool.changed:
            answers, failures, received = set(call.answers), dict(call.failures), dict(call.received)
        for agent, assignment in call.assignments.items():
            one = self.pool.agents.get(agent)
            for client in (asked.client for asked in assignment.clients):
                failure = failures.get(client)
                failed = failure and ("refused" if failure.kind == "refused" else "failed")
                state = "answered" if client in answers else failed or "waiting"
                lost = state == "waiting" and (one is None or one.lost())
                since = f" (from round {assignment.round})" if assignment.id in self.pool.flights else ""
                yield {
                    "name": names.get(client, str(client)) + since,
                    "agent": visible(one.name) if one is not None else "",
                    "state": "lost" if lost else state,
                    "why": plain(failure.message) if failure else "",
                    "bytes": received.get(client, 0),
                }

    def _alerts(self, events: Sequence[Json], free: int, total: int) -> Iterator[str]:
        """Yield what needs somebody now."""
        if self.pool.call is not None:
            yield from quorum_alerts(self.pool, self.pool.call)
        latest = time.time() - HOUR
        kinds = ("refused", "denied")
        refusals = Counter(row["agent"] for row in events if row["kind"] in kinds and row["time"] > latest)
        for row in self.pool.ledger.agents():
            if refusals[row["agent"]] >= REFUSALS and not row["revoked"]:
                mine = (event for event in events if event["agent"] == row["agent"] and event["kind"] in kinds)
                last = next(mine)["message"]
                yield f"{visible(row['name'])} refused {refusals[row['agent']]} times within an hour. {plain(last)}"
        wrong = sum(moment > latest for moment in list(self.traffic.wrong_clocks))
        if wrong >= CLOCKS:
            yield (
                f"{wrong} requests within an hour were rejected because their time is far from this machine's: check "
                "the clocks."
            )
        if free < LITTLE_DISK * total:
            yield f"The disk is nearly full: {free / 1e9:.1f} GB of {total / 1e9:.0f} GB are free."

    def act(self, deed: str, name: str) -> Json:
        """Invite or revoke an agent, or withdraw a token."""
        ledger = self.pool.ledger
        if deed == "invite":
            (path,) = invite(ledger, 1)
            self.pool.log("operator", f"invited an agent, with the token {path.stem}")
            return {"token": path.read_text(encoding="utf-8").strip(), "file": str(token_file(ledger, path.stem))}
        if deed == "revoke":
            ledger.revoke(name)
            self.pool.log("operator", f"revoked {name}")
            return {}
        if deed == "withdraw":
            withdraw(ledger, name)
            self.pool.log("operator", f"withdrew the token {name}")
            return {}
        raise InputError(f"An operator can invite, revoke and withdraw. Got '{deed}' instead.")


def quorum_alerts(pool: AgentPool, call: Call) -> Iterator[str]:
    """Yield a warning if a call can fail, or nearly so, because agents are lost."""
    with pool.changed:
        waiting = dict(call.waiting)
    lost = [client for client, agent in waiting.items() if (one := pool.agents.get(agent)) is None or one.lost()]
    possible = len(call.answers) + len(waiting) - len(lost)
    if possible < call.needed:
        yield (
            f"{plain(call.title)}: the quorum is lost unless agents come back. Answers that are needed: {call.needed}; "
            f"that are there: {len(call.answers)}; that can still come: {possible - len(call.answers)}."
        )
    elif (lost or call.failures) and possible == call.needed:
        yield (
            f"{plain(call.title)}: the quorum is at risk. It needs every answer that can still come: "
            f"{possible - len(call.answers)}."
        )


def operators_page(pool: AgentPool, guard: RequestGuard, traffic: Traffic, hosts: Sequence[str] | None) -> Page:
    """Return the page. `hosts` are the names of this machine; None, behind a proxy, accepts any."""

    def is_token(request: Request, text: str) -> bool:
        try:
            guard.guesses.check(request)
        except Rejected as why:
            raise HTTPException(429, why.message) from None
        try:
            given = Token.parse(text).digest
        except InputError:
            given = "none"
        if guard.operator and hmac.compare_digest(given.encode(), guard.operator.encode()):
            return True
        guard.guesses.add(request)
        pool.log("denied", "a wrong token was given on the operator's page")
        return False

    def recognise(request: Request, session: str) -> None:
        if "recognise" in request.scope:  # the connection is the operator's, and stays open longer than a stranger's
            request.scope["recognise"](f"operator {session}")  # each browser has its own share of connections

    return Page(
        RunOnceItExists(pool.ledger.folder.parent),
        is_token,
        private=True,
        operator=OperatorsView(pool, traffic),
        is_own_host=(lambda name: True) if hosts is None else own_hosts(hosts),
        closing=lambda: pool.closing,
        recognise=recognise,
    )


def certified_names(pem: bytes) -> list[str]:
    """Return the names that a certificate is for; a wildcard is left out."""
    certificate = x509.load_pem_x509_certificate(pem)
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return []
    return found.value.get_values_for_type(x509.DNSName)
