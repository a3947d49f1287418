"""The clients of one round, behind the three verbs that mark the trust boundary: reduce, map, exchange."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fedloom import keys
from fedloom.compression.downlink import Downlink, rebased
from fedloom.compression.table import NO_COMPRESSION, CompressTable
from fedloom.data.split import SplitName
from fedloom.errors import InputError
from fedloom.federation.client_state import ClientStates
from fedloom.federation.left_out import without_outliers
from fedloom.federation.protected import protected_means
from fedloom.federation.robust_means import robust_means
from fedloom.federation.work import ClientWork, Keep, Outcome, Report, means_of
from fedloom.privacy.protection import Protection
from fedloom.task import Task
from fedloom.tree import Groups, Tree

if TYPE_CHECKING:
    from fedloom.algorithm import Algorithm, Update
    from fedloom.backends.protocol import Backend
    from fedloom.compression.method import Method
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
    """The clients of one round. The verb that an algorithm uses decides what the server sees.

    What an algorithm needs of it:

    - `reduce(fn, shared)`, `map(fn, shared)` and `exchange(fn, trees, graph)` have every client run a method;
    - `round`: the number of the round, from 1 on;
    - `ids` and `len(cohort)`: the clients of the round; `population`: how many clients there are; `share`: the share of
      them in this round;
    - `task`: the model, the loss and the metrics;
    - `key(purpose)`: a seed for the server's own random numbers;
    - `note(name=number)`: keeps numbers with the record of the round;
    - `validate(model)`: the accuracy (or else the loss) on the server's validation data, or None.

    fedloom makes cohorts; the other fields are its own and may change.
    """

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
    freshness: float = 1.0  # the mean of s(τ) over the answers of an asynchronous round; otherwise 1
    needed: int = 0  # the fewest clients for the round to count
    client_privacy: ClientPrivacy | None = None  # what clients do by themselves, with differential privacy
    protection: Protection | None = None  # what stands between the clients' answers and the server
    compress: CompressTable = NO_COMPRESSION  # how messages are made smaller
    name: Callable[[int], str] = str  # of a client, for messages

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def share(self) -> float:
        """The share of clients in this round. With differential privacy it is the expected one."""
        dp = self.protection.dp if self.protection is not None else None
        return len(self.ids) / self.population if dp is None else dp.share

    def key(self, purpose: str, *parts: int) -> int:
        """Return a key for the server's own random choices in this round, as another run of this seed makes them.

        For example, `torch.Generator().manual_seed(cohort.key("noise"))` is a generator that can be repeated.
        """
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
            return Aggregate(*protected_means(self, self.protection, fn, shared, rule, each), {})
        if rule is not None:
            return self.combine(_answers(self._ask(fn, shared, "stack", each=each, compress=self.up)), shared, rule)
        outcome = self._ask(fn, shared, "sum", each=each, compress=self.up)
        return Aggregate(*self.means(outcome, shared), outcome.public)

    def means(self, outcome: Outcome, shared: Groups) -> tuple[Groups, dict[str, Tensor]]:
        """Return the means of all groups and the sums of weights, of clients that the server sent `shared`."""
        groups, weights = means_of(outcome)
        return self.rebased(groups, outcome.positions, shared), weights

    @property
    def up(self) -> Method | None:
        """How the answers to `reduce` are compressed. Other verbs' answers may be no changes of the model."""
        return None if self.algorithm.pooled else self.compress.up

    def received(self, shared: Groups) -> tuple[Groups, int | None]:
        """Return what clients receive if the server sends this, and the bytes if they are other than its own."""
        link = Downlink.of(self.compress, self.algorithm, self.task)
        return (shared, None) if link is None else link.received(shared)

    def rebased(self, groups: Groups, positions: Mapping[str, str] | None, shared: Groups) -> Groups:
        """Return answers as if clients had started from exactly what the server shared."""
        if (down := self.compress.down) is None or down.exact:
            return groups
        return rebased(groups, positions or {}, shared, self.received(shared)[0])

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

    def combine(self, answers: Answers, shared: Groups, rule: Rule, *, judge_all: bool = False) -> Aggregate:
        """Let a robust rule judge what each client changed, group by group (see `robust.judge`).

        Clients with answers that are not finite leave the round first, as clients that a network loses do. They keep
        what they had before the round, and the rule counts them as wrong. A client without weight in a group is not
        judged in it, unless `judge_all` is true.
        """
        groups, weights = robust_means(self, answers, shared, rule, judge_all)
        return Aggregate(groups, weights, answers.public)

    def _work(self, fn: ClientMethod, shared: Groups, keep: Keep, ids: tuple[int, ...], **messages: Any) -> ClientWork:
        """Return the work that has clients run `fn`."""
        shared, shared_bytes = self.received(shared)
        if getattr(fn, "__func__", None) is not getattr(type(self.algorithm), fn.__name__, None):
            raise InputError(
                f"A verb takes a method of the algorithm, such as self.client: clients find it by its name. Got {fn!r}."
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
            shared_bytes=shared_bytes,
            **messages,
        )

    def _reached(self, work: ClientWork) -> ClientWork:
        """Return the work of the clients that answer. In virtual time, some do not."""
        return work

    def _ask(self, fn: ClientMethod, shared: Groups, keep: Keep, **messages: Any) -> Outcome:
        """Have the backend run `fn` on every client, and remember what it reports."""
        work = self._reached(self._work(fn, shared, keep, self.ids, **messages))
        self.calls += 1
        (outcome,) = without_outliers(self, [work], [self.backend.run(work) if work.ids else Outcome()])
        if outcome.stack and keep == "stack":
            outcome = replace(outcome, stack=self.rebased(outcome.stack, outcome.positions, shared))
        # a network may lose clients: the round continues with those that answered
        self.ids = self._keep(outcome)
        self.public.update(outcome.public)
        self.publishers.update(dict.fromkeys(outcome.public, self.ids))
        return outcome

    def _keep(self, outcome: Outcome) -> tuple[int, ...]:
        """Keep what clients reported and what they hold now; return which clients answered."""
        ids = tuple(report.client for report in outcome.reports)
        self.own.put(ids, outcome.own)
        self.reports.extend(outcome.reports)
        return ids


def _answers(outcome: Outcome) -> Answers:
    return Answers(outcome.stack, outcome.weights, outcome.public, outcome.positions)
