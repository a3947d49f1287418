"""An experiment made ready at a site: allowed, compared with what is installed here, its data and model loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedloom import machine
from fedloom.algorithm import Algorithm
from fedloom.data.federation import Federation
from fedloom.errors import InputError
from fedloom.experiment.experiment_file import parse
from fedloom.experiment.plan import Plan
from fedloom.federation.work import Place
from fedloom.network.agent.descriptions import describe, short
from fedloom.network.agent.policy import Refusal, Site
from fedloom.network.protocol.fingerprint import source_hashes
from fedloom.network.protocol.hosted_data import Hosted, data_facts
from fedloom.network.protocol.messages import Asked, Hello
from fedloom.network.protocol.tensors import PROTOCOL
from fedloom.task import Task
from fedloom.training.clients import Setup
from fedloom.training.local import Groups
from fedloom.training.probe import probe


@dataclass
class Prepared:
    """An experiment made ready: data loaded, model built and tried, all of it kept while the agent lives."""

    offer: Mapping[str, Any]
    plan: Plan
    initial: dict[int, Path]
    hello: Hello

    def __post_init__(self) -> None:
        self._places: dict[tuple[int, tuple[tuple[int, int], ...]], Place] = {}
        self._tasks: dict[int, tuple[Task, Setup, Federation]] = {}
        self._kept: dict[tuple[str, int], Groups] = {}

    def algorithm(self, label: str) -> Algorithm:
        found = self.plan.algorithms.get(label)
        if found is None:
            raise InputError(f"There is no algorithm '{label}' in the plan.")
        return found

    def initial_own(self, label: str, seed: int, task: Task) -> Groups:
        """What a client keeps before it first takes part."""
        if (label, seed) not in self._kept:
            self._kept = {(label, seed): self.algorithm(label).init_own(task, task.initial())}
        return self._kept[label, seed]

    def place(self, seed: int, clients: tuple[Asked, ...], population: int, device: str) -> Place:
        """Our data under the run's numbers."""
        if seed not in self._tasks:
            task = replace(self.plan.task(seed), init=str(self.initial[seed]))
            federation = self.plan.federation(seed)
            setup = probe(federation, task).setup(group=1, device=machine.device(device))
            self._tasks = {seed: (task, setup, federation)}
            self._places = {}
        task, setup, federation = self._tasks[seed]
        numbers = tuple((one.client, one.local) for one in clients)
        if numbers not in {key[1] for key in self._places}:
            for _, local in numbers:
                if local >= federation.clients:
                    raise InputError(f"There is no client {local} here.")
            self._places = {
                (seed, numbers): Place(Hosted.of(federation, dict(numbers), population), task, setup),
            }
        return self._places[seed, numbers]


def prepare(
    offer: Mapping[str, Any],
    site: Site,
    fetch: Callable[[str], Path],
    mark: Callable[[str], str],
    tell: Callable[[str], None],
) -> Prepared:
    """Raise `Refusal` unless this site may and can take part in what the coordinator offers.

    `fetch` gets tensors by their SHA-256, `mark` makes a mark that shows whether the data changed.
    """
    if offer.get("protocol") != PROTOCOL:
        raise Refusal(f"the coordinator speaks protocol {offer.get('protocol')}, and this agent speaks {PROTOCOL}")
    values = dict(offer["experiment"])
    site.policy.check_offer(values, offer.get("privacy") or {})
    values["task"] = {**values["task"], "init": "torch"}  # the coordinator sends the initial weights
    values["data"] = site.data
    experiment = parse(values, site.base)
    theirs, ours = offer["sources"], source_hashes(experiment)
    different = [name for name in ours if theirs.get(name) != ours[name]]
    if different:
        raise Refusal(f"the installed code is not the coordinator's: {', '.join(different)} differ")
    there, here = offer["versions"].get("torch"), machine.facts()["torch"]
    if there != here:
        tell(f"Note: torch {there} there, {here} here: bits may differ.")
    plan = Plan.of(experiment)
    seed = experiment.seeds[0]
    initial = {int(seed): fetch(sha) for seed, sha in offer["initial"].items()}
    federation = plan.federation(seed)
    facts = data_facts(federation)
    if offer.get("data") and offer["data"] != facts:
        raise Refusal(f"the data does not fit: the run has {short(offer['data'])}, and here is {short(facts)}")
    task = replace(plan.task(seed), init=str(initial[seed]))
    setup = probe(federation, task).setup(group=1, device=machine.device(site.table.device))
    hello = describe(site, federation, setup, mark(federation.fingerprint))
    site.policy.check_examples({one.name: one.train for one in hello.clients})
    tell(
        f"Ready: {len(hello.clients)} client(s), a model of {task.parameters:,} parameters. Without secure "
        "aggregation, the coordinator can read each client's update."
    )
    return Prepared(dict(offer), plan, initial, hello)
