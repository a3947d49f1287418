"""Poisoning: what some clients that lie do to the model, under each robust rule.

Attackers know what all honest clients send. An attack makes what the attackers send, one row each, from the changes of
the honest clients and from those that the attackers would send if they were honest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.aggregation.outliers import with_lengths
from fedloom.aggregation.robust import RULES, robust
from fedloom.algorithm import Update
from fedloom.algorithms.fedavg import FedAvg
from fedloom.backends.protocol import Backend
from fedloom.data.build import federate
from fedloom.data.federation import Dataset, Federation
from fedloom.errors import InputError, TrainingError
from fedloom.federation.engine import Evaluation, RoundRecord, fit
from fedloom.federation.sampling import REMOTE_FACTOR, Sampling
from fedloom.federation.work import ClientWork, Outcome, Place, Work
from fedloom.task import Task
from fedloom.training.local import Training
from fedloom.training.probe import probe
from fedloom.tree import Tree, change, flatten, is_whole, map_leaves, select, unflatten

Attack = Callable[[Tensor, Tensor], Tensor]
CLIENTS, ATTACKERS = 20, 4  # the fewest clients for which every rule tolerates a fifth of attackers
PARTITIONS: dict[str, dict[str, Any]] = {"IID": {"name": "iid"}, "Dirichlet 0.5": {"name": "dirichlet", "alpha": 0.5}}


def honest(others: Tensor, own: Tensor) -> Tensor:
    """Send what was learnt. With flipped labels, that is an attack on the data."""
    return own


def sign_flip(others: Tensor, own: Tensor) -> Tensor:
    """Send the mean of the honest changes, with the opposite sign (Allen-Zhu et al. 2020)."""
    return -others.mean(0).expand_as(own)


def scaled_replacement(others: Tensor, own: Tensor) -> Tensor:
    """Send so long a change that the mean becomes the attackers' own model (Bagdasaryan et al. 2020)."""
    return own * (len(others) + len(own)) / len(own)


def a_little_is_enough(others: Tensor, own: Tensor) -> Tensor:
    """Send the honest mean, moved by 1.5 of the honest clients' standard deviations (Baruch et al. 2019)."""
    return (others.mean(0) - 1.5 * others.std(0)).expand_as(own)


def inner_product(others: Tensor, own: Tensor) -> Tensor:
    """Send the negative honest mean, just long enough to turn the mean of all around (Xie et al. 2020)."""
    return (-1.5 * len(others) / len(own)) * others.mean(0).expand_as(own)


# name → what attackers send, and whether they flip the labels of their examples
ATTACKS: dict[str, tuple[Attack, bool]] = {
    "none": (honest, False),
    "label flip": (honest, True),
    "sign flip": (sign_flip, False),
    "scaled replacement": (scaled_replacement, True),
    "a little is enough": (a_little_is_enough, False),
    "inner product": (inner_product, False),
}


class Attacked(Backend):
    """Computes all clients in this process; the first `ATTACKERS` clients lie."""

    def __init__(self, place: Place, attack: Attack) -> None:
        self.place, self.attack = place, attack

    def run(self, work: Work) -> Any:
        if not isinstance(work, ClientWork):
            return work.perform(self.place)
        found: Outcome = replace(work, keep="stack").perform(self.place)
        wrong = torch.tensor([client < ATTACKERS for client in work.ids])
        groups = dict(found.stack)
        for group, base in (found.positions or {}).items():
            groups[group] = self._attacked(found.stack[group], work.shared[base], wrong)
        update = Update(groups, found.weights, positions=found.positions or {})
        reports = found.reports
        if work.report_lengths:
            reports = with_lengths(reports, update, work.shared, self.place.task, [1] * len(reports))
        return work.outcome([update], found.own, reports)

    def _attacked(self, stacked: Tree, base: Tree, wrong: Tensor) -> Tree:
        """Replace the attackers' positions; counters stay as they are."""
        base = {name: leaf for name, leaf in select(base, stacked).items() if not is_whole(leaf)}
        if not wrong.any():
            return stacked
        changes = flatten(change(select(stacked, base), base))
        changes[wrong] = self.attack(changes[~wrong], changes[wrong])
        return {**stacked, **map_leaves(torch.add, unflatten(changes, base), base)}


@dataclass(frozen=True)
class Poisoning:
    """Accuracies of the final models: partition → rule → attack."""

    accuracy: dict[str, dict[str, dict[str, float]]]
    clients: int
    attackers: int
    rounds: int


def poison(
    dataset: Dataset,
    task: Task,
    train: Training,
    rounds: int,
    normalize: str | Mapping[str, Sequence[float]] = "none",
    tell: Callable[[int, int], object] = lambda done, runs: None,
) -> Poisoning:
    """Train with every rule under every attack, and measure the models on data that no client has."""
    if not dataset.classes or "accuracy" not in [measure.name for measure in task.measures]:
        raise InputError("Poisoning is measured by accuracy, so it needs classes, and accuracy among [task] metrics.")
    accuracy: dict[str, dict[str, dict[str, float]]] = {}
    runs = len(PARTITIONS) * (len(RULES) + 2) * len(ATTACKS)
    tell(0, runs)
    for name, partition in PARTITIONS.items():
        parts, server = {**partition, "clients": CLIENTS}, 0.2 if dataset.test is None else "test"
        federation = federate(dataset, partition=parts, server=server, normalize=normalize)
        place = Place(federation, task, probe(federation, task).setup(group=CLIENTS))
        places = {True: replace(place, federation=flipped(federation)), False: place}
        for rule, settings in _rules(_typical_length(place, train)).items():
            row = accuracy.setdefault(name, {}).setdefault(rule, {})
            for label, (attack, flips) in ATTACKS.items():
                row[label] = _accuracy(Attacked(places[flips], attack), settings, train, rounds)
                tell(sum(len(found) for rules in accuracy.values() for found in rules.values()), runs)
    return Poisoning(accuracy, CLIENTS, ATTACKERS, rounds)


def flipped(federation: Federation) -> Federation:
    """Return the federation in which attackers have turned the order of labels around: 0 becomes the last one."""
    y, theirs = federation.y.clone(), int(federation.offsets[ATTACKERS])
    y[:theirs] = len(federation.classes) - 1 - y[:theirs]
    return replace(federation, y=y)


def _rules(length: float) -> dict[str, dict[str, Any]]:
    """Return the settings of FedAvg and of the cohort for the plain mean, a network's mean, and each robust rule."""
    fields = {"trim": ATTACKERS, "byzantine": ATTACKERS, "radius": length, "bound": length}
    found: dict[str, dict[str, Any]] = {"mean": {}, "mean without outliers": {"outlier_factor": REMOTE_FACTOR}}
    for name, kind in RULES.items():
        known = {field: value for field, value in fields.items() if field in kind.model_fields}
        found[name.replace("_", " ")] = {"rule": robust({"name": name, **known})}
    return found


def _typical_length(place: Place, train: Training) -> float:
    """Return the median length of the clients' changes in the first round, which is the radius of rules that clip."""
    (record,) = _rounds(Attacked(place, honest), FedAvg(train=train), Sampling(), 1)
    return float(np.median([max(report.lengths.values()) for report in record.reports]))


def _accuracy(backend: Attacked, settings: dict[str, Any], train: Training, rounds: int) -> float:
    algorithm = FedAvg(train=train, rule=settings.get("rule"), weights="uniform")
    sampling = Sampling(outlier_factor=settings.get("outlier_factor"))
    try:
        *_, final = _rounds(backend, algorithm, sampling, rounds)
    except TrainingError:  # the model is no longer finite
        return 0.0
    return final.server["test"].values(backend.place.task)["accuracy"]


def _rounds(backend: Attacked, algorithm: FedAvg, sampling: Sampling, rounds: int) -> Iterator[RoundRecord]:
    data, task, evaluation = backend.place.federation, backend.place.task, Evaluation(every=rounds, splits=())
    return fit(data, task, algorithm, rounds, sampling=sampling, evaluation=evaluation, backend=backend)
