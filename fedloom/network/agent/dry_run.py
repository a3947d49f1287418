"""`fedloom join --dry-run`: show what would leave this site, without connecting anywhere."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.algorithm import Algorithm
from fedloom.backends.protocol import Backend
from fedloom.data.agreement import read_agreed
from fedloom.data.federation import Federation
from fedloom.data.plausibility import suspicions
from fedloom.errors import InputError
from fedloom.experiment import experiment_file
from fedloom.experiment.plan import Plan
from fedloom.federation.client_state import ClientStates
from fedloom.federation.cohort import Cohort
from fedloom.federation.work import ClientWork, Place, Work
from fedloom.machine import computing
from fedloom.network.agent.disclosure import hello_message
from fedloom.network.agent.loaded_experiment import admitted, check_shape
from fedloom.network.agent.policy import SCORES_LEAVE, Policy, Refused, Site, trust
from fedloom.network.agent.privacy_ledger import SPENDING, SitePrivacy, check_cells
from fedloom.network.agent.questions import Questions, check_limit
from fedloom.network.protocol.expected_update import ExpectedUpdate, expected_update, harmless, tried
from fedloom.network.protocol.messages import DataFormat, verb_of
from fedloom.privacy.table import PrivacyTable
from fedloom.privacy.words import doubts, of_people, scaled_by_examples
from fedloom.task import Task
from fedloom.training.probe import probe

NOT_BOUND = "This does not limit an algorithm's weights and public numbers: they may be scores of any metric."


def dry_run(site: Site, experiment: Path | None, state: Path) -> Iterator[str]:
    """Yield lines for people: what the agent says at the start, what the policy allows, what an update holds.

    An experiment that this site would refuse is an error. `state` is the agent's folder, which is only read.
    """
    policy = site.policy
    yield f"Site {site.name}. This dry run connects nowhere and sends nothing."
    try:
        announced = {} if experiment is None else experiment_file.read_toml(experiment)
        parsed = admitted(announced, site) if announced else experiment_file.parse({"data": site.data}, site.base)
    except Refused as why:
        raise InputError(f"This site would refuse the experiment: {why}.") from None
    plan = Plan.of(parsed, at_site=True)
    federation = plan.federation(parsed.seeds[0])
    agreed = announced.get("data", {}).get("preprocessing")
    if experiment is not None and agreed is not None:
        _check_agreed(experiment.parent / agreed, federation, site)
    yield f"Data: {federation}. No message asks for examples. What leaves is computed from them, as listed here."
    fewest = int(federation.sizes("train").min())
    several = of_people(parsed.privacy, site.data.get("group"), federation.largest_group)
    for doubt in (
        *doubts(parsed.privacy, examples=fewest, at_least=policy.min_cohort),
        *scaled_by_examples(parsed.privacy, federation.scaled_by),
        *several,
        *suspicions(federation, at_site=True),
    ):
        yield f"Caution: {doubt}"
    yield "At the start, the coordinator learns:"
    yield f"  the shape {list(federation.x.shape[1:])} and dtype of the features, the names of the classes"
    yield "  for a table, a hash of its columns and categories and of the statistics that scale them"
    sizes = {split: federation.sizes(split) for split in ("train", "validation", "test")}
    is_secure = parsed.privacy.secure_aggregation is not None
    for number in site.hosted(federation.clients)[:20]:
        counts = ", ".join(f"{policy.shown_size(int(sizes[split][number]))} {split}" for split in sizes)
        yield f"  client {federation.name(number)}" + (" (not its number of examples)" if is_secure else f": {counts}")
    yield "  versions of fedloom, torch and Python, and a mark that shows whether the data changed, but not what it is"
    yield "  the operating system, the kind of processor, and how the agent computes"
    yield "  the site's name, public key and network address, fewest clients in a sum, and what the policy withholds"
    verbs, fewest = ", ".join(policy.verbs), policy.min_cohort
    yield f"Allowed verbs: {verbs}, in rounds of at least {fewest} client(s), as the coordinator counts them."
    yield _metrics_line(parsed.privacy, policy)
    if policy.example_scores and experiment is None:
        yield f"If an experiment has such a metric that is no mean over examples: {SCORES_LEAVE}"
    yield trust(parsed.privacy, policy, len(parsed.algorithm))
    if experiment is None:
        yield "What an update holds depends on the experiment: add --experiment FILE to see it."
        return
    if policy.max_total_epsilon is not None:
        yield f"What was spent is read from {state}. A run of this file that has begun counts as another run here."
    try:
        policy.check_examples({federation.name(c): int(sizes["train"][c]) for c in range(federation.clients)})
        check_limit(plan, policy.max_evaluations)
        check_cells(plan, policy)
        privacy = SitePrivacy(state / SPENDING, "a dry run", plan, policy)  # no run is called that
        yield from privacy.check_total(site.hosted(federation.clients))
    except Refused as why:
        raise InputError(f"This site would refuse to take part: {why}.") from None
    if not parsed.privacy.hides_metrics:
        most = Questions("", plan, policy.max_evaluations).most
        yield f"Each client is measured at most {most} times in the run, on one split each."
    task = plan.task(parsed.seeds[0])
    yield from policy.metric_lines(task) if not parsed.privacy.hides_metrics else ()
    setup = probe(federation, task).setup(group=1)
    hello_message(site, federation, setup, "")  # raises if the site's table does not fit its data
    if (up := parsed.compress.up) is not None:
        yield f"Changes of the model are compressed with {up.name} before they leave. This hides nothing."
    for label, algorithm in parsed.algorithm.items():
        if not algorithm.pooled:
            attempt = partial(first_round, algorithm, task)
            answers = tried(attempt, label, algorithm, task, DataFormat.of(federation), setup)
            for verb, method, update in answers:
                allowed = "" if verb in policy.verbs else "  (REFUSED by the policy)"
                yield f"{label}: {verb} {method}{allowed}"
                yield from _lines(update)


def _check_agreed(path: Path, federation: Federation, site: Site) -> None:
    """Raise if this site's rows have another shape than those of the run, as the file beside the experiment says."""
    if not path.is_file():  # only the experiment was copied to this site
        return
    try:
        check_shape(federation.x.shape[1:], read_agreed(path).shape, site)
    except Refused as why:
        raise InputError(f"This site would refuse to take part: {why}.") from None


def _metrics_line(privacy: PrivacyTable, policy: Policy) -> str:
    if privacy.secure_aggregation is not None:
        return "Metrics that may leave: none, because the run has secure aggregation."
    if policy.limits_epsilon or privacy.hides_metrics:
        return f"Metrics that may leave: none, because no noise covers them. {NOT_BOUND}"
    means = "means over examples, such as loss and accuracy"
    allowed = means if policy.metrics == "means" else ", ".join(policy.metrics)
    return f"Metrics that may leave, each as one number per client and split: {allowed or 'none'}. {NOT_BOUND}"


def _lines(update: ExpectedUpdate) -> Iterator[str]:
    for group, leaves in update.groups.items():
        count = sum(math.prod(shape) for shape, _ in leaves.values())
        yield f"  {group}: {count:,} numbers in {len(leaves)} tensors, and its weight"
    for name, (shape, _) in update.public.items():
        yield f"  {name}: {math.prod(shape)} public number(s)"
    yield f"  {update.bytes:,} bytes a round"


@dataclass
class _RecordingBackend(Backend):
    """A backend that performs work and records what clients would send."""

    place: Place
    own: Any
    safe: bool
    seen: list[tuple[str, str, ExpectedUpdate]] = field(default_factory=list)

    def run(self, work: Work) -> Any:
        if isinstance(work, ClientWork):
            work = harmless(work, self.place.task) if self.safe else work
            self.seen.append((verb_of(work), work.method, expected_update(work, self.own, self.place)))
        with computing():
            return work.merge([work.perform(self.place)])


def first_round(
    algorithm: Algorithm, task: Task, place: Place, safe: bool = False
) -> list[tuple[str, str, ExpectedUpdate]]:
    """Run one round on made-up examples; return verb, method and form of every answer that clients give.

    If it must be `safe`, the clients' work is `harmless`.
    """
    initial = task.initial()
    own = algorithm.init_own(task, initial)
    data = place.federation
    two: Federation = replace(data, offsets=np.array([0, len(data.y) // 2, len(data.y)]), names=None)
    backend = _RecordingBackend(replace(place, federation=two), own, safe)
    cohort = Cohort(backend, algorithm, task, (0, 1), 2, 1, 0, ClientStates(own))
    algorithm.round(algorithm.init(task, initial), cohort)
    return backend.seen
