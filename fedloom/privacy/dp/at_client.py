"""What clients do by themselves, so that they need not trust the server: noise on their answers, and on their steps.

Each answer is protected before it leaves, so every algorithm and rule that takes answers may use it. In a simulation
one ledger stands for all clients: it charges what a client spends that takes part in every round. An agent keeps its
own (`fedloom/network/agent/privacy_ledger.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fedloom import tree
from fedloom.errors import InputError, PrivacySpent
from fedloom.privacy.dp import accounting, noise
from fedloom.privacy.dp.accounting import Mechanism
from fedloom.privacy.dp.client_level import bounded, with_noise
from fedloom.privacy.dp.example_level import ExamplePrivacy, check_algorithm, per_example_module
from fedloom.privacy.dp.ledger import Ledger
from fedloom.privacy.words import called, one_place

if TYPE_CHECKING:
    from fedloom.algorithm import Algorithm, Update
    from fedloom.privacy.table import DpTable, PrivacyTable
    from fedloom.task import Task
    from fedloom.tree import Groups

Charge = Callable[[str, Mechanism, int], None]


def check_local(algorithm: Algorithm, label: str = "") -> None:
    """Raise `InputError` if an algorithm's clients send something that their own noise does not cover.

    What only a client's answer can tell, as in your own algorithm, `LocalNoise` refuses in the first round.
    """
    who = called(algorithm, label)
    if algorithm.pooled:
        raise InputError(one_place("dp", who))
    if algorithm.models_scored(2):
        raise _publishes(who)
    if algorithm.linear and algorithm.largest_weight(2) != 1:
        raise _shows_weights(who)


def _publishes(who: str) -> InputError:
    return InputError(
        f'[privacy] dp noise = "local" covers the weights that clients send, and {who} also sends scores or other '
        "public numbers about their data, without noise. Use an algorithm without them, such as fedavg or peer with "
        'weights = "uniform".'
    )


def _shows_weights(who: str) -> InputError:
    return InputError(
        f'[privacy] dp noise = "local" needs clients that count the same, and {who} weighs them by their data: a '
        'weight shows something of it. Set weights = "uniform" in the algorithm, if it has that key.'
    )


@dataclass(frozen=True)
class LocalNoise:
    """A client clips its change and adds noise to it. Other data could change what it sends by 2 · clip."""

    table: DpTable
    rounds: int  # the most rounds that a client takes part in
    secret: bytes
    charge: Charge | None = None  # an agent's ledger; a simulation has one for all

    @property
    def mechanism(self) -> Mechanism:
        """What one answer releases."""
        if self.table.noise_multiplier is not None:
            return Mechanism(self.table.noise_multiplier / 2)
        assert self.table.epsilon is not None, "the table has one of the two"
        return Mechanism(accounting.noise_multiplier(self.table.epsilon, self.table.delta, self.rounds))

    def apply(self, update: Update, shared: Groups, task: Task, where: str, names: Sequence[str]) -> Update:
        """Return answers with noise; `where` and the clients' names say what they are for. Everything is stacked."""
        if update.public:
            raise _publishes("this algorithm")
        if any(bool((update.weights(group) != 1).any()) for group in update.groups):
            raise _shows_weights("this algorithm")
        if not any(update.groups.values()):
            return update  # clients send nothing
        clip = float(self.table.clip)
        clipped = bounded(update, shared, task, clip, 1.0, count=False)
        deviation = 2 * clip * self.mechanism.noise_multiplier
        sent = []
        for position, name in enumerate(names):
            mine = {group: tree.row(leaves, position) for group, leaves in clipped.groups.items()}
            digest = tree.sha256_of_groups(mine)
            release = f"{where}, client {name}, change {digest}, deviation {deviation!r}"
            if self.charge is not None:
                self.charge(release, self.mechanism, 1)
            drawn = noise.noise_like(mine, deviation, noise.derive(self.secret, "local", release))
            answer = {}
            for group, change in mine.items():
                base = shared[update.positions[group]] if group in update.positions else None
                answer[group] = with_noise(change, drawn[group], base, update.groups[group], task)
            sent.append(answer)
        return replace(update, groups={group: tree.stack([one[group] for one in sent]) for group in update.groups})


@dataclass(frozen=True)
class ClientPrivacy:
    """What clients do by themselves, as a value that workers and agents have."""

    examples: ExamplePrivacy | None = None
    local: LocalNoise | None = None


class AtClients:
    """The ledgers of a simulated cell for what its clients do by themselves."""

    def __init__(self, table: PrivacyTable, rounds: int, folder: Path | None) -> None:
        self.ledgers: dict[str, Ledger] = {}

        def opened(name: str, delta: float) -> Ledger:
            where = None if folder is None else folder / name
            self.ledgers[name] = Ledger(where, delta, lambda: {"planned_rounds": rounds})
            return self.ledgers[name]

        examples = local = None
        self.planned = rounds
        if table.example_dp is not None:
            ledger = opened("examples", table.example_dp.delta)
            self.planned = int(ledger.header["planned_rounds"])
            examples = ExamplePrivacy(table.example_dp, self.planned, ledger.secret)
        if table.has_local_noise and table.dp is not None:
            ledger = opened("local", table.dp.delta)
            self.planned = int(ledger.header["planned_rounds"])
            local = LocalNoise(table.dp, self.planned, ledger.secret)
        self.privacy = ClientPrivacy(examples, local)

    def check(self, algorithm: Algorithm, task: Task) -> None:
        """Raise `InputError` if clients cannot protect what they send with this algorithm or model."""
        if self.privacy.examples is not None:
            check_algorithm(algorithm)
            per_example_module(task.module)

    def charge(self, round: int, fewest: int, algorithm: Algorithm) -> dict[str, float]:
        """Charge a round before it begins; return numbers for its record.

        For examples, it charges the client with the `fewest` training examples. One with more needs less noise for the
        same ε, which it spends by the last planned round.
        """
        if round > self.planned:
            raise PrivacySpent(
                f"The noise that clients add is for {self.planned} rounds: another would cost more ε than was given."
            )
        found: dict[str, float] = {}
        if self.privacy.examples is not None:
            steps = self.privacy.examples.steps(fewest, algorithm.train)
            self.ledgers["examples"].charge(f"round {round}", steps.mechanism, steps.count)
            found |= self.ledgers["examples"].notes("example_epsilon")
        if self.privacy.local is not None:
            self.ledgers["local"].charge(f"round {round}", self.privacy.local.mechanism)
            found |= self.ledgers["local"].notes("local_epsilon")
        return found
