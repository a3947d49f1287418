"""The cautions of a report: what a careful reader should know before trusting a run's numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from fedloom.experiment.round_rows import LEFT_OUT, OUTLIER
from fedloom.results import headline
from fedloom.results.run_data import RunData
from fedloom.results.statistics import SEEDS_FOR_A_TEST
from fedloom.results.table import show, two_digits

SMALL_TEST = 10  # with fewer test examples, a client's accuracy moves in steps of more than ten points


def cautions(run: RunData) -> list[str]:
    """All cautions about a run, as sentences, the most serious first."""
    checks = (
        *(_unfinished, _left_out, _abandoned, _diverged, _overfitting),
        *(_left_behind, _imitations, _chosen_on_test, _seeds, _small_tests, _network),
    )
    return [caution for check in checks for caution in check(run)]


def _unfinished(run: RunData) -> Iterator[str]:
    waiting = []
    for (label, seed), cell in run.cells.items():
        if cell["status"] == "failed":
            yield f"{label} (seed {seed}) failed after {cell['rounds_done']} rounds: {cell['error']}"
        elif cell["status"] != "done":
            waiting.append(f"{label} (seed {seed})")
    if waiting:
        yield f"Not finished, and left out of comparisons: {', '.join(waiting)}."


def _left_out(run: RunData) -> Iterator[str]:
    """Clients whose updates did not count."""
    reasons = {LEFT_OUT: "that were not finite", OUTLIER: "far longer than the others (see cohort.outlier_factor)"}
    for label, seed in run.cells:
        for why, words in reasons.items():
            rounds = Counter(run.left_out(label, seed, why))
            if rounds:
                names = _first_three([f"{client} ({_rounds(count)})" for client, count in rounds.most_common()])
                yield f"{label} (seed {seed}) left out updates {words}: {names}."


def _abandoned(run: RunData) -> Iterator[str]:
    """Rounds that did not change the model."""
    for label, seed in run.cells:
        lost, all_rounds = run.abandoned(label, seed)
        if lost:
            yield (
                f"{label} (seed {seed}): {lost} of {_rounds(all_rounds)} did not count, because too few clients took "
                "part or sent valid updates. These rounds left the model unchanged."
            )


def _diverged(run: RunData) -> Iterator[str]:
    """A loss that ends far above its own lowest value."""
    for label in run.labels:
        curves = [values for _, values in headline.curves(run, label, "loss").values()]
        ratios = [float(values[-1] / values.min()) for values in curves if len(values) > 2 and values.min() > 0]
        if ratios and max(ratios) > 2:
            yield (
                f"{label} may diverge or overfit: its test loss ended {max(ratios):.1f} times as high as its lowest "
                "value. Try a smaller lr, fewer epochs, or clip."
            )


def _overfitting(run: RunData) -> Iterator[str]:
    """Local training that helps on the training split but not on the test split."""
    metric = run.metric(run.main_metric)
    scale, unit = (100, "points") if metric.percent else (1, metric.name)
    for label in run.labels:
        if run.is_pooled(label):  # it does not train at clients
            continue
        train, test = (_gain(run, label, split) for split in ("train", "test"))
        if train is not None and test is not None and train > 0.005 and test <= 0:
            yield (
                f"{label} overfits at its clients: in the last round, local training improved {metric.name} by "
                f"{two_digits(train * scale)} {unit} on the training splits and by {two_digits(test * scale)} on the "
                "test splits."
            )


def _gain(run: RunData, label: str, split: str) -> float | None:
    """How much local training improves the main metric in the last round, on average over seeds."""
    gains = []
    for seed in run.seeds:
        found = (run.client_values(label, seed, phase, run.main_metric, split) for phase in ("pre_fit", "post_fit"))
        before, after = (values.by_round() for values in found)
        if len(before.index) and len(after.index):
            gains.append(float(after.mean[-1] - before.mean[-1]))
    sign = 1 if run.metric(run.main_metric).higher_is_better else -1
    return sign * float(np.mean(gains)) if gains else None


def _left_behind(run: RunData) -> Iterator[str]:
    """Clients that fare far worse than the others at the end."""
    metric = run.metric(run.main_metric)
    sign = 1 if metric.higher_is_better else -1
    labels: dict[str, list[str]] = {}
    for label in run.labels:
        means = run.last_means(label, "post_fit", metric.name)
        if len(means) < 4:
            continue
        values = list(means.values())
        far = max(2 * np.std(values), 0.05 if metric.percent else 0.0)
        behind = [client for client in means if sign * (np.mean(values) - means[client]) > far > 0]
        if behind:
            behind.sort(key=lambda client: sign * means[client])
            names = [f"{run.client_name(client)} ({show(means[client], metric.number_format)})" for client in behind]
            labels.setdefault(_first_three(names), []).append(label)
    side = "below" if metric.higher_is_better else "above"
    for clients, found in labels.items():
        yield f"Left behind with {', '.join(found)}, more than two standard deviations {side} the mean: {clients}."


def _imitations(run: RunData) -> Iterator[str]:
    """Clients whose names readers could take for another's."""
    marked = [name for name, row in zip(run.client_names, run.clients, strict=True) if name != str(row["name"])]
    if marked:
        yield (
            f"{_first_three(marked)}: names that look like another's, or that hide characters. Here they have the "
            "client's number, and unusual characters are written as their numbers. Find out whether a site imitates "
            "another."
        )


def _chosen_on_test(run: RunData) -> Iterator[str]:
    if run.result.rule == "best":
        yield "The numbers are those of the best round. It is chosen on the test data itself, so they are optimistic."
    if run.evaluation.get("stop") == "target":
        yield "Runs end when the test data says that the target is reached. Compare rounds and bytes, not final values."


def _seeds(run: RunData) -> Iterator[str]:
    if len(run.seeds) == 1:
        yield "One seed: nothing here shows what chance could change. Use at least three seeds, better six or more."
        return
    if len(run.seeds) < SEEDS_FOR_A_TEST:
        yield f"{len(run.seeds)} seeds: intervals are wide, and tests need at least {SEEDS_FOR_A_TEST}."
    fixed = ["one partition and one split"] if len(set(run.data_fingerprints.values())) == 1 else []
    if (run.description.get("task") or {}).get("seed", "run") != "run":
        fixed.append("one set of initial weights")
    if fixed:
        yield (
            f"All seeds share {' and '.join(fixed)}: intervals are about which clients take part and the order of "
            'batches, and say nothing about other data. Set seed = "run" in [data] and [task] to vary these too.'
        )


def _small_tests(run: RunData) -> Iterator[str]:
    sizes = [client["test"] for client in run.clients]
    small = sum(0 < size < SMALL_TEST for size in sizes)
    if small:
        verb = "client has" if small == 1 else "clients have"
        yield f"{small:,} of {len(sizes):,} {verb} fewer than {SMALL_TEST} test examples: their own numbers are coarse."


def _network(run: RunData) -> Iterator[str]:
    if run.facts.get("network"):
        yield "The run was federated without secure aggregation: the coordinator could read each site's update."


def _rounds(count: int) -> str:
    return f"{count} round" if count == 1 else f"{count} rounds"


def _first_three(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
