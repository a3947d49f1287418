"""The clients of one round, behind the verbs that mark the trust boundary; who is sampled; what clients keep."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import torch
from pydantic import model_validator
from torch import Tensor

from fedloom import keys, tree
from fedloom.aggregation.robust import finite
from fedloom.algorithm import Algorithm, Update
from fedloom.data.split import SplitName
from fedloom.errors import InputError
from fedloom.federation.work import ClientWork, Outcome, Report, ServerExamination, Work, aggregate
from fedloom.record import Count, Duration, NonNegative, Positive, Record, Share
from fedloom.task import Task
from fedloom.training.evaluation import Measured
from fedloom.training.local import Groups
from fedloom.tree import Tree


class Backend(Protocol):
    """Carries out work where the data lives.

    One that is spread over machines may lose clients on the way: what it returns is then about those that answered, in
    their order, and it raises `RoundAbandoned` when they are too few. What clients keep stays with them; such a backend
    has a method `keep` that tells what stands for it here.
    """

    def run(self, work: Work) -> Any: ...
    def close(self) -> None: ...


class Sampling(Record):
    """Who takes part in a round.

    `fraction` is C of the papers (0 means one client); `count` says it directly. Sampling is `fixed` (exactly so many,
    at random), `poisson` (each client by itself with probability `fraction`) or `window` (moves by one at a time).
    """

    fraction: Share = 1.0
    """The share of clients in a round, C in the papers. 0 means one client."""
    count: Count | None = None
    """The number of clients in a round, instead of `fraction`."""
    sampling: Literal["fixed", "poisson", "window"] = "fixed"
    """How clients are drawn: `fixed` draws exactly this many, `poisson` draws each client with probability `fraction`,
    and `window` moves on by one client at a time.
    """
    redraw_every: Count = 1
    """Draw a new cohort every this many rounds."""
    everyone_every: Count | None = None
    """All clients take part in every round that is a multiple of this."""
    quorum: NonNegative = 0.0
    """The fewest clients for a round to count: a share of the cohort, or a number above 1."""
    start_when: Count | tuple[str, ...] = 2
    """How many agents to wait for before the first round, or their names. Only on a network."""
    deadline: Duration = "10m"
    """How long a round may take. Clients that have not answered by then are left out. Only on a network."""
    over_select: NonNegative = 0.0
    """Invite this fraction of extra clients; the first to answer count. Only on a network."""
    norm_bound: Positive | None = None
    """Refuse an update whose change has a larger norm than this. Only on a network."""
    weight_cap: Positive = 1e9
    """Refuse an update that claims a larger weight than this. Only on a network."""

    @model_validator(mode="after")
    def _fits(self) -> Sampling:
        if self.count is not None and "fraction" in self.model_fields_set and self.fraction != 1.0:
            raise InputError(
                f"A cohort takes either a count or a fraction. Got count = {self.count} and fraction = {self.fraction}."
            )
        if self.sampling == "poisson" and self.count is not None:
            raise InputError("Poisson sampling draws each client by itself: give cohort.fraction, not cohort.count.")
        if self.sampling == "poisson" and self.fraction == 0:
            raise InputError(
                "Poisson sampling with cohort.fraction = 0 would never draw anybody. Use a larger fraction."
            )
        return self

    def size(self, population: int) -> int:
        """How many clients a round has (the expected number for Poisson sampling)."""
        return self.count or max(int(self.fraction * population + 0.5), 1)

    def needed(self, population: int) -> int:
        """The fewest clients for a round to count."""
        size = self.size(population)
        return int(np.ceil(self.quorum * size if self.quorum <= 1 else self.quorum))

    def identity(self) -> dict[str, Any]:
        """What of this decides the result: not how long somebody waits, and on a network only what was asked for."""
        values = self.model_dump(mode="json", exclude_none=True, exclude={"start_when", "deadline"})
        plain = {name: type(self).model_fields[name].default for name in ("over_select", "weight_cap")}
        return {name: value for name, value in values.items() if name not in plain or value != plain[name]}

    def check(self, population: int) -> None:
        if self.count is not None and self.count > population:
            raise InputError(
                f"cohort.count = {self.count}, but there are only {population} clients. Allowed: 1 to {population}."
            )
        if self.needed(population) > self.size(population):
            raise InputError(
                f"cohort.quorum = {self.quorum:g} can never be met: a round has {self.size(population)} of "
                f"{population} clients."
            )

    def is_for_everyone(self, round: int) -> bool:
        """Whether all clients take part in this round, whatever else is said."""
        return self.everyone_every is not None and round % self.everyone_every == 0

    def draw(self, population: int, round: int, seed: int) -> tuple[int, ...]:
        """The clients of a round, in ascending order.

        >>> Sampling(count=3).draw(1_000_000, round=1, seed=7) == Sampling(count=3).draw(1_000_000, round=1, seed=7)
        True
        """
        if self.is_for_everyone(round):
            return tuple(range(population))
        period = (round - 1) // self.redraw_every
        size = self.size(population)
        if self.sampling == "window":
            return tuple(sorted((period + offset) % population for offset in range(size)))
        key = keys.key(seed, "cohort", period)
        if self.sampling == "poisson":
            chosen = keys.hashes(key, population) < self.fraction * 2**32
            return tuple(int(client) for client in np.flatnonzero(chosen))
        if size == population:
            return tuple(range(population))
        if size * 2 > population:
            return tuple(sorted(int(client) for client in keys.permutation(key, population)[:size]))
        # a few of many: draw with repetition until enough differ, so that the cost does not grow with the population
        chosen_ids: dict[int, None] = {}
        draws = size
        while len(chosen_ids) < size:
            draws *= 2
            chosen_ids = dict.fromkeys(int(client) for client in keys.hashes(key, draws) * population >> 32)
        return tuple(sorted(list(chosen_ids)[:size]))


class OwnStates:
    """What each client keeps between rounds; a client that never took part has the initial value."""

    def __init__(self, initial: Groups, states: dict[int, Groups] | None = None) -> None:
        self.initial = initial
        self.states = dict(states or {})
        self.changed: set[int] = set()
        self._before: dict[int, Groups | None] = {}  # as it was when the changes were last taken

    def gather(self, ids: Iterable[int]) -> Groups:
        """The states of some clients, stacked."""
        if not self.initial:
            return {}
        found = [self.states.get(client, self.initial) for client in ids]
        return {group: tree.stack([state[group] for state in found]) for group in self.initial} if found else {}

    def put(self, ids: Iterable[int], own: Groups) -> None:
        if own.keys() != self.initial.keys():
            raise InputError(
                f"A client method must return all that clients keep: {', '.join(self.initial) or 'nothing'}. "
                f"Got {', '.join(own) or 'nothing'} instead (see init_own)."
            )
        if not self.initial:
            return
        for position, client in enumerate(ids):
            self._before.setdefault(client, self.states.get(client))
            self.states[client] = {group: tree.clone(tree.row(stacked, position)) for group, stacked in own.items()}
            self.changed.add(client)

    def take_changed(self) -> dict[int, Groups]:
        """The states that changed since this was last asked."""
        changed, self.changed = self.changed, set()
        self._before = {}
        return {client: self.states[client] for client in sorted(changed)}

    def undo(self, ids: Iterable[int] | None = None) -> None:
        """Give up all changes that were not taken, or some clients': the round they belong to does not count."""
        for client in list(self._before) if ids is None else [client for client in ids if client in self._before]:
            state = self._before.pop(client)
            if state is None:
                self.states.pop(client, None)
            else:
                self.states[client] = state
            self.changed.discard(client)


@dataclass(frozen=True)
class Aggregate:
    """What the server sees after `reduce`: means, sums of weights and public numbers, but no client's leaves."""

    groups: Groups
    weights: dict[str, Tensor]
    public: dict[str, Tensor]

    def __getitem__(self, group: str) -> Tree:
        return self.groups[group]


@dataclass(frozen=True)
class Answers:
    """What the server sees after `map` or `exchange`: each client's answer, stacked in the cohort's order."""

    groups: Groups
    weights: dict[str, Tensor]
    public: dict[str, Tensor]

    def __getitem__(self, group: str) -> Tree:
        return self.groups[group]


ClientMethod = Callable[..., tuple[Update, Groups]]
Rule = Callable[[Tree, Tensor], Tree]


@dataclass
class Cohort:
    """The clients of one round. The verbs say what the server gets to see."""

    backend: Backend
    algorithm: Algorithm
    task: Task
    ids: tuple[int, ...]
    population: int
    round: int
    seed: int
    own: OwnStates
    measure: tuple[SplitName, ...] = ()
    universal: bool = False
    watch_epochs: bool = False
    calls: int = 0
    reports: list[Report] = field(default_factory=list)
    public: dict[str, Tensor] = field(default_factory=dict)  # numbers that clients made public, by name
    publishers: dict[str, tuple[int, ...]] = field(default_factory=dict)  # and whose they are, in order
    server_examples: dict[str, int] = field(default_factory=dict)  # how many the server itself holds, by split
    notes: dict[str, float] = field(default_factory=dict)  # what the server noted about this round
    left_out: list[int] = field(default_factory=list)  # clients whose answers were not finite

    def __len__(self) -> int:
        return len(self.ids)

    def key(self, purpose: str, *parts: int) -> int:
        """A key for the server's own random choices in this round."""
        return keys.key(self.seed, purpose, self.round, *parts)

    def note(self, **numbers: float) -> None:
        """Keep numbers about this round with its record."""
        self.notes.update(numbers)

    def keep_finite(self, groups: Groups, weights: dict[str, Tensor]) -> Tensor:
        """Which clients' answers are finite numbers; the round goes on without the others.

        These leave the cohort, as clients that a network loses do, and keep what they had before the round.
        """
        each = [finite(stacked) for stacked in groups.values() if stacked]
        each += [weight.isfinite() for weight in weights.values()]
        sound = torch.stack(each).all(0)
        gone = [client for client, good in zip(self.ids, sound.tolist(), strict=True) if not good]
        if gone:
            self.left_out += gone
            self.note(not_finite=len(self.left_out))
            self.own.undo(gone)
            self.ids = tuple(client for client in self.ids if client not in gone)
        return sound

    def validate(self, model: Tree) -> float | None:
        """The accuracy (or else the loss) of a model on the server's own validation data; None if it holds none."""
        examples = self.server_examples.get("validation")
        if not examples:
            return None
        work = ServerExamination(model, "validation", range(-(-examples // ServerExamination.piece)))
        values = sum(self.backend.run(work), Measured()).values(self.task)
        return values.get("accuracy", values["loss"])

    def reduce(
        self, fn: ClientMethod, shared: Groups, rule: Rule | None = None, *, each: Groups | None = None
    ) -> Aggregate:
        """Every client runs `fn`; the server sees only the mean of each group, or what a `rule` makes of it."""
        if rule is not None:
            answers = self.map(fn, shared, each=each)
            return Aggregate(
                {group: rule(stacked, answers.weights[group]) for group, stacked in answers.groups.items()},
                {group: weight.sum() for group, weight in answers.weights.items()},
                answers.public,
            )
        outcome = self._ask(fn, shared, "sum", each=each)
        return Aggregate(*aggregate(outcome), outcome.public)

    def map(self, fn: ClientMethod, shared: Groups, *, each: Groups | None = None) -> Answers:
        """Every client runs `fn`; the server sees each answer."""
        outcome = self._ask(fn, shared, "stack", each=each)
        return Answers(outcome.stack, outcome.weights, outcome.public)

    def exchange(
        self,
        fn: ClientMethod,
        trees: Groups,
        graph: Tensor,
        *,
        shared: Groups | None = None,
        each: Groups | None = None,
    ) -> Answers:
        """Every client receives its neighbours' trees (`graph[i, j]`: i receives from j) and runs `fn` on them."""
        outcome = self._ask(fn, shared or {}, "stack", each=each, peers=trees, graph=graph)
        return Answers(outcome.stack, outcome.weights, outcome.public)

    def _ask(
        self,
        fn: ClientMethod,
        shared: Groups,
        keep: Literal["sum", "stack"],
        *,
        each: Groups | None = None,
        peers: Groups | None = None,
        graph: Tensor | None = None,
    ) -> Outcome:
        if getattr(fn, "__func__", None) is not getattr(type(self.algorithm), fn.__name__, None):
            raise InputError(
                f"A verb takes a method of the algorithm, such as self.client, because clients look it up by its name. "
                f"Got {fn!r} instead."
            )
        work = ClientWork(
            self.algorithm,
            fn.__name__,
            shared,
            self.ids,
            self.own.gather(self.ids),
            self.seed,
            self.round,
            self.calls,
            keep,
            each,
            peers,
            None if graph is None else graph.to(torch.bool),
            self.measure,
            self.universal,
            self.watch_epochs,
        )
        self.calls += 1
        outcome: Outcome = self.backend.run(work)
        # on a network some may be gone: the round goes on among those who answered
        self.ids = tuple(report.client for report in outcome.reports)
        self.own.put(self.ids, outcome.own)
        self.reports.extend(outcome.reports)
        self.public.update(outcome.public)
        self.publishers.update(dict.fromkeys(outcome.public, self.ids))
        return outcome
