"""`fedloom join --dry-run`: what would leave this site, found without connecting anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fedloom.experiment import experiment_file
from fedloom.experiment.plan import Plan
from fedloom.network.agent.descriptions import describe
from fedloom.network.agent.policy import Refusal, Site
from fedloom.network.coordinator.expected_update import Made, Template
from fedloom.training.probe import probe


def would_leave(site: Site, experiment: Path | None) -> Iterator[str]:
    """Lines for people: what is said at the beginning, what the policy allows, what an update holds."""
    policy = site.policy
    yield f"Site {site.name}. Nothing is connected and nothing is sent."
    values: dict[str, object] = {"data": site.data}
    if experiment is not None:
        described = experiment_file.load(experiment).resolved()
        values = {**described, "data": site.data, "task": {**described["task"], "init": "torch"}}
        try:
            policy.check_offer(values, {})
        except Refusal as why:
            yield f"This site would refuse the experiment: {why}."
            return
    parsed = experiment_file.parse(values, site.base)
    plan = Plan.of(parsed)
    federation = plan.federation(parsed.seeds[0])
    yield f"Data: {federation}. No example, no label and no statistic of a feature leaves."
    yield "At the beginning the coordinator is told:"
    yield f"  the shape {list(federation.x.shape[1:])} and kind of the features, the names of the classes"
    sizes = {split: federation.sizes(split) for split in ("train", "validation", "test")}
    for number in range(min(federation.clients, 20)) if site.table.hosts is None else site.table.hosts[:20]:
        counts = ", ".join(f"{int(sizes[split][number])} {split}" for split in sizes)
        yield f"  client {federation.name(number)}: {counts}"
    yield "  versions of fedloom, torch and Python, and a mark that shows whether the data changed, but not what it is"
    yield f"Verbs that are answered: {', '.join(policy.verbs)}; in rounds of at least {policy.min_cohort} client(s)."
    metrics = (
        "means over examples, such as loss and accuracy" if policy.metrics == "means" else ", ".join(policy.metrics)
    )
    yield f"Metrics that may leave: {metrics or 'none'}."
    if experiment is None:
        yield "What an update holds depends on the experiment: add --experiment FILE to see it."
        return
    try:
        policy.check_examples({federation.name(c): int(sizes["train"][c]) for c in range(federation.clients)})
    except Refusal as why:
        yield f"This site would refuse to take part: {why}."
        return
    task = plan.task(parsed.seeds[0])
    setup = probe(federation, task).setup(group=1)
    describe(site, federation, setup, "")
    place = Made(
        tuple(federation.x.shape[1:]), str(federation.x.dtype).removeprefix("torch."), federation.classes
    ).place(task, setup)
    for label, algorithm in parsed.algorithm.items():
        if algorithm.pooled:
            continue
        from fedloom.network.agent.trial_round import answers_of

        for verb, method, form in answers_of(algorithm, task, place):
            allowed = "" if verb in policy.verbs else "  (REFUSED by the policy)"
            yield f"{label}: {verb} {method}{allowed}"
            yield from _lines(form)
    yield "Without secure aggregation, the coordinator can read each client's update."


def _lines(form: Template) -> Iterator[str]:
    for group, leaves in form.groups.items():
        count = sum(_count(shape) for shape, _ in leaves.values())
        yield f"  {group}: {count:,} numbers in {len(leaves)} tensors, and its weight"
    for name, (shape, _) in form.public.items():
        yield f"  {name}: {_count(shape)} public number(s)"
    yield f"  {form.bytes:,} bytes a round"


def _count(shape: tuple[int, ...]) -> int:
    found = 1
    for side in shape:
        found *= side
    return found
