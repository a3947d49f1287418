"""The clients of one round, behind the verbs that mark the trust boundary; who is sampled; what clients keep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from fedloom import keys
from fedloom.aggregation.robust import finite
from fedloom.algorithm import Algorithm, Update
from fedloom.backends.protocol import Backend
from fedloom.data.split import SplitName
from fedloom.errors import InputError
from fedloom.federation.client_state import ClientStates
from fedloom.federation.evaluation import ServerEvaluation
from fedloom.federation.work import ClientWork, Outcome, Report, aggregate
from fedloom.task import Task
from fedloom.training.evaluation import Measured
from fedloom.training.local import Groups
from fedloom.tree import Tree


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
    own: ClientStates
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
        work = ServerEvaluation(model, "validation", range(-(-examples // ServerEvaluation.piece)))
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
