"""What a careful reader should know before believing a run's numbers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fedloom.results import headline
from fedloom.results.run_data import RunData
from fedloom.results.statistics import SEEDS_FOR_A_TEST
from fedloom.results.table import show

SMALL_TEST = 10  # a client's accuracy on fewer examples moves in steps of more than ten points


def cautions(view: RunData) -> list[str]:
    """In sentences, the gravest first."""
    checks = (
        _unfinished,
        _not_finite,
        _abandoned,
        _diverged,
        _overfitting,
        _left_behind,
        _chosen_on_test,
        _seeds,
        _small_tests,
        _network,
    )
    return [found for check in checks for found in check(view)]


def _unfinished(view: RunData) -> Iterator[str]:
    for (label, seed), cell in view.cells.items():
        if cell["status"] == "failed":
            yield f"{label} (seed {seed}) failed after {cell['rounds_done']} rounds: {cell['error']}"
    waiting = [
        f"{label} (seed {seed})"
        for (label, seed), cell in view.cells.items()
        if cell["status"] not in ("done", "failed")
    ]
    if waiting:
        yield f"Not finished, and left out of comparisons: {', '.join(waiting)}."


def _not_finite(view: RunData) -> Iterator[str]:
    """Clients that a robust rule had to leave out."""
    for label, seed in view.cells:
        rounds: dict[str, int] = {}
        for client in view.left_out(label, seed):
            rounds[client] = rounds.get(client, 0) + 1
        if rounds:
            worst = sorted(rounds, key=lambda client: -rounds[client])
            shown = [f"{client} ({rounds[client]} {_rounds(rounds[client])})" for client in worst[:3]]
            more = f" and {len(worst) - 3} more" if len(worst) > 3 else ""
            yield f"{label} (seed {seed}) left out updates that were not finite: {', '.join(shown)}{more}."


def _abandoned(view: RunData) -> Iterator[str]:
    """Rounds that changed nothing."""
    for label, seed in view.cells:
        lost, all_rounds = view.abandoned(label, seed)
        if lost:
            yield (
                f"{label} (seed {seed}): {lost} of {all_rounds} {_rounds(all_rounds)} did not count, because too few "
                "clients took part or sent valid updates: the model stayed as it was."
            )


def _rounds(count: int) -> str:
    return "round" if count == 1 else "rounds"


def _diverged(view: RunData) -> Iterator[str]:
    """A loss that ends far above its own best."""
    for label in view.labels:
        worst = 0.0
        for seed in view.seeds:
            _, values = headline.curve(view, label, seed, "loss")
            if len(values) > 2 and values.min() > 0:
                worst = max(worst, float(values[-1] / values.min()))
        if worst > 2:
            yield (
                f"{label} may diverge or overfit: its test loss ended {worst:.1f} times as high as its lowest value. "
                "A smaller lr, fewer epochs or a clip may help."
            )


def _overfitting(view: RunData) -> Iterator[str]:
    """Local training helps on the training split and not on the test split."""
    metric = view.main_metric
    kind = view.metric(metric)
    for label in view.labels:
        gains = {}
        for split in ("train", "test"):
            found = []
            for seed in view.seeds:
                before, after = (
                    view.client_values(label, seed, phase, metric, split).by_round()
                    for phase in ("pre_fit", "post_fit")
                )
                if len(before.index) and len(after.index):
                    gain = float(after.mean[-1] - before.mean[-1])
                    found.append(gain if kind.higher_is_better else -gain)
            if found:
                gains[split] = float(np.mean(found))
        if len(gains) == 2 and gains["train"] > 0.005 and gains["test"] <= 0:
            unit = "points" if kind.percent else kind.name
            scale = 100 if kind.percent else 1
            yield (
                f"{label} overfits at its clients: in the last round local training improved {metric} by "
                f"{gains['train'] * scale:.2g} {unit} on the training splits and by {gains['test'] * scale:.2g} on the "
                "test splits."
            )


def _left_behind(view: RunData) -> Iterator[str]:
    """Clients that fare far worse than the others at the end."""
    metric = view.main_metric
    kind = view.metric(metric)
    behind: dict[str, list[str]] = {}
    for label in view.labels:
        runs = view.last_round(label, "post_fit", metric)
        values: dict[int, list[float]] = {}
        for run in runs.values():
            for client, value in zip(run.clients, run.values, strict=True):
                values.setdefault(int(client), []).append(float(value))
        if len(values) < 4:
            continue
        means = {client: float(np.mean(found)) for client, found in values.items()}
        middle, spread = np.mean(list(means.values())), np.std(list(means.values()))
        sign = 1 if kind.higher_is_better else -1
        far = max(2 * spread, 0.05 if kind.percent else 0.0)
        found = sorted(
            (c for c, value in means.items() if sign * (middle - value) > far > 0), key=lambda c: sign * means[c]
        )
        if found:
            shown = [
                f"{view.client_name(c)} ({show(means[c], 'percent' if kind.percent else 'number')})" for c in found[:3]
            ]
            more = f" and {len(found) - 3} more" if len(found) > 3 else ""
            behind.setdefault(", ".join(shown) + more, []).append(label)
    for clients, labels in behind.items():
        yield f"Left behind with {', '.join(labels)}, more than two standard deviations below the mean: {clients}."


def _chosen_on_test(view: RunData) -> Iterator[str]:
    if view.result.rule == "best":
        yield "The numbers are those of the best round, chosen on the test data itself: they are optimistic."
    if (view.description.get("evaluate") or {}).get("stop") == "target":
        yield "Runs end when test data says that the target is reached: compare rounds and bytes, not final numbers."


def _seeds(view: RunData) -> Iterator[str]:
    if len(view.seeds) == 1:
        yield "One seed: nothing here says what chance would have changed. Use at least three, better six or more."
        return
    if len(view.seeds) < SEEDS_FOR_A_TEST:
        yield f"{len(view.seeds)} seeds: intervals are wide, and tests need at least {SEEDS_FOR_A_TEST}."
    fixed = ["one partition and one split"] if len(view.data_fingerprints) == 1 else []
    if (view.description.get("task") or {}).get("seed", "run") != "run":
        fixed.append("one set of initial weights")
    if fixed:
        yield (
            f"All seeds share {' and '.join(fixed)}: intervals are about who takes part and the order of batches, and "
            'say nothing about other data. seed = "run" in [data] and [task] varies these too.'
        )


def _small_tests(view: RunData) -> Iterator[str]:
    sizes = [client["test"] for client in view.clients]
    small = sum(0 < size < SMALL_TEST for size in sizes)
    if small:
        verb = "client has" if small == 1 else "clients have"
        yield f"{small:,} of {len(sizes):,} {verb} fewer than {SMALL_TEST} test examples: their own numbers are coarse."


def _network(view: RunData) -> Iterator[str]:
    if view.facts.get("network"):
        yield "The run was federated without secure aggregation: the coordinator could read each site's update."
