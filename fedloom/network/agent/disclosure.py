"""What an agent tells others about its data and its errors, and what its audit log says about its answers."""

from __future__ import annotations

import math
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedloom import machine
from fedloom.data.federation import Federation
from fedloom.data.split import SPLITS
from fedloom.errors import FedloomError, InputError
from fedloom.network.agent.policy import Site
from fedloom.network.agent.questions import question_facts
from fedloom.network.protocol.messages import Assignment, ClientAnswer, ClientFacts, DataFormat, Hello
from fedloom.network.protocol.tensors import Parcel
from fedloom.task import Task
from fedloom.training.clients import Setup


def hello_message(site: Site, federation: Federation, setup: Setup, mark: str, task: Task | None = None) -> Hello:
    """Describe a site's data (shapes, names of classes, sizes of splits), and what leaves of a task's metrics."""
    hosts = site.table.hosts
    if hosts is not None and any(not 0 <= number < federation.clients for number in hosts):
        raise InputError(f"[site] hosts names clients that the data does not have: it has {federation.clients}.")
    sizes = {split: federation.sizes(split) for split in SPLITS}

    def facts(number: int) -> ClientFacts:
        counts = {split: site.policy.shown_size(int(found[number])) for split, found in sizes.items()}
        if hosts is not None:
            return ClientFacts(name=federation.name(number), number=number, **counts)
        name = site.name if federation.clients == 1 else f"{site.name}/{federation.name(number)}"
        return ClientFacts(name=name, **counts)

    about = machine.facts()
    return Hello(
        versions={name: str(about[name]) for name in ("fedloom", "torch", "python", "system", "cpu_capability")},
        **DataFormat.of(federation).model_dump(),
        clients=tuple(facts(number) for number in site.hosted(federation.clients)),
        data_mark=mark,
        setup={name: value for name, value in asdict(setup).items() if name != "target"},  # which is about labels
        min_cohort=site.policy.min_cohort,
        withheld=site.policy.withheld(task) if task is not None else (),
        sends_scores=task is not None and site.policy.sends_scores(task),
    )


def without_sizes(hello: Hello) -> Hello:
    """Return the same without how many examples clients have: under secure aggregation, weights are secret."""
    hidden = {"train": 0, "validation": 0, "test": 0}
    return hello.model_copy(update={"clients": tuple(one.model_copy(update=hidden) for one in hello.clients)})


def error_summary(error: Exception) -> str:
    """Describe an error for other people: fedloom's own message, or else its kind and place without any value."""
    root: BaseException = error
    while root.__cause__ is not None:
        root = root.__cause__
    if isinstance(root, FedloomError):
        return str(error)
    if isinstance(root, OSError):
        return f"{type(root).__name__}: {root.strerror}"
    frames = traceback.extract_tb(root.__traceback__)[-6:]
    where = "\n".join(f"  {Path(frame.filename).name}:{frame.lineno} in {frame.name}" for frame in frames)
    return f"{type(root).__name__} (its message stays at the site)\n{where}"


def assignment_facts(assignment: Assignment) -> dict[str, Any]:
    """Describe an assignment for the audit log."""
    train = assignment.kind == "train"
    return {
        "algorithm": assignment.label,
        "seed": assignment.seed,
        "round": assignment.round,
        "asked": f"{assignment.verb} {assignment.method}" if train else assignment.kind,
    }


def answer_facts(assignment: Assignment, answers: Sequence[ClientAnswer], parcel: Parcel) -> dict[str, Any]:
    """Describe an answer for the audit log: every number that leaves, and of tensors how many values of what kind."""
    groups: dict[str, int] = {}
    numbers: dict[str, Any] = {}
    for path, leaf in parcel.tensors.items():
        _, kind, name = path.split("/", 2)
        group = f"{kind} {name.split('/')[0]}"
        groups[group] = groups.get(group, 0) + leaf.numel()
        if kind in ("weights", "public"):
            numbers[path] = leaf.flatten().tolist()
    # keys and shares of secure sums leave, but must not stay on the disk
    results = [{name: value for name, value in one.items() if name != "secure"} for one in parcel.header["results"]]
    left: dict[str, Any] = {"values": groups, "numbers": numbers, "results": results}
    measured_here = [found for one in answers for found in one.measured.values()]
    metrics = {name for found in measured_here for name, total in found.sums.items() if not math.isnan(total)}
    if metrics := metrics.union(*(found.summaries for found in measured_here)):
        left["metrics"] = sorted(metrics)
    if any(one.sha256 for one in answers):
        left["fingerprints"] = len(answers)
    clients = [one.client for one in answers]
    measured = sorted({split for one in answers for split, found in one.measured.items() if found.count})
    watched = assignment.watch_epochs and any(one.history for one in answers)
    facts = {"clients": clients, "measured": measured, "watched": watched, "left": left}
    facts |= {"bytes": parcel.size, "sha256": parcel.sha256}
    return {**assignment_facts(assignment), **question_facts(assignment), **facts}
