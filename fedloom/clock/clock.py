"""The virtual clock of a cell: when a round begins and ends, and which clients answer in time."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom import keys
from fedloom.clock.availability import Ids, Times
from fedloom.clock.fleet import Fleet
from fedloom.data.federation import Federation
from fedloom.errors import InputError, QuorumError, RoundAbandoned
from fedloom.federation.sampling import Sampling, widened
from fedloom.privacy.secure.client import STAGES
from fedloom.record import seconds
from fedloom.training.settings import Training
from fedloom.tree import Tree

if TYPE_CHECKING:
    from fedloom.algorithm import Algorithm
    from fedloom.backends.protocol import Backend
    from fedloom.federation.work import ClientWork

GROUP = "clock"  # of the state: what the clock remembers
NOW, SENT = "now", "sent by "  # the names of its leaves
Status = Literal["counted", "late", "surplus", "vanished", "left"]
Statuses = NDArray[np.object_]


@dataclass(frozen=True)
class ClientTime:
    """What a client that was asked did, in virtual seconds since the run began."""

    client: int
    status: Status  # "surplus": enough others were faster; "left": it was no longer available
    began: float
    ended: float
    computing: float  # how long of that it would compute
    version: int  # the round in which it was asked


@dataclass(frozen=True)
class RoundTime:
    """When a round began and ended, in virtual seconds since the run began, and what clients did."""

    began: float
    ended: float
    available: int  # clients that could be asked when it began
    clients: tuple[ClientTime, ...]


@dataclass
class Clock:
    """Virtual time in one cell. It knows how long clients take before they compute, and decides which ones answer."""

    fleet: Fleet
    federation: Federation
    algorithm: Algorithm
    sampling: Sampling
    seed: int
    now: float = 0.0
    sent: dict[str, int] = field(default_factory=dict)  # the bytes of a client's answer, by client method
    _round: RoundTime = RoundTime(0.0, 0.0, 0, ())

    def __post_init__(self) -> None:
        if len(self.fleet) != self.federation.clients:
            raise InputError(f"The fleet has {len(self.fleet)} machines for {self.federation.clients} clients.")
        if self.algorithm.train.patience is not None:
            raise InputError(
                "[system] needs to know how many steps a client takes before it takes them, and [train] patience ends "
                "training at any time. Leave out one of the two."
            )
        self.everyone: Ids = np.arange(len(self.fleet))
        self._wide = widened(self.sampling)
        self._wait = seconds(self.sampling.deadline)
        self._steps: dict[str, Times] = {}

    @property
    def state(self) -> Tree:
        """What a run must remember to continue."""
        numbers = {NOW: self.now, **{f"{SENT}{method}": size for method, size in self.sent.items()}}
        return {name: torch.tensor(number, dtype=torch.float64) for name, number in numbers.items()}

    def restore(self, state: Tree) -> None:
        """Continue from what `state` returned."""
        self.now = float(state[NOW])
        self.sent = {name.removeprefix(SENT): int(size) for name, size in state.items() if name.startswith(SENT)}

    def begin(self, round: int) -> tuple[int, ...]:
        """Begin a round: wait until somebody is available, and draw among the clients that are.

        If nobody is before the deadline, or too few are drawn, the round lasts until the deadline and does not count.
        """
        began, windows = self.now, self.fleet.windows
        self._round = RoundTime(began, began, 0, ())
        moment = windows.next(began)
        if math.isinf(moment):
            raise QuorumError(
                f"Round {round} begins after {began:,.0f} virtual seconds, and by the file of [system] availability "
                "nobody is available from then on. Add times to it, or set 'repeat' to start again at its beginning."
            )
        ids: tuple[int, ...] = ()
        if moment <= began + self._wait:
            self.now = moment
            available = windows.until(self.everyone, moment) > moment
            self._round = replace(self._round, available=int(available.sum()))
            ids = self._wide.draw(len(self.fleet), round, self.seed, lambda some: available[some])
        if not self.found_clients or len(ids) < self.sampling.needed(len(self.fleet)):
            self.now = began + self._wait
        return ids

    @property
    def found_clients(self) -> bool:
        """Whether somebody was available when the round began."""
        return self._round.available > 0

    def end(self) -> RoundTime:
        """End a round."""
        return replace(self._round, ended=self.now)

    def answering(self, work: ClientWork, backend: Backend, needed: int) -> ClientWork:
        """Return the work of the clients that answer in time, and let the time pass until the last answer that counts.

        Raise `RoundAbandoned` if they are too few.
        """
        ids, began, due = np.array(work.ids, dtype=np.int64), self.now, self.now + self._wait
        taken, computing = self.seconds(work, backend)
        ends = began + taken
        lost, status = self.losses(ids, work.round, work.call, began, taken)
        in_time = np.isinf(lost) & (ends <= due)
        status[np.minimum(ends, lost) > due] = "late"  # nobody waits to see whether they would have been lost
        order = np.lexsort((ids, ends))
        counted = order[in_time[order]]
        enough = self.sampling.enough(len(self.fleet), work.round)
        if enough is not None and len(counted) >= enough:
            status[counted[enough:]] = "surplus"
            counted = counted[:enough]
            self.now = float(ends[counted].max())
        else:
            # lost clients are noticed, as on a network, unless too few others answer: then they could come back
            waits_until_due = (status == "late").any() or len(counted) < max(needed, 1)
            self.now = due if waits_until_due else float(np.minimum(ends, lost).max())
        ended = np.minimum(np.minimum(ends, lost), self.now)
        self._remember(work, status, began, ended, computing)
        if len(counted) < needed:
            raise RoundAbandoned(f"Round {work.round} had {len(counted)} answers in time of {needed} needed.")
        return work if len(counted) == len(ids) else work.only(sorted(counted.tolist()))

    def seconds(self, work: ClientWork, backend: Backend) -> tuple[Times, Times]:
        """Return how long each client takes for a work, and how long of that it computes."""
        if work.method not in self.sent:  # one client shows how large an answer is
            alone = replace(work.only([0]), measure=(), universal=False, watch_epochs=False, report_lengths=False)
            (report,) = backend.run(alone).reports
            self.sent[work.method] = report.bytes_up
        alike = work.each is None and work.graph is None
        received = np.array([work.received(position) for position in range(1 if alike else len(work.ids))], np.float64)
        ids = np.array(work.ids, dtype=np.int64)
        exchanges = len(STAGES) if work.keep == "secure" else 1
        return self.fleet.seconds(ids, received, self.steps(work.method)[ids], self.sent[work.method], exchanges)

    def steps(self, method: str) -> Times:
        """Return how many steps each client takes when it runs a method of the algorithm."""
        if method not in self._steps:
            train = self.algorithm.train
            factor = self.algorithm.passes(method) / train.epochs
            counts = self.federation.sizes("train")
            found = steps(train, counts, factor)
            for own in train.clients or ():
                client = next(one for one in range(len(counts)) if self.federation.name(one) == own.name)
                found[client] = steps(train.of(own.name), counts[client : client + 1], factor)[0]
            self._steps[method] = found
        return self._steps[method]

    def losses(self, ids: Ids, round: int, call: int, began: float, taken: Times) -> tuple[Times, Statuses]:
        """Return when each client is lost, ∞ if it is not, and how: it vanishes, or it is no longer available."""
        share = self.fleet.vanish(ids, keys.key(self.seed, "vanish", round, call))
        vanishes = np.isfinite(share)
        lost = np.where(vanishes, began + np.where(vanishes, share, 0.0) * taken, math.inf)
        left = self.fleet.windows.until(ids, began)
        leaves = (left < began + taken) & (left < lost)
        status = np.where(leaves, "left", np.where(vanishes, "vanished", "counted")).astype(object)
        return np.where(leaves, left, lost), status

    def _remember(self, work: ClientWork, status: Statuses, began: float, ended: Times, computing: Times) -> None:
        """Note what clients did; a client that is asked several times in a round has one entry."""
        known = {one.client: one for one in self._round.clients}
        for client, what, end, busy in zip(work.ids, status, ended.tolist(), computing.tolist(), strict=True):
            before = known.get(client, ClientTime(client, what, began, end, 0.0, work.round))
            known[client] = replace(before, status=what, ended=end, computing=before.computing + busy)
        self._round = replace(self._round, clients=tuple(known[client] for client in sorted(known)))


def steps(train: Training, counts: Ids, factor: float = 1.0) -> Times:
    """Return how many steps clients with these numbers of training examples take in a round.

    >>> steps(Training(batch_size=10, epochs=2.0), np.array([9, 10, 25])).tolist()
    [2.0, 2.0, 6.0]
    """
    if train.batch_size == "full":
        batches = np.ones(len(counts))
    elif train.drop_last:
        batches = np.maximum(counts // train.batch_size, 1.0)
    else:
        batches = np.ceil(counts / train.batch_size)
    least = 1.0 if factor else 0.0
    return np.maximum(np.rint(factor * train.epochs * batches), least)
