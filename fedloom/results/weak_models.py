"""The cautions about models that serve people badly: no better than guessing, missed cases, clients left behind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedloom.data.describe import LABELS_OF_SEED
from fedloom.results.client_chance import by_chance, variance
from fedloom.results.comparisons import PHASES, comparisons, main_comparison
from fedloom.results.run_data import RunData
from fedloom.results.run_values import Floats
from fedloom.results.sentences import first_three, say
from fedloom.results.table import show

DRAWS = 20  # of all clients' labels, to see what chance does
EASIER = 0.15  # by this much, guessing is easier on clients' own tests than on everybody's


@dataclass(frozen=True)
class Guess:
    """What always predicting one label reaches, measured as models are."""

    label: str
    share: float
    error: float  # its standard error on that many test examples
    tested: int

    @classmethod
    def of(cls, classes: Sequence[str], seeds: Sequence[Floats]) -> Guess:
        """The best label for a mean over groups of test examples. A row has a group's number of examples per label.

        Seeds may have test examples of their own. They overlap, so chance is taken to do the same in all of them.

        >>> Guess.of(("alive", "dead"), [np.array([[99.0, 1.0], [1.0, 3.0], [1.0, 3.0]])])
        Guess(label='dead', share=0.503..., error=0.102..., tested=108)
        """
        shares = [groups / groups.sum(axis=1, keepdims=True) for groups in seeds]
        best = int(np.mean([share.mean(axis=0) for share in shares], axis=0).argmax())
        right, sizes = [share[:, best] for share in shares], [groups.sum(axis=1) for groups in seeds]
        errors = [np.sqrt((r * (1 - r) / n).sum()) / len(n) for r, n in zip(right, sizes, strict=True)]
        share, tested = np.mean([one.mean() for one in right]), np.mean([one.sum() for one in sizes])
        return cls(classes[best], float(share), float(np.mean(errors)), round(float(tested)))


def no_better_than_guessing(run: RunData) -> Iterator[str]:
    """Algorithms that are not clearly more often right than one that always predicts the same label."""
    held, found = run.facts.get("labels"), comparisons(run, "accuracy")
    tested = _tested(run, found[0].key) if held and found else []
    if run.is_network and found and not tested and run.main_metric == "accuracy":
        yield say("caution", "base_rate_unknown")
    if not held or not tested:
        return
    guess, labels = Guess.of(held["classes"], tested), dict[str, list[str]]()
    far = guess.share + 2 * guess.error  # chance alone hardly gives more
    for label, seeds in found[0].values.items():
        mean = float(np.mean(list(seeds.values())))
        if mean <= far:
            verdict = "guessing_no" if mean <= guess.share else "guessing_unclear"
            labels.setdefault(verdict, []).append(f"{label} ({show(mean, 'percent')})")
    advice = "guessing_noisy" if run.has_secret_noise else "guessing_trained"
    advice = "guessing_given" if run.facts.get("rounds") == 0 else advice
    shown = {"guess": guess, "share": show(guess.share, "percent"), "far": show(far, "percent"), "way": found[0].way}
    look = "" if {"auroc", "balanced_accuracy"} & {*run.metrics} else say("caution", "guessing_look")
    seed = "" if found[0].key == "server_test" else _in_first_seed(run)
    each = " of each seed" if len(tested) > 1 else ""
    for verdict, some in labels.items():
        sentence = say("caution", verdict, labels=", ".join(some), seed=seed, each=each, **shown)
        yield f"{sentence} {say('caution', advice, look=look)}"


def _tested(run: RunData, key: str) -> list[Floats]:
    """The test examples of each label in groups that count alike: each client's own, or all together.

    There is one array, or one for each seed if they have test examples of their own.
    """
    held = run.facts["labels"]
    known = [run.facts.get(f"{LABELS_OF_SEED}{seed}") for seed in run.seeds]
    every = [{**held, **(one or {})} for one in known] if any(known) else [held]
    return [groups for one in every if len(groups := _groups(run, key, one))]


def _groups(run: RunData, key: str, held: Mapping[str, Any]) -> Floats:
    """One row for each group with test examples; none where nobody counted them, as at the clients of a network."""
    of_server = key == "server_test" and run.server_tests > 0
    # earlier versions have all examples instead of those that are tested
    rows = [held.get("server") or []] if of_server else held.get("tested", held["counts"])
    counts = np.array(rows, dtype=np.float64, ndmin=2)
    counts = counts if key in PHASES else counts.sum(axis=0, keepdims=True)
    return np.array(counts[counts.any(axis=1)])


def _in_first_seed(run: RunData) -> str:
    """Whose labels are known: those of the first seed alone, in runs of earlier versions."""
    return "" if any(name.startswith(LABELS_OF_SEED) for name in run.facts) else run.in_first_seed


def easy_own_tests(run: RunData) -> Iterator[str]:
    """Clients whose own tests have mostly one label: a model that knows little else looks good there."""
    held, main = run.facts.get("labels"), main_comparison(run)
    if not held or main is None or main.metric.name != "accuracy" or main.key == "server_test":
        return
    tested = _tested(run, main.key)
    if not tested:
        return
    own = float(np.mean([(counts.max(axis=1) / counts.sum(axis=1)).mean() for counts in tested]))
    together = float(np.mean([counts.sum(axis=0).max() / counts.sum() for counts in tested]))
    drawn = float(np.mean([_by_drawing(counts) for counts in tested]))
    if own > max(together, drawn) + EASIER and not run.evaluation.get("universal"):
        shown = {"own": show(own, "percent"), "together": show(together, "percent")}
        yield say("caution", "easy_own_tests", seed=_in_first_seed(run), **shown)


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
        # as where clients are compared with learning alone; if that is unknown, the other clients decide
        errors = {client: variance(run, metric.name, client, mean) for client in means}
        chance = {client: by_chance(run, errors[client], seeds) for client, seeds in _gaps(run, label).items()}
        behind = [client for client, gap in gaps.items() if gap > far > 0 and gap > (chance[client] or 0.0)]
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


def _gaps(run: RunData, label: str) -> dict[int, list[float]]:
    """Client → how far from the mean over clients it is, in each seed that measured it."""
    seeds = run.client_values_by_seed(label, run.end_phase, run.main_metric, run.seeds_of_clients).values()
    gaps: dict[int, list[float]] = {}
    for last in (values.last_round() for values in seeds):
        for client, gap in zip(last.clients.tolist(), (last.values - last.values.mean()).tolist(), strict=True):
            gaps.setdefault(client, []).append(gap)
    return gaps


def _with_evidence(run: RunData, label: str, client: int, mean: float) -> str:
    """A client with its number, and how many test examples and seeds that rests on."""
    seeds = run.client_values_by_seed(label, run.end_phase, run.main_metric, run.seeds_of_clients).values()
    measured = sum(client in values.last_round().clients for values in seeds)
    shown = show(mean, run.metric(run.main_metric).number_format)
    over = f", measured in {measured} of {len(run.seeds)} seeds" if len(run.seeds_of_clients) > 1 else ""
    return f"{run.client_name(client)} ({shown}; {run.clients[client]['test']:,} test examples{over})"
