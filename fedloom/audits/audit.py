"""All audits of an experiment. What they find is kept in `audit.json`, beside the run that they are about."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from fedloom.audits.canary_run import canary_run
from fedloom.audits.membership import membership
from fedloom.audits.poisoning import poison
from fedloom.audits.reconstruction import reconstruct
from fedloom.compression.table import NO_COMPRESSION
from fedloom.errors import InputError, StoreError, unknown
from fedloom.experiment.description import differences, identity
from fedloom.experiment.experiment_file import Experiment
from fedloom.experiment.plan import Plan
from fedloom.experiment.progress import Progress
from fedloom.experiment.run_folder import check_same_data, comparable
from fedloom.experiment.store import Store
from fedloom.files import write_atomically
from fedloom.privacy.dp.client_level import ClientLevel
from fedloom.results.result import Result, open_store
from fedloom.results.run_data import ABOUT, AUDIT, read_findings

Tell = Callable[[int, int], object]  # steps that are done, and how many there are


def audit(
    experiment: Experiment,
    folder: Path,
    only: Collection[str],
    progress: Progress,
    canaries: int = 1000,
    run: str = "fedloom run",
) -> dict[str, Any]:
    """Run the audits with these names, or all, and return what `audit.json` now holds; some may not apply.

    Raise `InputError` if none could be done. `run` is the command that makes the run, for a message if there is none.
    """
    known: dict[str, Callable[[Experiment, Plan, Path, Tell], Any]] = {
        "epsilon": partial(_epsilon, canaries),
        "membership": partial(_membership, run),
        "reconstruction": _reconstruction,
        "poisoning": _poisoning,
    }
    for name in only:
        if name not in known:
            raise unknown("audit", name, known)
    path, plan = folder / AUDIT, Plan.of(experiment)
    _check_same_experiment(folder, plan)
    description = plan.description()
    found = read_findings(folder, description) | {ABOUT: {"identity": identity(description)}}
    wanted = [name for name in known if name in only or not only]
    refused: dict[str, str] = {}
    progress.expect(1, 1)  # each audit has a bar of its own
    for number, name in enumerate(wanted):
        try:
            if name != "membership" and plan.compress != NO_COMPRESSION:
                raise InputError(f"The {name} audit attacks updates as they are. Leave out [compress] for it.")
            found[name] = known[name](experiment, plan, folder, _telling(name, progress))
        except (InputError, StoreError) as why:
            refused[name] = str(why)
            if len(refused) == len(wanted):
                raise InputError("\n".join(f"No audit of {one}: {said}" for one, said in refused.items())) from why
            if "left_out" in found.get(name, {"left_out": ""}):  # what was found before stays
                found[name] = {"left_out": str(why)}
        progress.end(name)
        if len(refused) <= number:  # otherwise nothing was found yet
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(found, indent=1).encode())
    return found


def _check_same_experiment(folder: Path, plan: Plan) -> None:
    """Refuse to put findings beside the run of another experiment."""
    if not (folder / "run.db").is_file():
        return
    with open_store(folder) as store:
        known = store.fact("description")
    described = json.loads(json.dumps(plan.description(), default=str))
    changed = differences(comparable(known, described, plan), described) if known else []
    if changed:
        listed = "\n  ".join(changed)
        raise InputError(
            f"{folder} holds the run of another experiment. What differs:\n  {listed}\nChoose a folder with --out."
        )


def _telling(name: str, progress: Progress) -> Tell:
    """Return a function that shows the progress of one audit: first with 0, and then after every step."""
    last = time.monotonic()

    def tell(done: int, steps: int) -> None:
        nonlocal last
        if done:
            progress.step(name, done, {}, time.monotonic() - last)
        else:
            progress.begin(name, 0, steps)
        last = time.monotonic()

    return tell


def _epsilon(canaries: int, experiment: Experiment, plan: Plan, folder: Path, tell: Tell) -> Any:
    if plan.privacy.dp is None:
        raise InputError("The experiment claims no ε for clients: it has no [privacy] dp.")
    steps, found = len(plan.algorithms) * plan.rounds, {}
    tell(0, steps)
    for number, (label, algorithm) in enumerate(plan.algorithms.items()):
        told = partial(lambda before, done: tell(before + done, steps), number * plan.rounds)
        found[label] = canary_run(plan, algorithm, canaries, told)
    return found


def _membership(run: str, experiment: Experiment, plan: Plan, folder: Path, tell: Tell) -> Any:
    if not (folder / "run.db").is_file():
        raise InputError(f"There is no run in {folder} to attack. Run the experiment first: `{run}`")
    result, seed = Result.read(folder, plan), plan.seeds[0]
    if not result.finished:
        raise InputError(f"The run in {folder} is not finished. Finish it first: `{run}`")
    found = {}
    tell(0, len(plan.algorithms))
    with Store(folder, read_only=True) as store:
        check_same_data(store, plan.federation(seed), seed)  # others would be taken for members
    for number, label in enumerate(plan.algorithms, 1):
        model = result.weights(label, seed).get("model")
        if model is not None:
            attacks = membership(plan.task(seed), model, plan.federation(seed))
            found[label] = {name: asdict(one) for name, one in attacks.items()}
        tell(number, len(plan.algorithms))
    if not found:
        raise InputError("No algorithm of this run has a global model to attack.")
    return found


def _reconstruction(experiment: Experiment, plan: Plan, folder: Path, tell: Tell) -> Any:
    seed, dp = plan.seeds[0], plan.privacy.dp
    federation = plan.federation(seed)
    cohort = plan.cohort.size(federation.clients)
    noise = dp.noise_multiplier if dp is not None else 1.0
    if dp is not None and noise is None:
        noise = ClientLevel(dp, plan.cohort, federation.clients, plan.rounds).mechanism.noise_multiplier
    found = asdict(reconstruct(plan.task(seed), federation, cohort, noise or 1.0, tell))
    return {**found, "not_applied": list(plan.privacy.model_dump(exclude_none=True))}


def _poisoning(experiment: Experiment, plan: Plan, folder: Path, tell: Tell) -> Any:
    dataset = experiment.source.load(experiment.base)
    normalize = "federated" if experiment.data.normalize == "client" else experiment.data.normalize
    task = plan.task(plan.seeds[0])
    return asdict(poison(dataset, task, experiment.train, plan.rounds, normalize, tell))
