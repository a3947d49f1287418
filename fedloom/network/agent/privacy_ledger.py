"""What this site's clients have spent of their privacy, in each run and in all of them. No coordinator can change it.

`privacy/RUN/CLIENT/KIND` in the agent's folder holds a secret and a ledger. An answer is charged before it is computed,
so that nothing leaves that was not paid for.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from fedloom.experiment.plan import Plan
from fedloom.network.agent.policy import Policy, Refused
from fedloom.network.protocol.messages import SPENT
from fedloom.privacy.dp import accounting, distributed, noise
from fedloom.privacy.dp.accounting import Mechanism
from fedloom.privacy.dp.at_client import ClientPrivacy, LocalNoise
from fedloom.privacy.dp.distributed import NoiseShare
from fedloom.privacy.dp.example_level import ExamplePrivacy
from fedloom.privacy.dp.ledger import LEDGER, Ledger, spent_in
from fedloom.privacy.table import PrivacyTable

SPENDING = "privacy"  # the folder of the ledgers, in the agent's


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
        header = {"planned_rounds": self.rounds, "client": client}
        return Ledger(self.folder / self.run / _folder(client) / kind, delta, lambda: header)

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
                    f"another answer of '{client}' would cost ε = {spent:.4g} in this run, and {whose} {limit:g}",
                    told="" if limit == planned else SPENT,  # what the run announced is no secret
                )
        if self.policy.max_total_epsilon is not None:
            total = self.total(self.spent(client) + Counter({mechanism: count}))
            if total > self.policy.max_total_epsilon:
                raise Refused(
                    f"another answer of '{client}' would cost ε = {total:.4g} in all runs, and the policy's "
                    f"max_total_epsilon is {self.policy.max_total_epsilon:g}",
                    told=SPENT,
                )
        ledger.charge(release, mechanism, count)

    @property
    def rounds(self) -> int:
        """The rounds of all cells of the run, which use the same examples."""
        return self.plan.rounds * len(self.plan.algorithms) * len(self.plan.seeds)

    def spent(self, client: str, run: str = "*") -> Counter[Mechanism]:
        """Return what a client spent in one run, or in all."""
        files = sorted(self.folder.glob(f"{run}/{_folder(client)}/*/{LEDGER}"))
        return sum(map(spent_in, files), Counter[Mechanism]())

    def planned(self, examples: Mapping[int, int]) -> Counter[Mechanism]:
        """Return what a client spends that answers in every round; it has this many training examples in each seed."""
        table, found = self.plan.privacy, Counter[Mechanism]()
        if table.example_dp is not None:
            privacy = ExamplePrivacy(table.example_dp, self.rounds, b"")
            for algorithm in self.plan.algorithms.values():
                for count in examples.values():
                    steps = privacy.steps(max(count, 1), algorithm.train)
                    found[steps.mechanism] += steps.count * self.plan.rounds
        if table.has_local_noise and table.dp is not None:
            found[LocalNoise(table.dp, self.rounds, b"").mechanism] += self.rounds
        if table.has_distributed_noise and table.dp is not None:
            found[Mechanism(distributed.multiplier(table.dp, self.plan.rounds), discrete=True)] += self.rounds
        return found

    def check_total(self, clients: Collection[int]) -> Iterator[str]:
        """Say what the run takes the ε of all runs to; raise `Refused` if it is too much to end the run.

        What a client has spent in this run is part of what it needs for it. Rounds that begin again are not foreseen.
        """
        allowed, examples = self.policy.max_total_epsilon, self.plan.privacy.example_dp
        if not clients or not self.plan.rounds or (allowed is None and examples is None):
            return
        federations, found = {seed: self.plan.federation(seed) for seed in self.plan.seeds}, []
        sizes = {
            client: {seed: int(one.sizes("train")[client]) for seed, one in federations.items()} for client in clients
        }
        needs = {client: self.planned(examples) for client, examples in sizes.items()}
        self._check_mixture(needs.values())
        if allowed is None:
            return
        for client, planned in needs.items():
            name = federations[self.plan.seeds[0]].name(client)
            spent, here = self.spent(name), self.spent(name, self.run)
            found.append((self.total(spent - here + (here | planned)), name, spent, planned))
        total, name, *others = max(found, key=lambda one: one[0])
        before, needed = map(self.total, others)
        whose = f" of '{name}'" if len(clients) > 1 else ""
        unknown, less = _unknown(self.plan), _less(self.plan.privacy)
        if total > allowed and not unknown:
            raise Refused(
                f"this run would take the ε{whose} of all runs to {total:.4g}, and max_total_epsilon is {allowed:g}: "
                f"{before:.4g} are spent already. Raise it in [policy], or ask the coordinator for {less}",
                told=f"the site's privacy budget has too little left for this run. It needs {less}, or a larger budget",
            )
        yield (
            f"ε{whose}: {before:.4g} spent in all runs, {needed:.4g} needed for all rounds of this run, "
            f"{total:.4g} together, {allowed:g} allowed ([policy] max_total_epsilon)."
        )
        if unknown:
            yield f"How many rounds clients here answer is not known: {unknown}."
        if total > allowed:
            yield "Caution: this agent refuses rounds that would take the ε of all runs beyond what is allowed."

    def _check_mixture(self, needs: Iterable[Counter[Mechanism]]) -> None:
        """Refuse cells whose noise is together too little to end the run: that of each is made as if all were alike."""
        table, dp = self.plan.privacy.example_dp, self.plan.privacy.dp
        if table is None or dp is not None or _unknown(self.plan):  # other noise has a ledger of its own
            return
        for planned in needs:
            if len(planned) > 1 and (spent := accounting.epsilon(planned, table.delta).value) > table.epsilon:
                raise Refused(
                    f"its algorithms or seeds need different noise, and together they cost ε = {spent:.4g}, more "
                    f"than the {table.epsilon:g} that the run announces. Give all algorithms the same batch_size and "
                    "epochs, or serve them as runs of their own"
                )

    def total(self, spent: Counter[Mechanism]) -> float:
        """Return the ε of what was spent, of any kind. All kinds of noise hide single examples.

        Another example can turn a change around. So noise for changes that zeros replace counts as half as large.
        """
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


def _unknown(plan: Plan) -> str:
    """Return why nobody knows how many rounds a client answers, or an empty string if it is all of them."""
    cohort, dp = plan.cohort, plan.privacy.dp
    if cohort.mode == "async":
        return "rounds are asynchronous"
    if cohort.count is not None or cohort.fraction < 1:
        return "[cohort] draws the clients of each round"
    if plan.evaluate.stop == "target":
        return "the run stops at its target"
    stops = dp is not None and dp.epsilon is not None and dp.noise_multiplier is not None
    return "the run stops when the ε of its [privacy] dp is spent" if stops else ""


def _less(table: PrivacyTable) -> str:
    """Return what makes a run cost less. Noise for a given ε is made for all rounds, so fewer cost nearly the same."""
    fixed = table.example_dp is None and table.dp is not None and table.dp.noise_multiplier is not None
    return "fewer rounds or a larger noise_multiplier" if fixed else "a smaller ε"


def _folder(client: str) -> str:
    """Return the folder of a client, whose name may not be a name of a folder."""
    return hashlib.sha256(client.encode()).hexdigest()[:16]


def _planned(ledger: Ledger) -> int:
    return int(ledger.header["planned_rounds"])


def _secret(ledger: Ledger, cell: str) -> bytes:
    """Return a secret for one cell: two cells may begin alike, and must not share noise."""
    return noise.derive(ledger.secret, cell)
