"""Work as messages: what a coordinator asks of an agent, and what the agent answers. Names and numbers, never code."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Le, MaxLen
from pydantic import BaseModel, ConfigDict, Field, Strict
from torch import Tensor

from fedloom.algorithm import Update
from fedloom.federation.work import ClientWork
from fedloom.network.agent.policy import Verb
from fedloom.network.protocol.tensors import Parcel, WireError, below, flatten, unflatten
from fedloom.training.evaluation import Measured
from fedloom.training.local import Groups

TICKET = "ticket"  # the group that stands for what a client keeps, at the coordinator
Ticket = tuple[int, int, int]  # round, attempt, call in which the client's state was made; (0, 0, 0) before the first
NEW: Ticket = (0, 0, 0)


class Message(BaseModel):
    """A JSON message with exactly these fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


Number = Annotated[int, Strict(), Ge(0), Le(2**53)]
Text = Annotated[str, MaxLen(20_000)]
Name = Annotated[str, MaxLen(200)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Stamp = tuple[Number, Number, Number]


class Part(Message):
    """Tensors that belong to an ask; whoever has them already is not sent them again."""

    role: Literal["shared", "private", "peers"]
    sha256: Sha256
    bytes: Number


class Asked(Message):
    """One client of an ask."""

    client: Number  # its number in the run
    local: Number  # and at its site
    ticket: Stamp | None = None  # which version of what it keeps counts
    row: Number = 0  # where its own message is among the private ones, also when others of the ask have answered
    receives: tuple[Number, ...] = ()  # the positions of the peers that it hears, in an exchange


class Ask(Message):
    """What the coordinator asks of one agent."""

    protocol: Literal[1] = 1
    id: Name
    kind: Literal["train", "evaluate", "fingerprint"]
    verb: Verb
    label: Name
    seed: Annotated[int, Strict()]
    round: Number
    attempt: Number
    call: Number = 0
    method: Name = ""
    cohort: Number  # how many clients are asked in all
    population: Number
    clients: tuple[Asked, ...]
    splits: tuple[Literal["train", "validation", "test"], ...] = ()
    watch_epochs: bool = False
    durable: Number = 0  # the round up to which the coordinator has everything on its disk
    seconds: float = 0.0  # how long it will wait
    parts: tuple[Part, ...] = ()


class MeasuredResult(Message):
    """Loss and metrics as sums over examples; what a site does not let out is null."""

    count: Number
    sums: dict[Name, float | None]


class Result(Message):
    """What one client answered, beside its tensors."""

    client: Number
    ticket: Stamp | None = None
    history: tuple[dict[Name, float | None], ...] = ()
    measured: dict[Name, MeasuredResult] = {}
    sha256: Sha256 | None = None


class Answer(Message):
    """The header of an agent's answer."""

    protocol: Literal[1] = 1
    ask: Name
    results: tuple[Result, ...]


class Failure(Message):
    """Why an agent did not do what it was asked: an error, or its policy."""

    protocol: Literal[1] = 1
    ask: Name | None = None
    clients: tuple[Number, ...] = ()
    kind: Literal["error", "refused"]
    message: Text


class Enrolment(Message):
    """A one-time token's secret, exchanged for a place among the agents."""

    protocol: Literal[1] = 1
    secret: Annotated[str, MaxLen(64)]
    name: Annotated[str, MaxLen(64)]
    public_key: Annotated[str, MaxLen(64)]


class ClientFacts(Message):
    """One client that an agent hosts."""

    name: Name
    number: Number | None = None  # given only in a rehearsal
    train: Number
    validation: Number
    test: Number


class Hello(Message):
    """What an agent says about itself when it is ready to work."""

    protocol: Literal[1] = 1
    versions: dict[Name, Name]
    features: tuple[Number, ...]
    dtype: Name
    classes: tuple[Name, ...]
    clients: Annotated[tuple[ClientFacts, ...], MaxLen(100_000)]
    data_mark: Annotated[str, MaxLen(64)]
    setup: dict[Name, bool | int | str]


class Beat(Message):
    """A sign of life, and what the agent is doing."""

    protocol: Literal[1] = 1
    doing: Name = "idle"


# --- tickets


def ticket_group(tickets: list[Ticket]) -> Groups:
    """What stands for the clients' states at the coordinator: the versions that count, stacked."""
    return {TICKET: {"version": torch.tensor(tickets, dtype=torch.int64).reshape(len(tickets), 3)}}


def ticket_of(own: Groups, position: int) -> Ticket | None:
    """One client's version, if clients keep anything."""
    if TICKET not in own:
        return None
    round, attempt, call = (int(number) for number in own[TICKET]["version"][position])
    return round, attempt, call


# --- what a client method answers


@dataclass(frozen=True)
class ClientAnswer:
    """One client's answer to a verb, at the coordinator."""

    client: int
    update: Update
    ticket: Ticket | None
    history: tuple[dict[str, float], ...]
    measured: dict[str, Measured]
    sha256: str | None = None
    bytes: int = 0


@dataclass
class Outgoing:
    """The answers of some clients, gathered at the agent."""

    ask: str
    results: list[Result] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def add(
        self,
        client: int,
        *,
        update: Update | None = None,
        ticket: Ticket | None = None,
        history: tuple[dict[str, float], ...] = (),
        measured: Mapping[str, Measured] | None = None,
        sha256: str | None = None,
    ) -> None:
        if update is not None:
            for path, leaf in flatten(update.groups, f"{client}/update/").items():
                self.tensors[path] = leaf
            for group in update.groups:
                self.tensors[f"{client}/weights/{group}"] = update.weights(group)
            for name, value in update.public.items():
                self.tensors[f"{client}/public/{name}"] = value
        told = {}
        for where, found in (measured or {}).items():
            told[where] = MeasuredResult(count=found.count, sums={k: _told(v) for k, v in found.sums.items()})
            for name, scores in found.scores.items():
                self.tensors[f"{client}/scores/{where}/{name}"] = scores
            if found.targets is not None:
                self.tensors[f"{client}/targets/{where}"] = found.targets
        epochs = tuple({name: _told(value) for name, value in epoch.items()} for epoch in history)
        self.results.append(Result(client=client, ticket=ticket, history=epochs, measured=told, sha256=sha256))

    def parcel(self) -> Parcel:
        header = Answer(ask=self.ask, results=tuple(self.results))
        return Parcel(header.model_dump(mode="json", exclude_defaults=True, exclude_none=False), self.tensors)


def _told(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has no other numbers


def read_answer(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[Answer, dict[int, ClientAnswer]]:
    """An answer as it arrived; whether it is a good one is for `checks` to say."""
    answer = Answer.model_validate(header)
    found: dict[int, ClientAnswer] = {}
    used = 0
    for result in answer.results:
        if result.client in found:
            raise WireError(f"client {result.client} answers twice")
        mine = below(tensors, f"{result.client}/")
        used += len(mine)
        groups = unflatten(below(mine, "update/"))
        weights = below(mine, "weights/")
        public = below(mine, "public/")
        if weights.keys() != groups.keys():
            raise WireError("every group of an update needs its weight")
        measured = {}
        for where, told in result.measured.items():
            sums = {name: math.nan if value is None else value for name, value in told.sums.items()}
            scores, targets = below(mine, f"scores/{where}/"), mine.get(f"targets/{where}")
            measured[where] = Measured(told.count, sums, scores, targets)
        history = tuple({n: math.nan if v is None else v for n, v in epoch.items()} for epoch in result.history)
        found[result.client] = ClientAnswer(
            result.client, Update(groups, weights, public), result.ticket, history, measured, result.sha256
        )
    if used != len(tensors):
        raise WireError("the answer has tensors of clients that it does not name")
    return answer, found


# --- what an agent is asked


def verb_of(work: ClientWork) -> Verb:
    """What the server will see, by the name of the verb."""
    if work.peers is not None:
        return "exchange"
    return "reduce" if work.keep == "sum" else "map"
