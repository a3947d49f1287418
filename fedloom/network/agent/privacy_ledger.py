"""What this site's clients have spent of their privacy, in each run and in all of them. No coordinator can change it.

`privacy/RUN/CLIENT/KIND` in the agent's folder holds a secret and a ledger. An answer is charged before it is computed,
so that nothing leaves that was not paid for.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from fedloom.experiment.plan import Plan
from fedloom.network.agent.policy import Policy, Refused
from fedloom.privacy.dp import accounting, distributed, noise
from fedloom.privacy.dp.accounting import Mechanism
from fedloom.privacy.dp.at_client import ClientPrivacy, LocalNoise
from fedloom.privacy.dp.distributed import NoiseShare
from fedloom.privacy.dp.example_level import ExamplePrivacy
from fedloom.privacy.dp.ledger import LEDGER, Ledger


@dataclass(frozen=True)
class SitePrivacy:
    """The ledgers of one run at a site, and what other runs spent there."""

    folder: Path
    run: str
    plan: Plan
    policy: Policy
    experiment: str = ""  # the fingerprint of everything that the coordinator announced
    charged: set[str] = field(default_factory=set)  # clients whose examples the present call was charged for

    @property
    def is_on(self) -> bool:
        """Whether clients here protect what they send by themselves."""
        privacy = self.plan.privacy
        return privacy.example_dp is not None or privacy.has_local_noise or privacy.has_distributed_noise

    def of_client(self, client: str, cell: str, data: str = "") -> ClientPrivacy | None:
        """Return what a client does by itself in one cell, or None if the run does not ask for that.

        `data` is the fingerprint of the site's data. Another experiment or other data is another question: its answer
        has other noise, and is charged again.
        """
        table, examples, local = self.plan.privacy, None, None
        cell = f"{cell}, experiment {self.experiment}, data {data}"
        self.charged.discard(client)
        if table.example_dp is not None:
            spending = self._ledger(client, "examples", table.example_dp.delta)
            # a name of its own: the function below would otherwise charge the other ledger
            charge_steps = partial(self._charge, spending, client, table.example_dp.epsilon, cell)

            def charge_examples(name: str, mechanism: Mechanism, count: int) -> None:
                charge_steps(name, mechanism, count)
                self.charged.add(client)

            examples = ExamplePrivacy(table.example_dp, _planned(spending), _secret(spending, cell), charge_examples)
        if table.has_local_noise and table.dp is not None:
            spending = self._ledger(client, "local", table.dp.delta)
            charge = partial(self._charge, spending, client, table.dp.epsilon, cell)
            local = LocalNoise(table.dp, _planned(spending), _secret(spending, cell), charge)
        return ClientPrivacy(examples, local) if examples or local else None

    def check_charged(self, client: str) -> None:
        """Raise `Refused` if an answer was made without the noise that the run promises."""
        if self.plan.privacy.example_dp is not None and client not in self.charged:
            raise Refused(
                f"the run announced differential privacy of examples, and this answer of '{client}' has no noise: its "
                "algorithm does not train"
            )

    def charge_share(self, client: str, cell: str, share: NoiseShare, session: str) -> None:
        """Charge a masked answer before it is made: once it has left, others can unmask its sum.

        Each session is charged. A coordinator that repeats one with other clients gets another noisy sum, and this
        agent does not see which of the two were unmasked.
        """
        table = self.plan.privacy.dp
        assert table is not None
        ledger = self._ledger(client, "distributed", table.delta)
        # the ε that a run announces is that of one cell, without repetitions
        self._charge(ledger, client, None, cell, f"session {session}", share.mechanism, 1)

    def _ledger(self, client: str, kind: str, delta: float) -> Ledger:
        name = hashlib.sha256(client.encode()).hexdigest()[:16]  # a client's name may not be a name of a folder
        # every cell of the run uses the same examples
        rounds = self.plan.rounds * len(self.plan.algorithms) * len(self.plan.seeds)
        return Ledger(self.folder / self.run / name / kind, delta, lambda: {"planned_rounds": rounds, "client": client})

    def _charge(
        self, ledger: Ledger, client: str, planned: float | None, cell: str, name: str, mechanism: Mechanism, count: int
    ) -> None:
        """Charge an answer before it is computed, or refuse it."""
        release = f"{cell}, {name}"
        if release in ledger.charged:
            return
        limits = {"the run announced": planned, "the policy's max_epsilon is": self.policy.max_epsilon}
        spent = ledger.epsilon({mechanism: count}).value
        for whose, limit in limits.items():
            if limit is not None and spent > limit:
                raise Refused(
                    f"another answer of '{client}' would cost ε = {spent:.4g} in this run, and {whose} {limit:g}"
                )
        if self.policy.max_total_epsilon is not None:
            total = self.total(client, ledger, {mechanism: count})
            if total > self.policy.max_total_epsilon:
                raise Refused(
                    f"another answer of '{client}' would cost ε = {total:.4g} in all runs, and the policy's "
                    f"max_total_epsilon is {self.policy.max_total_epsilon:g}"
                )
        ledger.charge(release, mechanism, count)

    def total(self, client: str, ledger: Ledger, more: dict[Mechanism, int]) -> float:
        """Return the ε that a client spent in all runs, with some more. All kinds of noise hide single examples.

        Another example can turn a change around. So noise for changes that zeros replace counts as half as large.
        """
        assert ledger.folder is not None
        spent: Counter[Mechanism] = Counter(more)
        for file in sorted(self.folder.glob(f"*/{ledger.folder.parent.name}/*/{LEDGER}")):
            spent += Ledger(file.parent, ledger.delta, dict).spent
        of_examples: Counter[Mechanism] = Counter()
        for kind, count in spent.items():
            z = kind.noise_multiplier / 2 if kind.discrete else kind.noise_multiplier
            of_examples[replace(kind, noise_multiplier=z)] += count
        return accounting.epsilon(of_examples, self.policy.max_delta).value


def check_cells(plan: Plan, policy: Policy) -> None:
    """Raise `Refused` if noise that clients add together is enough for each cell of a run, but not for all of them."""
    dp, cells = plan.privacy.dp, len(plan.algorithms) * len(plan.seeds)
    if policy.max_epsilon is None or dp is None or dp.epsilon is None or not plan.privacy.has_distributed_noise:
        return
    mechanism = Mechanism(distributed.multiplier(dp, plan.rounds), discrete=True)
    spent = accounting.epsilon({mechanism: cells * plan.rounds}, dp.delta).value
    if dp.noise_multiplier is None and spent > policy.max_epsilon:
        raise Refused(
            f"the {cells} cells of this run (algorithms × seeds) cost ε = {spent:.4g} together, and the policy's "
            f"max_epsilon is {policy.max_epsilon:g}"
        )


def _planned(ledger: Ledger) -> int:
    return int(ledger.header["planned_rounds"])


def _secret(ledger: Ledger, cell: str) -> bytes:
    """Return a secret for one cell: two cells may begin alike, and must not share noise."""
    return noise.derive(ledger.secret, cell)
