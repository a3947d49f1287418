"""The messages between coordinator and agents. They hold names and numbers, never code.

The fields' names are those on the wire: an *assignment* is called `ask` there, and its parcels `parts`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Le, MaxLen
from pydantic import AllowInfNan, BaseModel, ConfigDict, Field, Strict
from torch import Tensor

from fedloom.algorithm import Update
from fedloom.data.federation import Federation
from fedloom.federation.work import ClientWork
from fedloom.network.protocol.tensors import Parcel, WireError, below, flatten, unflatten
from fedloom.network.protocol.verbs import SecureKind, Verb
from fedloom.training.evaluation import Measured
from fedloom.tree import Groups

TICKET = "ticket"  # the group that stands for a client's own state at the coordinator
Ticket = tuple[int, int, int]  # round, attempt and call in which a version of a client's own state was made
NEW: Ticket = (0, 0, 0)  # the state before the first round


class Message(BaseModel):
    """A JSON message with exactly these fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


Number = Annotated[int, Strict(), Ge(0), Le(2**53)]
Text = Annotated[str, MaxLen(20_000)]
Name = Annotated[str, MaxLen(200)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Stamp = tuple[Number, Number, Number]
Examples = Annotated[int, Strict(), Ge(0), Le(2**31)]  # sums over all clients must not overflow
Whole = Literal["bool", "uint8", "int8", "int16", "int32", "int64"]
Dtype = Whole | Literal["float16", "bfloat16", "float32", "float64", "complex64", "complex128"]


class DataFormat(Message):
    """Shape and dtype of one example, the names of the classes (none for a regression), and the shape of a label.

    `prepared` is a hash of how rows become features: columns, categories, and statistics for normalisation.
    """

    features: Annotated[tuple[Number, ...], MaxLen(32)]
    dtype: Dtype
    classes: Annotated[tuple[Name, ...], MaxLen(100_000)]
    labels: Annotated[tuple[Number, ...], MaxLen(32)] = ()
    prepared: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""

    @staticmethod
    def of(federation: Federation) -> DataFormat:
        return DataFormat(
            features=tuple(federation.x.shape[1:]),
            dtype=str(federation.x.dtype).removeprefix("torch."),
            classes=tuple(federation.classes),
            labels=tuple(federation.y.shape[1:]),
            prepared=federation.preprocessing.sha256,
        )

    @property
    def data_format(self) -> DataFormat:
        """This without what else a message says."""
        return DataFormat(**{name: getattr(self, name) for name in DataFormat.model_fields})

    def message(self) -> dict[str, Any]:
        return self.model_dump(mode="json", include={*DataFormat.model_fields})

    def differences(self, other: DataFormat, here: str = "here", there: str = "there") -> str:
        """Describe what differs: "theirs" is the other format, "ours" is this one. Empty if nothing does."""
        ours, theirs = self.message(), DataFormat.message(other)
        different = [name for name in ours if ours[name] != theirs[name]]
        if different == ["prepared"]:
            return (
                "Columns, categories or statistics of normalisation differ. Let all sites use one file: "
                "`fedloom data summarize` at each site, then `fedloom data agree`"
            )
        shown = [name for name in different if name != "prepared"]  # a hash, which differs with the others
        return "; ".join(f"{name}: {_short(theirs[name])} {there}, {_short(ours[name])} {here}" for name in shown)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "…"


class ParcelInfo(Message):
    """A parcel of tensors that belongs to an assignment. An agent that still has it does not receive it again."""

    role: Literal["shared", "private", "peers"]
    sha256: Sha256
    bytes: Number


class AssignedClient(Message):
    """One client of an assignment."""

    client: Number  # its number in the run
    local: Number  # its number at its site
    ticket: Stamp | None = None  # the version of its own state that counts; none if clients keep nothing
    row: Number = 0  # its row in the private parcel, even after other clients of the assignment have answered
    receives: tuple[Number, ...] = ()  # in an exchange: positions in the cohort of the peers whose trees it receives


Hex = Annotated[str, Field(pattern=r"^([0-9a-f]{2})*$", max_length=2000)]
ByClient = Annotated[dict[Annotated[str, Field(pattern=r"^[0-9]{1,15}$")], Hex], MaxLen(100_000)]


class SecurePeer(Message):
    """The keys of one client in a secure sum, and the key of the agent that signed them."""

    client: Number
    agent: Name
    agent_key: Sha256  # 32 bytes, as all keys here
    mask_key: Sha256
    channel_key: Sha256
    signature: Hex


class SecureStage(Message):
    """What the coordinator relays to an agent in one stage of a secure sum."""

    peers: tuple[SecurePeer, ...] = ()  # share: everybody's keys
    clients: tuple[Number, ...] = ()  # mask and confirm: the clients that are left
    ciphertexts: dict[str, ByClient] = {}  # mask: by client of this agent, the shares that others encrypted for it
    clip: Annotated[float, Ge(0), AllowInfNan(False)] | None = None  # mask: with differential privacy of clients
    signatures: ByClient = {}  # unmask: of the clients that confirmed who is in the sum


class SecureResult(Message):
    """What one client answers in a stage of a secure sum, besides a masked vector."""

    mask_key: Hex = ""
    channel_key: Hex = ""
    signature: Hex = ""  # advertise: of the keys; confirm: of the clients in the sum
    shares: ByClient = {}  # share: encrypted for other clients; unmask: one share of each client


class Assignment(Message):
    """Work for one agent: what to do, for which of its clients."""

    protocol: Literal[1] = 1
    id: Name
    kind: Literal["train", "evaluate", "fingerprint"] | SecureKind
    verb: Verb
    label: Name
    seed: Annotated[int, Strict()]
    round: Number
    attempt: Number
    call: Number = 0
    method: Name = ""
    cohort: Number  # the number of clients in the round, of all agents
    population: Number
    clients: tuple[AssignedClient, ...]
    splits: tuple[Literal["train", "validation", "test"], ...] = ()
    watch_epochs: bool = False
    compressed: bool = False  # whether clients compress their answers, as the run announced
    durable: Number = 0  # the round of the coordinator's oldest checkpoint
    seconds: float = 0.0  # until the deadline
    parts: tuple[ParcelInfo, ...] = ()
    secure: SecureStage | None = None  # of a secure sum


class MeasuredSums(Message):
    """Loss and metrics as sums over examples; null where the site's policy withholds one.

    `summaries` has the values of other metrics, such as AUROC: null where one is undefined. One that the site's policy
    withholds is missing.
    """

    count: Number
    sums: dict[Name, float | None]
    summaries: dict[Name, float | None] = {}


class ResultHeader(Message):
    """One client's answer without its tensors."""

    client: Number
    ticket: Stamp | None = None
    history: tuple[dict[Name, float | None], ...] = ()
    measured: dict[Name, MeasuredSums] = {}
    sha256: Sha256 | None = None
    secure: SecureResult | None = None


class Answer(Message):
    """The header of an answer: the assignment's id, and a result for each client."""

    protocol: Literal[1] = 1
    ask: Name
    results: tuple[ResultHeader, ...]


SPENT = "the site's privacy budget is spent"  # the whole message of a refusal: what was spent stays at the site


class Failure(Message):
    """Why an agent did not do its work: an error, or its site's policy."""

    protocol: Literal[1] = 1
    ask: Name | None = None
    clients: tuple[Number, ...] = ()
    kind: Literal["error", "refused"]
    message: Text


class Enrolment(Message):
    """The secret of a one-time token, in exchange for an agent's number."""

    protocol: Literal[1] = 1
    secret: Annotated[str, MaxLen(64)]
    name: Annotated[str, MaxLen(64)]
    public_key: Annotated[str, MaxLen(64)]


class NewKey(Message):
    """The key that follows an agent's present one, which signs the request; the new one signs the agent's number."""

    protocol: Literal[1] = 1
    public_key: Sha256
    proof: Annotated[str, MaxLen(128)]


class ClientFacts(Message):
    """The name and the split sizes of a client that an agent hosts."""

    name: Name
    number: Number | None = None  # only in a rehearsal
    train: Examples
    validation: Examples
    test: Examples


class Hello(DataFormat):
    """An agent is ready to work: its versions, its data's format, its clients."""

    protocol: Literal[1] = 1
    versions: Annotated[dict[Name, Name], MaxLen(100)]
    clients: Annotated[tuple[ClientFacts, ...], MaxLen(100_000)]
    data_mark: Annotated[str, MaxLen(64)]
    setup: Annotated[dict[Name, bool | int | Name], MaxLen(100)]
    min_cohort: Number = 1  # the fewest clients with which its updates may be summed
    withheld: Annotated[tuple[Name, ...], MaxLen(1000)] = ()  # metrics of the run that its policy keeps at the site
    sends_scores: bool = False  # whether scores and labels of single examples leave it

    @property
    def numbers(self) -> frozenset[int]:
        """The numbers of its clients in a rehearsal."""
        return frozenset(one.number for one in self.clients if one.number is not None)

    def numbered(self, agent: str, first: int) -> list[tuple[int, str, int, str]]:
        """Return number, agent, number at the agent, and name of each client; `first` is the next free number."""
        return [
            (first + local, agent, local, one.name) if one.number is None else (one.number, agent, one.number, one.name)
            for local, one in enumerate(self.clients)
        ]


class Heartbeat(Message):
    """The agent is alive, and this is what it is doing."""

    protocol: Literal[1] = 1
    doing: Name = "idle"
    pins: Annotated[str, MaxLen(64)] = ""  # the SHA-256 of the certificates that it trusts


# --- tickets


def ticket_group(tickets: list[Ticket]) -> Groups:
    """Return what stands for the clients' own states at the coordinator: their versions, stacked."""
    return {TICKET: {"version": torch.tensor(tickets, dtype=torch.int64).reshape(len(tickets), 3)}}


def ticket_of(own: Groups, position: int) -> Ticket | None:
    """Return the version of one client's state, or None if clients keep nothing."""
    if TICKET not in own:
        return None
    round, attempt, call = (int(number) for number in own[TICKET]["version"][position])
    return round, attempt, call


# --- answers


@dataclass(frozen=True)
class ClientAnswer:
    """One client's answer, as an agent writes it and the coordinator reads it."""

    client: int
    update: Update = field(default_factory=lambda: Update({}, {}))
    ticket: Ticket | None = None
    history: tuple[dict[str, float], ...] = ()
    measured: dict[str, Measured] = field(default_factory=dict)
    sha256: str | None = None
    secure: SecureResult | None = None
    parts: Groups = field(default_factory=dict)  # of compressed leaves, which the update lacks

    @property
    def has_metrics(self) -> bool:
        """Whether it says how well a model does at this client."""
        return bool(self.history or self.measured)

    def without_metrics(self) -> ClientAnswer:
        """Return the same, and nothing about how well a model does."""
        return replace(self, history=(), measured={})


def write_answer(id: str, answers: Sequence[ClientAnswer]) -> Parcel:
    """Return the parcel that answers an assignment."""
    tensors: dict[str, Tensor] = {}
    results = []
    for one in answers:
        update, sums = one.update, {}
        mine = flatten(update.groups, "update/")
        mine |= flatten(one.parts, "parts/")
        mine |= {f"weights/{group}": update.weights(group) for group in update.groups}
        mine |= {f"public/{name}": value for name, value in update.public.items()}
        for where, found in one.measured.items():
            numbers = {"sums": _without_nan(found.sums), "summaries": _without_nan(found.summaries)}
            sums[where] = MeasuredSums(count=found.count, **numbers)
            mine |= {f"scores/{where}/{name}": scores for name, scores in found.scores.items()}
            if found.targets is not None:
                mine[f"targets/{where}"] = found.targets
        tensors |= {f"{one.client}/{path}": leaf for path, leaf in mine.items()}
        rest = {"history": tuple(_without_nan(epoch) for epoch in one.history), "measured": sums, "secure": one.secure}
        results.append(ResultHeader(client=one.client, ticket=one.ticket, sha256=one.sha256, **rest))
    header = Answer(ask=id, results=tuple(results))
    return Parcel(header.model_dump(mode="json", exclude_defaults=True, exclude_none=False), tensors)


def _without_nan(values: Mapping[str, float]) -> dict[str, float | None]:
    """JSON has no NaN and no infinity: null takes their place."""
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def _with_nan(values: Mapping[str, float | None]) -> dict[str, float]:
    return {name: math.nan if value is None else value for name, value in values.items()}


def read_answer(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[Answer, dict[int, ClientAnswer]]:
    """Read an answer as it arrived. `update_checks` decides whether it counts."""
    answer = Answer.model_validate(header)
    found: dict[int, ClientAnswer] = {}
    sent = unflatten(tensors)  # by client
    for result in answer.results:
        if result.client in found:
            raise WireError(f"client {result.client} answers twice")
        mine = sent.pop(str(result.client), {})
        groups, weights = unflatten(below(mine, "update/")), below(mine, "weights/")
        if weights.keys() != groups.keys():
            raise WireError("every group of an update needs a weight")
        measured = {}
        scores = unflatten(below(mine, "scores/"))  # by split
        for where, sums in result.measured.items():
            targets = mine.get(f"targets/{where}")
            numbers = _with_nan(sums.sums), scores.get(where, {}), targets, _with_nan(sums.summaries)
            measured[where] = Measured(sums.count, *numbers)
        history = tuple(_with_nan(epoch) for epoch in result.history)
        update = Update(groups, weights, below(mine, "public/"))
        found[result.client] = ClientAnswer(
            result.client,
            update,
            result.ticket,
            history,
            measured,
            result.sha256,
            result.secure,
            unflatten(below(mine, "parts/")),
        )
    if sent:
        raise WireError("the answer has tensors of clients that its header does not list")
    return answer, found


def verb_of(work: ClientWork) -> Verb:
    """Return the verb of a piece of work: it says what the server will see."""
    if work.peers is not None:
        return "exchange"
    return "map" if work.keep == "stack" else "reduce"
