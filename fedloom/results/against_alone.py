"""What each client gains or loses by sharing, compared with learning alone: the mean over clients does not say it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fedloom.experiment.store import OWN_MODELS
from fedloom.results.client_chance import by_chance, far, variance
from fedloom.results.client_tables import END, MODEL
from fedloom.results.run_data import RunData
from fedloom.results.sentences import first_three, say
from fedloom.results.table import Table, Value, show, two_digits

LARGE, HINT = 0.1, 1.64  # a loss of ten points, and more than this many standard errors: one in twenty by chance


@dataclass(frozen=True)
class Gain:
    """How much better an algorithm is for a client than learning alone."""

    mean: float  # over the seeds that measured both; below zero, the client loses
    chance: float | None  # as much as few test examples and other seeds can explain; None if that is not known

    @property
    def told_apart(self) -> bool:
        """Whether chance does not explain the difference."""
        return self.chance is not None and abs(self.mean) > self.chance


def finished(run: RunData) -> list[str]:
    """Return the algorithms that have finished with some seed."""
    return [*dict.fromkeys(label for (label, _), cell in run.cells.items() if cell["status"] == "done")]


def learning_alone(run: RunData) -> list[str]:
    """Return the finished algorithms whose clients train models of their own and send nothing, as with `local`."""
    own = {*(run.facts.get(OWN_MODELS) or ())} & {*finished(run)}
    sending = {cell[0] for cell in run.cells if cell[0] in own and run.costs(*cell).bytes_up.any()}
    return [label for label in finished(run) if label in own - sending]


def gains(run: RunData, label: str, alone: str, metric: str) -> dict[int, Gain]:
    """Client → what it gains with an algorithm, where both were measured in the same seed."""
    pairs: dict[int, list[tuple[float, float]]] = {}
    for seed in run.seeds_of_clients:
        shared, own = (_at_the_end(run, one, seed, metric) for one in (label, alone))
        for client in shared.keys() & own.keys() & {*range(len(run.clients))}:
            pairs.setdefault(client, []).append((shared[client], own[client]))
    sign = 1 if run.metric(metric).higher_is_better else -1
    found = {}
    for client, values in sorted(pairs.items()):
        by_seed = [sign * (shared - own) for shared, own in values]
        examples = _variance_on_test_examples(run, metric, client, values)
        found[client] = Gain(statistics.fmean(by_seed), by_chance(run, examples, by_seed))
    return found


def against_alone(run: RunData) -> Iterator[Table]:
    """What every client gains or loses with each algorithm, and a sentence about each."""
    alone, metric, phase = learning_alone(run), run.metric(run.main_metric), run.end_phase
    if not alone or run.facts.get("rounds") == 0:  # untrained, all have the model that was given
        return
    others = [label for label in finished(run) if label not in alone]
    found = {label: some for label in others if (some := gains(run, label, alone[0], metric.name))}
    measured, drawn = {client for some in found.values() for client in some}, run.leaves_out_clients(phase)
    clients = [client for client in range(len(run.clients)) if client in measured or not drawn]
    rows: list[tuple[Value, ...]] = []
    for client in clients:
        here = {label: some[client] for label, some in found.items() if client in some}
        told = [f"{label} ({_side(gain)})" for label, gain in here.items() if gain.told_apart]
        means = (here[label].mean if label in here else None for label in found)
        rows.append((run.client_name(client), _tested(run, client), *means, ", ".join(told)))
    if found:
        columns = ("client", "test examples", *found, "told apart")
        kinds = ("text", "whole", *[metric.difference_format] * len(found), "text")
        unit = " (percentage points)" if metric.percent else ""
        title = f"Against learning alone: {metric.title}, {END[phase]}{unit}"
        findings = [_in_words(run, label, some, clients) for label, some in found.items()]
        findings += [text for label, some in found.items() for text in _unsettled(run, label, alone[0], some)]
        findings += [text for label, some in found.items() for text in _by_other_metrics(run, label, alone[0], some)]
        note = run.about_clients(" ".join(_how_to_read(run, alone[0], found)))
        yield Table("against_alone", title, columns, tuple(rows), kinds, note, findings=tuple(findings))


def _in_words(run: RunData, label: str, found: dict[int, Gain], clients: list[int]) -> str:
    clear = sorted((gain.mean, client) for client, gain in found.items() if gain.told_apart)
    worse = [client for mean, client in clear if mean < 0]
    named = f" ({first_three([run.client_name(client) for client in worse])})" if worse else ""
    unclear = {*clients} - {client for _, client in clear}
    sizes = sorted({size for client in unclear if (size := _tested(run, client)) is not None})
    several = f"{sizes[0]:,} to {sizes[-1]:,}" if len(sizes) > 1 else f"{sizes[0]:,}" if sizes else ""
    counts = {"better": len(clear) - len(worse), "worse": len(worse), "unclear": len(unclear), "all": len(clients)}
    needed = _needed(run, [gain.chance for client, gain in found.items() if client in unclear])
    said = [f"with {several} test examples"] if sizes else []
    said += [f"it takes {needed} to tell one apart"] if needed else []
    tested = f" ({', '.join(said)})" if said else ""
    return say("against_alone", "counted", label=label, seed=run.in_first_seed, named=named, tested=tested, **counts)


def _needed(run: RunData, chances: Iterable[float | None]) -> str:
    """How far apart two models must be at clients, from the smallest to the largest difference; empty if unknown."""
    metric = run.metric(run.main_metric)
    known = sorted(chance for chance in chances if chance)  # none, or nothing, where there is nothing to go by
    if not known:
        return ""
    if metric.share and known[0] >= 1:  # further apart no two can be
        return "a larger difference than is possible"
    least, most = (two_digits(100 * one if metric.percent else one) for one in (known[0], known[-1]))
    unit = " points" if metric.percent else ""
    if metric.share and known[-1] >= 1:
        return f"a difference of about {least}{unit} or more"
    return f"a difference of about {least}{unit}" if least == most else f"a difference of about {least} to {most}{unit}"


def _unsettled(run: RunData, label: str, alone: str, found: dict[int, Gain]) -> Iterator[str]:
    """Clients that lose much, though few test examples cannot settle it: with more, they may be found to be harmed."""
    metric = run.metric(run.main_metric)
    if not metric.share:
        return
    least = {client: (gain.chance or math.inf) * HINT / far(len(run.clients)) for client, gain in found.items()}
    lost = [(gain.mean, client) for client, gain in found.items() if not gain.told_apart]
    lost = sorted((mean, client) for mean, client in lost if -mean >= max(LARGE, least[client]))
    own, shared = (run.last_means(one, run.end_phase, metric.name) for one in (alone, label))
    named = [
        f"{run.client_name(client)} ({show(shared[client], metric.number_format)}, alone "
        f"{show(own[client], metric.number_format)}, {run.clients[client]['test']:,} test examples)"
        for _, client in lost
    ]
    if named:
        yield say("against_alone", "unsettled", label=label, named=first_three(named))


def _by_other_metrics(run: RunData, label: str, alone: str, found: dict[int, Gain]) -> Iterator[str]:
    """Clients that another metric shows to be worse off: the cautions may name them for it."""
    for metric in (name for name in run.metrics if name != run.main_metric):
        gained = gains(run, label, alone, metric).items()
        worse = sorted((gain.mean, client) for client, gain in gained if gain.told_apart and gain.mean < 0)
        names = [run.client_name(client) for _, client in worse if client not in found or not found[client].told_apart]
        if names:
            yield say("against_alone", "by_metric", metric=metric, label=label, named=first_three(names))


def _how_to_read(run: RunData, alone: str, found: dict[str, dict[int, Gain]]) -> Iterator[str]:
    metric = run.metric(run.main_metric)
    drawn = "in_which_drawn" if run.leaves_out_clients(run.end_phase) else "over_seeds"
    mean = say("note", drawn) if len(run.seeds_of_clients) > 1 else ""
    yield say("against_alone", "shown", alone=alone, model=say("note", MODEL[run.end_phase]), mean=mean)
    if all(gain.chance is None for some in found.values() for gain in some.values()):
        yield say("against_alone", "unknown", metric=metric.name)
    else:
        how = "of_sizes" if metric.name == "mae" else "of_examples" if metric.is_mean else "of_standard_errors"
        chance = "other test examples and other seeds" if mean else "other test examples"
        yield say("against_alone", how, far=f"{far(len(run.clients)):.2g}", chance=chance, metric=metric.name)


def _variance_on_test_examples(
    run: RunData, metric: str, client: int, values: list[tuple[float, float]]
) -> float | None:
    """How much another draw of as many test examples would change the difference of two models; None if unknown."""
    models = [statistics.fmean(of_model) for of_model in zip(*values, strict=True)]
    if run.metric(metric).share:
        # if neither model is better, both have this share; most models err on the same examples, and vary less
        models = [statistics.fmean(models)] * 2
    variances = [variance(run, metric, client, value) for value in models]
    return sum(one for one in variances if one is not None) if None not in variances else None


def _side(gain: Gain) -> str:
    return "better" if gain.mean > 0 else "worse"


def _tested(run: RunData, client: int) -> int | None:
    return None if run.hides_sizes else int(run.clients[client]["test"] or 0)


def _at_the_end(run: RunData, label: str, seed: int, metric: str) -> dict[int, float]:
    if run.cells.get((label, seed), {}).get("status") != "done":
        return {}
    last = run.client_values(label, seed, run.end_phase, metric).last_round()
    return dict(zip(last.clients.tolist(), last.values.tolist(), strict=True))
