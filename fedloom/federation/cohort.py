"""The clients of one round, behind the three verbs that mark the trust boundary: reduce, map, exchange."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedloom import keys
from fedloom.aggregation.outliers import outliers
from fedloom.aggregation.robust import finite, judge
from fedloom.data.split import SplitName
from fedloom.errors import InputError, RoundAbandoned, TrainingError
from fedloom.federation.client_state import ClientStates
from fedloom.federation.work import ClientWork, Keep, Outcome, Report, means_of, sums_of
from fedloom.privacy.protection import Protection, RoundOfClients
from fedloom.privacy.secure.ring import means as means_of_sums
from fedloom.task import Task
from fedloom.tree import Groups, Tree, change, select, zeros_like

if TYPE_CHECKING:
    from fedloom.algorithm import Algorithm, Update
    from fedloom.backends.protocol import Backend
    from fedloom.privacy.dp.at_client import ClientPrivacy

ClientMethod = Callable[..., "tuple[Update, Groups]"]
Rule = Callable[[Tree, Tensor, int], Tree]  # stacked changes, weights, how many wrong clients left before → one change


@dataclass(frozen=True)
class Aggregate:
    """What the server sees after `reduce`: means, sums of weights and public numbers, but no client's leaves."""

    groups: Groups
    weights: dict[str, Tensor]
    public: dict[str, Tensor]

    def __getitem__(self, group: str) -> Tree:
        return self.groups[group]


@dataclass(frozen=True)
class Answers(Aggregate):
    """What the server sees after `map` or `exchange`: each client's answer, stacked in the cohort's order."""

    positions: dict[str, str] | None = None  # as in `Update`; None if they are not known


@dataclass
class Cohort:
    """The clients of one round. The verb that an algorithm uses decides what the server sees."""

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
    validate: Callable[[Tree], float | None] = lambda model: None
    """The accuracy (or else the loss) of a model on validation data that the server holds; None if it holds none."""
    calls: int = 0
    reports: list[Report] = field(default_factory=list)
    public: dict[str, Tensor] = field(default_factory=dict)  # numbers that clients made public, by name
    publishers: dict[str, tuple[int, ...]] = field(default_factory=dict)  # the clients they belong to, in order
    notes: dict[str, float] = field(default_factory=dict)  # what the server noted about this round
    left_out: list[int] = field(default_factory=list)  # clients whose answers, or the result with them, were not finite
    outlier_factor: float | None = None  # leave out changes longer than this × the median of a sum; None: never
    outliers: list[int] = field(default_factory=list)  # clients that were left out for that
    max_examples: int | None = None  # no client weighs more than one with this many training examples
    needed: int = 0  # the fewest clients for the round to count
    client_privacy: ClientPrivacy | None = None  # what clients do by themselves, with differential privacy
    protection: Protection | None = None  # what stands between the clients' answers and the server

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def share(self) -> float:
        """The share of clients in this round. With differential privacy it is the expected one."""
        dp = self.protection.dp if self.protection is not None else None
        return len(self.ids) / self.population if dp is None else dp.share

    def key(self, purpose: str, *parts: int) -> int:
        """Return a key for the server's own random choices in this round."""
        return keys.key(self.seed, purpose, self.round, *parts)

    def note(self, **numbers: float) -> None:
        """Keep numbers about this round with its record."""
        self.notes.update(numbers)

    def reduce(
        self, fn: ClientMethod, shared: Groups, *, rule: Rule | None = None, each: Groups | None = None
    ) -> Aggregate:
        """Every client runs `fn`; the server sees only the weighted mean of each group.

        With a robust rule the server sees each answer, and `combine` replaces the mean.
        """
        if self.protection is not None:
            return self._protected(self.protection, fn, shared, rule, each)
        if rule is not None:
            return self.combine(self.map(fn, shared, each=each), shared, rule)
        outcome = self._ask(fn, shared, "sum", each=each)
        return Aggregate(*means_of(outcome), outcome.public)

    def map(self, fn: ClientMethod, shared: Groups, *, each: Groups | None = None) -> Answers:
        """Every client runs `fn`; the server sees each answer."""
        self._refuse_each("map")
        return _answers(self._ask(fn, shared, "stack", each=each))

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
        self._refuse_each("exchange")
        return _answers(self._ask(fn, shared or {}, "stack", each=each, peers=trees, graph=graph.bool()))

    def _refuse_each(self, verb: str) -> None:
        if self.protection is not None:
            raise InputError(f"[privacy] lets the server see only sums, and '{verb}' shows it each client's answer.")

    def _protected(
        self, protection: Protection, fn: ClientMethod, shared: Groups, rule: Rule | None, each: Groups | None
    ) -> Aggregate:
        """Every client runs `fn` and guards its answer; the server sees what the protection releases."""
        if rule is not None:
            self._refuse_each("a robust rule")
        where = RoundOfClients(self.round, self.calls, self.ids, self.population, self.seed)
        guard = protection.guard(self.algorithm, len(self.ids))
        keep: Keep = "secure" if protection.table.secure_aggregation is not None else "sum"
        if self.calls and protection.dp is not None:
            raise InputError(
                f"[privacy] dp plans one release a round, and {type(self.algorithm).__name__} asks clients more often."
            )
        if self.ids or protection.dp is None or keep == "secure":
            outcome = self._ask(fn, shared, keep, each=each, guard=guard)
        else:  # an empty cohort releases noise: a client that is not in it shows the form of a sum
            outcome = self.backend.run(self._work(fn, shared, keep, (0,), guard=guard))
            outcome = replace(outcome, sums={node: zeros_like(part) for node, part in outcome.sums.items()})
        if outcome.public:
            raise InputError(f"[privacy] lets no number of a single client leave, and {fn.__name__} makes some public.")
        if keep == "secure" and outcome.total is None:
            outcome, found = protection.secure_sum(where, outcome, shared, guard)
            self.own.undo([client for client in self.ids if client not in found.clients])
            self.note(lost=len(self.ids) - len(found.clients), refused=len(found.refused))
            self.ids = found.clients
        if protection.dp is not None:
            total = sums_of(outcome)[0] if outcome.total is None else outcome.total
            groups, weights = protection.release(where, total, outcome.positions or {}, shared, self.task)
        elif outcome.total is not None:
            bases = guard.bases(outcome.positions or {}, outcome.total, shared)
            groups, weights = means_of_sums(outcome.total, outcome.weights, bases, outcome.dtypes), outcome.weights
        else:
            groups, weights = means_of(outcome)
        self.note(**protection.notes())
        return Aggregate(groups, weights, {})

    def combine(self, answers: Answers, shared: Groups, rule: Rule, *, judge_all: bool = False) -> Aggregate:
        """Let a robust rule judge what each client changed, group by group (see `robust.judge`).

        Clients with answers that are not finite leave the round first, as clients that a network loses do. They keep
        what they had before the round, and the rule counts them as wrong. A client without weight in a group is not
        judged in it, unless `judge_all` is true.
        """
        if answers.positions is None:
            raise TrainingError(
                f"Round {self.round}: a robust rule needs to know which groups of an update are positions, and the "
                "backend could not find that out (its log says why)."
            )
        bases = {group: select(shared[base], answers[group]) for group, base in answers.positions.items()}
        changes = {g: change(stacked, bases[g]) if g in bases else stacked for g, stacked in answers.groups.items()}
        gone, sound = len(self.left_out), self._keep_finite(changes, answers.weights)
        found = {
            group: judge(rule, stacked, answers.weights[group], sound, gone, bases.get(group), judge_all)
            for group, stacked in changes.items()
        }
        weights = {group: weight[sound].sum() for group, weight in answers.weights.items()}
        return Aggregate(found, weights, answers.public)

    def _keep_finite(self, groups: Groups, weights: dict[str, Tensor]) -> Tensor:
        """Continue the round without the clients whose answers are not finite; return which ones stay."""
        each = [finite(stacked) for stacked in groups.values() if stacked]
        sound = torch.stack([*each, *(weight.isfinite() for weight in weights.values())]).all(0)
        gone = [client for client, good in zip(self.ids, sound.tolist(), strict=True) if not good]
        if gone:
            self.left_out += gone
            self.note(not_finite=len(self.left_out))
            self.own.undo(gone)
            self.ids = tuple(client for client in self.ids if client not in gone)
        return sound

    def _work(self, fn: ClientMethod, shared: Groups, keep: Keep, ids: tuple[int, ...], **messages: Any) -> ClientWork:
        """Return the work that has clients run `fn`."""
        if getattr(fn, "__func__", None) is not getattr(type(self.algorithm), fn.__name__, None):
            raise InputError(
                "A verb takes a method of the algorithm, such as self.client, because clients look it up by its name. "
                f"Got {fn!r} instead."
            )
        return ClientWork(
            self.algorithm,
            fn.__name__,
            shared,
            ids,
            self.own.gather(ids),
            self.seed,
            self.round,
            self.calls,
            keep,
            measure=self.measure,
            universal=self.universal,
            watch_epochs=self.watch_epochs,
            report_lengths=keep == "sum" and self.protection is None,
            client_privacy=self.client_privacy,
            max_examples=self.max_examples,
            **messages,
        )

    def _ask(self, fn: ClientMethod, shared: Groups, keep: Keep, **messages: Any) -> Outcome:
        """Have the backend run `fn` on every client, and remember what it reports."""
        work = self._work(fn, shared, keep, self.ids, **messages)
        self.calls += 1
        outcome = self._without_outliers(work, self.backend.run(work))
        # a network may lose clients: the round continues with those that answered
        self.ids = tuple(report.client for report in outcome.reports)
        self.own.put(self.ids, outcome.own)
        self.reports.extend(outcome.reports)
        self.public.update(outcome.public)
        self.publishers.update(dict.fromkeys(outcome.public, self.ids))
        return outcome

    def _without_outliers(self, work: ClientWork, outcome: Outcome) -> Outcome:
        """Return the outcome without clients whose changes are far longer than the others'.

        A sum cannot be taken apart, so the others compute again. A network's backend keeps all answers and judges them
        itself: it says in `outliers` which clients it left out, and its reports have no lengths.
        """
        if outcome.left_out:
            self.left_out += outcome.left_out
            self.note(not_finite=len(self.left_out))
        found = list(outcome.outliers)
        judged = [report for report in outcome.reports if report.finite and report.lengths]
        if self.outlier_factor is not None:
            examples = [report.examples for report in judged]
            far = outliers([report.lengths for report in judged], examples, self.outlier_factor)
            found += [judged[position].client for position in far]
            if far:
                left = [n for n, client in enumerate(work.ids) if client not in found]
                outcome = self.backend.run(work.only(left)) if left else Outcome()
        if found:
            self.outliers += found
            self.note(outliers=len(self.outliers))
            if len(outcome.reports) < max(self.needed, 1):
                raise RoundAbandoned(f"Round {self.round} has {len(outcome.reports)} clients of {self.needed}.")
        return outcome


def _answers(outcome: Outcome) -> Answers:
    return Answers(outcome.stack, outcome.weights, outcome.public, outcome.positions)
