"""The cautions about models that serve people badly: no better than guessing, missed cases, clients left behind."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from fedloom.results.comparisons import PHASES, comparisons, main_comparison
from fedloom.results.run_data import RunData
from fedloom.results.run_values import Floats
from fedloom.results.sentences import first_three, say
from fedloom.results.table import show

DRAWS = 20  # of all clients' labels, to see what chance does
EASIER = 0.15  # by this much, guessing is easier on clients' own tests than on everybody's


def no_better_than_guessing(run: RunData) -> Iterator[str]:
    """Algorithms that are not clearly more often right than one that always predicts the most common label."""
    held, found = run.facts.get("labels"), comparisons(run, "accuracy")
    if run.is_network and not held and found and found[0].key in PHASES:
        yield say("caution", "base_rate_unknown")
    if held and found:
        counts = np.array(held["counts"]).sum(axis=0)
        share = float(counts.max() / counts.sum())
        at_server = (run.facts.get("server") or {}).get("test") if found[0].key == "server_test" else None
        tested = at_server or sum(client["test"] for client in run.clients)
        bound = share + 2 * float(np.sqrt(share * (1 - share) / max(tested, 1)))  # chance alone hardly gives more
        labels: dict[str, list[str]] = {"No": [], "Hardly": []}
        for label, seeds in found[0].values.items():
            mean = float(np.mean(list(seeds.values())))
            if mean <= bound:
                labels["No" if mean <= share else "Hardly"].append(f"{label} ({show(mean, 'percent')})")
        guess = {"label": held["classes"][int(counts.argmax())], "share": show(share, "percent")}
        noisy = run.has_secret_noise  # more rounds at the same ε mean more noise in each
        advice = {
            "noise": say("caution", "guessing_noise") if noisy else "",
            "slow": "" if noisy else "more rounds or ",
        }
        for how, some in labels.items():
            if some:
                values = {"how": how, "labels": ", ".join(some), "way": found[0].way, "guess": guess}
                yield say("caution", "guessing", **values, **advice)


def easy_own_tests(run: RunData) -> Iterator[str]:
    """Clients whose own tests have mostly one label: a model that knows little else looks good there."""
    held, main = run.facts.get("labels"), main_comparison(run)
    if not held or main is None or main.metric.name != "accuracy" or main.key == "server_test":
        return
    counts = np.array(held.get("tested", held["counts"]), dtype=np.float64)  # earlier versions have only the latter
    counts = counts[counts.any(axis=1)]
    if not len(counts):
        return
    own = float((counts.max(axis=1) / counts.sum(axis=1)).mean())
    together = float(counts.sum(axis=0).max() / counts.sum())
    if own > max(together, _by_drawing(counts)) + EASIER and not run.evaluation.get("universal"):
        shown = {"own": show(own, "percent"), "together": show(together, "percent")}
        yield say("caution", "easy_own_tests", seed=run.in_first_seed, **shown)


def _by_drawing(counts: Floats) -> float:
    """The mean share of a client's most frequent label if its tests were drawn from everybody's: few vary by chance."""
    generator, shares = np.random.default_rng(0), counts.sum(axis=0) / counts.sum()
    drawn = generator.multinomial(counts.sum(axis=1).astype(np.int64), shares, size=(DRAWS, len(counts)))
    return float((drawn.max(axis=2) / counts.sum(axis=1)).mean())


def misses_most(run: RunData) -> Iterator[str]:
    """Models that find fewer than half of the cases of a rare class, because they predict it from 0.5 on."""
    for name in (name for name in ("sensitivity", "recall") if name in run.metrics):
        last = {label: run.last_round(label, run.end_phase, name).values() for label in run.labels}
        found = {label: [float(one.values.mean()) for one in seeds] for label, seeds in last.items()}
        low = {label: float(np.mean(values)) for label, values in found.items() if values and np.mean(values) < 0.5}
        if low:
            shown = ", ".join(f"{label} ({show(mean, 'percent')})" for label, mean in low.items())
            yield say("caution", "misses_most", metric=name, labels=shown)
            return


def left_behind(run: RunData) -> Iterator[str]:
    """Clients that fare far worse than the others at the end."""
    metric = run.metric(run.main_metric)
    sign = 1 if metric.higher_is_better else -1
    labels: dict[str, list[str]] = {}
    for label in run.labels:
        means = run.last_means(label, run.end_phase, metric.name)
        if len(means) < 4:
            continue
        values = list(means.values())
        far = max(2 * np.std(values), 0.05 if metric.percent else 0.0)
        mean = float(np.mean(values))
        gaps = {client: sign * (mean - value) for client, value in means.items()}
        behind = [client for client, gap in gaps.items() if gap > far > 0 and gap > _by_chance(run, client, mean)]
        if behind:
            behind.sort(key=lambda client: sign * means[client])
            names = first_three([_with_evidence(run, label, client, means[client]) for client in behind])
            labels.setdefault(names, []).append(label)
    side = "below" if metric.higher_is_better else "above"
    seed = run.in_first_seed
    model = {"final": "final model", "post_fit": "models after local training"}[run.end_phase]
    for clients, found in labels.items():
        words = {"labels": ", ".join(found), "model": model, "seed": seed, "side": side, "clients": clients}
        yield say("caution", "left_behind", **words)


def _by_chance(run: RunData, client: int, mean: float) -> float:
    """Three standard deviations of an accuracy on a client's test examples: a few errors more are no finding."""
    if not run.metric(run.main_metric).share:
        return 0.0
    return 3 * math.sqrt(max(mean * (1 - mean), 0.0) / max(int(run.clients[client]["test"]), 1))


def _with_evidence(run: RunData, label: str, client: int, mean: float) -> str:
    """A client with its number, and how many test examples and seeds that rests on."""
    seeds = run.client_values_by_seed(label, run.end_phase, run.main_metric, run.seeds_of_clients).values()
    measured = sum(client in values.last_round().clients for values in seeds)
    shown = show(mean, run.metric(run.main_metric).number_format)
    over = f", measured in {measured} of {len(run.seeds)} seeds" if len(run.seeds_of_clients) > 1 else ""
    return f"{run.client_name(client)} ({shown}; {run.clients[client]['test']:,} test examples{over})"
