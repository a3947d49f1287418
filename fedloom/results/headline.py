"""The headline: the one number of a round, a cell or a curve that progress, targets, tables and figures show.

It is the global model on test data if the server measures that, and otherwise the mean over clients, each on its own
test split. `evaluate.headline` says which rounds count: the last one, the best one, or the mean of the last k.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from statistics import fmean
from typing import TYPE_CHECKING

from fedloom.results.curve_numbers import last_mean, peak
from fedloom.results.sentences import say

if TYPE_CHECKING:
    from fedloom.experiment.store import Store
    from fedloom.federation.engine import Phase, RoundRecord
    from fedloom.federation.evaluation import ByClient
    from fedloom.results.run_data import RunData
    from fedloom.results.run_values import Floats, Ints
    from fedloom.task import Task

# the first one that was measured in a round counts: after local training in every round, or else the model in use
PHASES: tuple[Phase, ...] = ("post_fit", "final", "pre_fit")
MOST_NAMED = 6  # of more rounds, a note says how many there are


def of_round(record: RoundRecord, task: Task) -> dict[str, float]:
    """Return loss and metrics of a round: on the server's test data if it has some, else the clients' mean."""
    if record.server:
        measured = record.server.get("test") or next(iter(record.server.values()))
        return record.values(measured, task)
    for phase in PHASES:
        clients = _measured(record, phase)
        graded = {client: splits.get("test") or next(iter(splits.values())) for client, splits in clients.items()}
        values = [record.values(measured, task, client) for client, measured in graded.items() if measured.count]
        if values:
            found = {"loss": sum(value["loss"] for value in values) / len(values)}
            for measure in task.measures:
                known = [value[measure.name] for value in values if measure.name in value]
                if not measure.is_mean:  # such as AUROC: clients with one class have none
                    known = [value for value in known if not math.isnan(value)]
                if known:
                    found[measure.name] = sum(known) / len(known)
            return found
    return {}


def in_short(values: dict[str, float], task: Task) -> dict[str, float]:
    """Keep the loss and the first metric, by which results are compared: a line of progress has room for no more."""
    first = next((measure.name for measure in task.measures if measure.name in values), "loss")
    return {name: value for name, value in values.items() if name in ("loss", first)}


def is_of_server(record: RoundRecord) -> bool:
    """Whether `of_round` is about the global model on test data: the server's, or that of all clients."""
    return "test" in record.server


def is_after_training(record: RoundRecord) -> bool:
    """Whether `of_round` is about clients' models after local training, and not about the model that they share."""
    after = _measured(record, "post_fit").values()
    return not record.server and any(measured.count for splits in after for measured in splits.values())


def _measured(record: RoundRecord, phase: Phase) -> ByClient:
    return {client: splits for client, splits in record.clients.get(phase, {}).items() if splits}


def clients_of_round(record: RoundRecord) -> set[int]:
    """Return the clients that `of_round` is a mean over; of numbers on the server's data, those that took part."""
    phases = () if record.server else (record.clients.get(phase) for phase in PHASES)
    return {*(next(filter(None, phases), None) or (report.client for report in record.reports))}


def of_cell(store: Store, cell: int, rule: str) -> dict[str, float]:
    """Return the numbers of a cell that count: at the end, of the best round, or the mean of the last k rounds."""
    if rule == "final":
        return store.summary(cell)
    metrics = store.rows("metrics")
    lower = tuple(f"_{row['metric']}" for row in metrics if not row["higher_is_better"])
    by_round: dict[str, dict[int, list[float]]] = {}  # name → round → values
    pooled = store.is_pooled(cell)
    after = store.trained_rounds(cell) if pooled else set()
    for row in (row for row in store.rows("client_metrics", cell) if row["value"] is not None):
        for phase, round in _measures(row["phase"], row["round"], after if pooled else None):
            name = f"{phase}_{row['split']}_{row['metric']}"
            by_round.setdefault(name, {}).setdefault(round, []).append(row["value"])
    for row in store.rows("server_metrics", cell):
        if row["value"] is not None:
            by_round.setdefault(f"server_{row['split']}_{row['metric']}", {})[row["round"]] = [row["value"]]
    return {
        name: of_rounds([fmean(values) for _, values in sorted(rounds.items())], rule, not name.endswith(lower))
        for name, rounds in by_round.items()
    }


def _measures(phase: str, round: int, trained: Collection[int] | None) -> Iterator[tuple[str, int]]:
    """Yield before or after which round's local training a client's value was measured.

    The pooled model trains at no client: what a client has after a round is what it has before the next one. It counts
    for the rounds after which the other algorithms are measured, `trained`; None for other algorithms.
    """
    if trained is None:
        if phase in ("pre_fit", "post_fit"):
            yield phase, round
        return
    if phase == "pre_fit" and round in trained:
        yield "pre_fit", round
    after = round - 1 if phase == "pre_fit" else round
    if phase in ("pre_fit", "final") and after in trained:
        yield "post_fit", after


def of_rounds(values: Iterable[float], rule: str, higher_is_better: bool) -> float:
    """Apply the rule of `evaluate.headline` to the measured rounds of a curve.

    >>> of_rounds([0.1, 0.9, 0.5], "best", True), of_rounds([0.1, 0.9, 0.5], "last:2", True)
    (0.9, 0.7)
    """
    known = list(values)
    if rule == "best":
        return peak(range(len(known)), known, higher_is_better)[0]
    return last_mean(known, 1 if rule == "final" else int(rule.removeprefix("last:")))


def curve(run: RunData, label: str, seed: int, metric: str) -> tuple[Ints, Floats]:
    """Return the measured rounds and the headline's values, which targets are about."""
    if run.has_server_test:
        return run.server_values(label, seed, metric)
    stats = run.client_values(label, seed, "post_fit", metric).by_round()
    return stats.index, stats.mean


def curves(run: RunData, label: str, metric: str) -> dict[int, tuple[Ints, Floats]]:
    """Return the headline's curve of each seed that has one."""
    found = {seed: curve(run, label, seed, metric) for seed in run.seeds}
    return {seed: one for seed, one in found.items() if len(one[0])}


def unlike_rounds(run: RunData, metric: str, *, ends: bool = True) -> str:
    """Say which algorithms are measured after which rounds, if these are not the same; empty if they are.

    Without `ends`, it does not matter that one ended before another.
    """
    known = {
        label: {int(round) for rounds, _ in curves(run, label, metric).values() for round in rounds}
        for label in run.labels
    }
    known = {label: rounds for label, rounds in known.items() if rounds}
    every = set().union(*known.values())
    if all(rounds == {one for one in every if ends or one <= max(rounds)} for rounds in known.values()):
        return ""
    return say("note", "unlike_rounds", rounds="; ".join(f"{label} {_in_short(one)}" for label, one in known.items()))


def _in_short(rounds: set[int]) -> str:
    """Name a few rounds, or count many."""
    found = sorted(rounds)
    if len(found) <= MOST_NAMED:
        return f"after {', '.join(map(str, found))}"
    return f"{len(found)} times from {found[0]} to {found[-1]}"


def curve_in_words(run: RunData) -> str:
    """Say what `curve` is in this run."""
    if run.has_server_test:
        whose = "the server's test data" if run.server_holds("test") else "the test splits of all clients together"
        return f"the global model on {whose}"
    clients = "the drawn clients" if run.leaves_out_clients("post_fit") else "clients"
    return f"the mean over {clients} of each client's model after local training, on its own test split"
