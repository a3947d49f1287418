"""Loads an experiment at a site: checks it against the policy and the installed code, then loads data and model."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedloom import machine
from fedloom.algorithm import Algorithm
from fedloom.data.agreement import read_agreed
from fedloom.data.federation import Federation
from fedloom.data.plausibility import suspicions
from fedloom.data.split import SplitName
from fedloom.errors import InputError
from fedloom.experiment.experiment_file import Experiment, check_tables, parse, read, usual_model
from fedloom.experiment.plan import Plan
from fedloom.experiment.tables import DataTable, TaskTable
from fedloom.federation.sampling import Sampling
from fedloom.federation.work import Place
from fedloom.network.agent.disclosure import hello_message, without_sizes
from fedloom.network.agent.policy import Refused, Site
from fedloom.network.agent.privacy_ledger import SitePrivacy, check_cells
from fedloom.network.agent.questions import check_limit
from fedloom.network.protocol.code_fingerprint import code_hashes, different_modules
from fedloom.network.protocol.messages import AssignedClient, DataFormat, Hello
from fedloom.network.protocol.tensors import PROTOCOL
from fedloom.privacy.protection import check_plan
from fedloom.privacy.table import PrivacyTable
from fedloom.privacy.words import doubts, of_people, scaled_by_examples
from fedloom.results.safe_text import plain
from fedloom.task import Task
from fedloom.training.probe import probe
from fedloom.tree import Groups

SHOWN = 5  # modules that a message names


@dataclass(frozen=True, eq=False)
class HostedClients(Federation):
    """A site's own federation whose clients have other numbers in the run, without splits that are too small."""

    inner: Federation = field(kw_only=True)
    local: Mapping[int, int] = field(kw_only=True)  # number in the run → number at the site
    population: int = field(kw_only=True)
    fewest: int = field(kw_only=True, default=1)  # examples of a split; a smaller one counts as empty

    @staticmethod
    def of(inner: Federation, local: Mapping[int, int], population: int, fewest: int = 1) -> HostedClients:
        same = {one.name: getattr(inner, one.name) for one in fields(Federation) if one.name != "server"}
        return HostedClients(**same, inner=inner, local=dict(local), population=population, fewest=fewest)

    @property
    def clients(self) -> int:
        return self.population

    def name(self, client: int) -> str:
        return self.inner.name(self.local[client])

    def counts(self, clients: Sequence[int], split: SplitName) -> NDArray[np.int64]:
        found = self.inner.counts([self.local[client] for client in clients], split)
        return np.where(found < self.fewest, 0, found)

    def indices(self, client: int, split: SplitName) -> Tensor:
        rows = self.inner.indices(self.local[client], split)
        return rows if len(rows) >= self.fewest else rows[:0]


@dataclass
class LoadedExperiment:
    """An experiment with its data and model in memory for as long as the agent lives."""

    run_plan: Mapping[str, Any]  # what the coordinator announced
    plan: Plan
    initial: dict[int, Path]  # initial weights by seed
    site: Site
    hello: Hello = field(init=False)

    def __post_init__(self) -> None:
        self._prepared: tuple[int, Place] | None = None
        self._place: tuple[Any, Place] | None = None
        self._own: dict[tuple[str, int], Groups] = {}

    def prepared(self, seed: int) -> Place:
        """Return the site's own data with the task and how to compute it, for one seed."""
        if self._prepared is None or self._prepared[0] != seed:
            federation, task = self.plan.federation(seed), replace(self.plan.task(seed), init=str(self.initial[seed]))
            setup = probe(federation, task).setup(group=1, device=machine.device(self.site.table.device))
            self._prepared = seed, Place(federation, task, setup)
        return self._prepared[1]

    def algorithm(self, label: str) -> Algorithm:
        found = self.plan.algorithms.get(label)
        if found is None:
            raise InputError(f"There is no algorithm '{plain(label)}' in the plan.")
        return found

    def initial_own(self, label: str, seed: int, task: Task) -> Groups:
        """Return a client's own state before it first takes part."""
        if (label, seed) not in self._own:
            kept = self.algorithm(label).init_own(task, task.initial())
            self._own = {(label, seed): {**kept, **self.plan.compress.initial_own}}
        return self._own[label, seed]

    def place(self, seed: int, clients: tuple[AssignedClient, ...], population: int) -> Place:
        """Return this site's data under the numbers that its clients have in the run."""
        here, numbers = self.prepared(seed), {one.client: one.local for one in clients}
        if self._place is None or self._place[0] != (seed, numbers, population):
            for local in numbers.values():
                if local >= here.federation.clients:
                    raise InputError(f"There is no client {local} at this site.")
            policy, counts = self.site.policy, here.federation.counts([*numbers.values()], "train")
            names = [here.federation.name(local) for local in numbers.values()]
            policy.check_examples(dict(zip(names, counts.tolist(), strict=True)))  # every seed may split differently
            hosted = HostedClients.of(here.federation, numbers, population, policy.min_examples)
            self._place = (seed, numbers, population), replace(here, federation=hosted)
        return self._place[1]


def admitted(values: Mapping[str, Any], site: Site) -> Experiment:
    """Return an experiment with this site's data if the policy allows it. Nothing of it is loaded before that."""
    check_tables(values)
    usual = {"model": usual_model(values.get("data", {}))}  # as the coordinator reads the same file
    task = {**usual, **values.get("task", {}), "init": "torch"}  # the coordinator sends the initial weights
    labels: Mapping[str, Any] = values.get("algorithm") or {"fedavg": {}}
    names = [str(fields.get("name", label)) for label, fields in labels.items() if isinstance(fields, Mapping)]
    site.policy.check_experiment(names, read(TaskTable, "task", task), site.base)
    privacy = read(PrivacyTable, "privacy", values.get("privacy", {}))
    site.policy.check_privacy(privacy, read(Sampling, "cohort", values.get("cohort", {})).count)
    experiment = parse({**values, "data": site.data, "task": task}, site.base)
    announced = values.get("data", {}).get("seed", DataTable.model_fields["seed"].default)
    if experiment.data.seed == "run" != announced and len(experiment.seeds) > 1:
        raise Refused(
            'this site splits its data again for every seed of the run ([data] seed = "run"), and the experiment '
            f"announces seed = {announced}: both files must say the same"
        )
    return experiment


def check_data(site: Site) -> None:
    """Raise what is wrong with the site's own data, before this agent uses up its token."""
    # only the run's loss says whether labels are numbers that can be scaled
    data = {key: value for key, value in site.data.items() if key != "scale_target"}
    experiment = parse({"data": data}, site.base)
    federation = Plan.of(experiment, at_site=True).federation(experiment.seeds[0])
    for file in sorted(site.base.glob("*.json")) if "preprocessing" not in data else ():
        _check_unused(file, federation)


def _check_unused(file: Path, federation: Federation) -> None:
    """Raise if a file of `fedloom data agree` is about this data, which is prepared in another way."""
    try:
        agreed = read_agreed(file)
    except InputError:  # another file, such as a summary
        return
    here, shape = federation.preprocessing, federation.x.shape[1:]
    alike = {one.name for one in here.columns} == {one.name for one in agreed.columns} and here.label == agreed.label
    if alike and list(shape) != list(agreed.shape):
        raise InputError(
            f"{file.name} beside the site's file is about these columns, and [data] does not name it: {_count(shape)} "
            f'here, {_count(agreed.shape)} there. Add preprocessing = "{file.name}" to [data], or move the file away.'
        )


def check_shape(shape: Sequence[int], of_run: Sequence[int], site: Site) -> None:
    """Raise `Refused` if this site's examples have another shape than the run's."""
    if list(shape) == list(of_run):
        return
    why = "[data] preprocessing may be" if "preprocessing" in site.data else 'preprocessing = "agreed.json" may be'
    what = "another run's file" if "preprocessing" in site.data else "missing in [data]"
    raise Refused(f"an example has {_count(shape)} here, {_count(of_run)} in the run: {why} {what}")


def _count(shape: Sequence[int]) -> str:
    return f"{shape[0]} features" if len(shape) == 1 else f"the shape {list(shape)}"


def load_experiment(
    run_plan: Mapping[str, Any],
    site: Site,
    fetch: Callable[[str], Path],
    mark: Callable[[str], str],
    tell: Callable[[str], None],
    spending: Path,
) -> LoadedExperiment:
    """Load what the coordinator announced, or raise `Refused` if this site may not or cannot take part.

    `fetch` gets tensors by their SHA-256. `mark` makes a mark that shows whether the data changed. `spending` is the
    folder of what clients here have spent of their privacy.
    """
    check_form(run_plan)
    if run_plan.get("protocol") != PROTOCOL:
        raise Refused(f"the coordinator speaks protocol {run_plan.get('protocol')}, and this agent speaks {PROTOCOL}")
    experiment = admitted(run_plan["experiment"], site)
    check_code(code_hashes(experiment), run_plan["sources"])
    there, here = plain(str(run_plan["versions"].get("torch"))), machine.facts()["torch"]
    if there != here:
        tell(f"Note: the coordinator has torch {there}, this machine {here}. Results may differ in the last bits.")
    plan, seed = Plan.of(experiment, at_site=True), experiment.seeds[0]
    try:
        check_plan(plan.privacy, plan.cohort, plan.algorithms)
    except InputError as why:
        raise Refused(str(why).rstrip(".")) from None
    check_limit(plan, site.policy.max_evaluations)
    check_cells(plan, site.policy)
    initial = {int(seed): fetch(sha) for seed, sha in run_plan["initial"].items()}
    loaded = LoadedExperiment(dict(run_plan), plan, initial, site)
    federation = loaded.plan.federation(seed)
    if run_plan.get("shape"):
        check_shape(federation.x.shape[1:], run_plan["shape"], site)
    if run_plan.get("data"):
        different = DataFormat.of(federation).differences(DataFormat.model_validate(run_plan["data"]))
        if different:
            raise Refused(f"the data does not fit the run's. {different}")
    ready = loaded.prepared(seed)
    measured = None if plan.privacy.hides_metrics else ready.task
    hello = hello_message(site, federation, ready.setup, mark(federation.fingerprint), measured)
    site.policy.check_examples({one.name: one.train for one in hello.clients})
    privacy = SitePrivacy(spending, str(run_plan["run"]), plan, site.policy)
    for line in privacy.check_total(site.hosted(federation.clients)):
        tell(line)
    fewest = min((one.train for one in hello.clients), default=0)
    several = of_people(plan.privacy, site.data.get("group"), federation.largest_group)
    for doubt in (
        *doubts(plan.privacy, examples=fewest, at_least=site.policy.min_cohort),
        *scaled_by_examples(plan.privacy, federation.scaled_by),
        *several,
        *suspicions(federation, at_site=True),
    ):
        tell(f"Caution: {doubt}")
    loaded.hello = hello if plan.privacy.secure_aggregation is None else without_sizes(hello)
    tell(f"Ready: {len(loaded.hello.clients)} client(s), a model of {ready.task.parameters:,} parameters.")
    for line in site.policy.metric_lines(ready.task) if measured is not None else ():
        tell(line)
    return loaded


def check_form(run_plan: Mapping[str, Any]) -> None:
    """Raise `Refused` unless the announced plan is well-formed; some of it becomes names of files here."""
    hashes = [str(run_plan.get("run")), *map(str, (run_plan.get("initial") or {}).values())]
    tables = [run_plan.get(name) for name in ("experiment", "sources", "versions", "initial")]
    tables += [(run_plan.get("experiment") or {}).get(name) for name in ("algorithm", "task")]
    well_formed = all(isinstance(table, Mapping) for table in tables)
    shape = run_plan.get("shape") or []
    well_formed = well_formed and isinstance(shape, list) and all(isinstance(size, int) for size in shape)
    if not well_formed or not all(re.fullmatch("[0-9a-f]{16,64}", text) for text in hashes):
        raise Refused("the coordinator's plan is malformed")


def check_code(ours: Mapping[str, str], theirs: Mapping[str, str]) -> None:
    """Raise `Refused` unless the code that clients run is the same on both sides."""
    different = different_modules(ours, theirs)
    if different:
        more = f" and {len(different) - SHOWN} more" if len(different) > SHOWN else ""
        names = ", ".join(different[:SHOWN])
        raise Refused(f"the installed code is not the coordinator's: {names}{more} differ")
