"""The cautions of a report: what a careful reader should know before trusting a run's numbers."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations
from statistics import fmean, median

import numpy as np

from fedloom.data.split import SPLITS
from fedloom.experiment import unequal_weights
from fedloom.experiment.round_rows import LEFT_OUT, OUTLIER
from fedloom.results import wide_intervals
from fedloom.results.badly_served import in_words
from fedloom.results.clients_of_seeds import about_data, coarse_calibration, small_tests, training_sizes, undefined
from fedloom.results.comparisons import PHASES, Comparison, comparisons, main_comparison
from fedloom.results.run_data import RunData
from fedloom.results.run_values import Floats
from fedloom.results.sentences import first_three, say
from fedloom.results.statistics import spread
from fedloom.results.table import two_digits
from fedloom.results.weak_models import easy_own_tests, left_behind, misses_most, no_better_than_guessing
from fedloom.results.weighted_means import another_leads_by_examples

FEW_SEEDS = 6
ABSENT = ("late", "gone", "refused", "failed", "revoked")  # why clients of a network did not answer
FAR_ABOVE_GUESSING = 10
MANY_CLASSES = 1000  # the assumed number of classes where it is not known
DIVERGED = ("diverged_far", "noise_won", "diverged")  # the most serious first


def cautions(run: RunData, labels: Collection[str] | None = None) -> list[str]:
    """All cautions about a run, or those about some of its algorithms, as sentences, the most serious first."""
    checks = (
        *(_unfinished, _lost, _left_out, _arrivals, _abandoned, _absent, _diverged, no_better_than_guessing),
        *(partial(in_words, whole=run), another_leads_by_examples, _same_weights, _overfitting, easy_own_tests),
        *(left_behind, _imitations, _loss_of_batches, _chosen_on_test, about_seeds, small_tests),
        *(coarse_calibration, misses_most, undefined, _incomparable, _withheld),
        *(partial(_data, others={*run.labels} - {*(labels or run.labels)}), _network),
    )
    about = run if labels is None else run.of_algorithms(labels)
    return [caution for check in checks for caution in check(about)]


def about_numbers(run: RunData, labels: Collection[str] | None = None) -> list[str]:
    """The cautions without which final numbers, or those of some algorithms, mislead. They begin with the labels."""
    checks = (_left_out, _diverged, partial(in_words, whole=run), _same_weights, _incomparable)
    about = run if labels is None else run.of_algorithms(labels)
    return [caution for check in checks for caution in check(about)]


def on_screen(run: RunData) -> list[str]:
    """The cautions below a run's table in a terminal."""
    checks = (no_better_than_guessing, about_numbers, another_leads_by_examples, easy_own_tests, misses_most)
    return [caution for check in checks for caution in check(run)]


def _loss_of_batches(run: RunData) -> Iterator[str]:
    """A loss that is no mean over examples, such as one with weights of classes: its number depends on the batches."""
    if (run.facts.get("setup") or {}).get("loss_is_mean") is False:
        yield say("caution", "loss_of_batches")


def _unfinished(run: RunData) -> Iterator[str]:
    waiting = []
    for (label, seed), cell in run.cells.items():
        if cell["status"] == "failed":
            values = {"label": label, "seed": seed, "rounds": cell["rounds_done"], "error": cell["error"]}
            yield say("caution", "failed", **values)
        elif cell["status"] != "done":
            waiting.append(f"{label} (seed {seed})")
    if waiting:
        yield say("caution", "unfinished", cells=", ".join(waiting))


def _lost(run: RunData) -> Iterator[str]:
    """Rounds that the database does not have, such as after a copy without its log."""
    for label, seed in run.cells:
        known = {row["round"] for row in run.rows("rounds", label, seed)} or {0}
        lost = sorted({*range(1, max(known))} - known)
        if lost:
            values = {"rounds": _rounds(len(lost)), "first": lost[0], "last": lost[-1]}
            yield say("caution", "lost", label=label, seed=seed, **values)


def _left_out(run: RunData) -> Iterator[str]:
    """Clients whose updates did not count."""
    reasons = {
        LEFT_OUT: "that were not finite, or made the model so",
        OUTLIER: "that were far too long (see cohort.outlier_factor)",
    }
    for label, seed in run.cells:
        for why, words in reasons.items():
            rounds = Counter(name for name, _ in run.marked_clients(label, seed, why))
            if rounds:
                names = first_three([f"{client} ({_rounds(count)})" for client, count in rounds.most_common()])
                yield say("caution", "left_out", label=label, seed=seed, why=words, clients=names)


def _arrivals(run: RunData) -> Iterator[str]:
    """Clients that joined after the first round, or whose agents were replaced."""
    for label, seed in run.cells:
        for why in ("joined", "replaced"):
            clients = [f"{name} (round {round})" for name, round in run.marked_clients(label, seed, why)]
            if clients:
                yield say("caution", why, label=label, seed=seed, clients=first_three(clients))


def _abandoned(run: RunData) -> Iterator[str]:
    """Rounds that did not change the model."""
    for label, seed in run.cells:
        complete = [row["complete"] for row in run.rows("rounds", label, seed)]
        lost = len(complete) - sum(complete)
        if lost:
            yield say("caution", "abandoned", label=label, seed=seed, lost=lost, rounds=_rounds(len(complete)))


def _absent(run: RunData) -> Iterator[str]:
    """Rounds without some of the clients that were asked, and final numbers without some of the clients."""
    for label, seed in run.cells:
        marks = [mark for why in ABSENT for mark in run.marked_clients(label, seed, why)]
        costs = run.costs(label, seed)
        took_part = dict(zip(costs.rounds.tolist(), costs.participants.tolist(), strict=True))
        missing = Counter(round for _, round in marks if took_part.get(round))  # others are abandoned
        if missing:
            least = min(missing, key=lambda round: took_part[round])
            fewest = f"{took_part[least]} of {took_part[least] + missing[least]}"
            names = Counter(name for name, _ in marks)
            clients = first_three([f"{name} ({_rounds(count)})" for name, count in names.most_common()])
            values = {"short": len(missing), "rounds": _rounds(len(took_part)), "fewest": fewest, "clients": clients}
            yield say("caution", "absent", label=label, seed=seed, **values)
        if marks and 0 < (measured := len(run.client_values(label, seed, "final", "loss"))) < len(run.clients):
            yield say("caution", "measured", label=label, seed=seed, measured=measured, all=len(run.clients))


def _diverged(run: RunData) -> Iterator[str]:
    """A loss that ends far above its own lowest value, or far above that of guessing."""
    found: dict[tuple[str, str], dict[str, str]] = {}  # the sentence and the loss → label → what to say of it
    for label in run.labels:
        verdicts = [(*said, when) for when, seeds in _losses(run, label) if (said := _verdict(run, seeds)) is not None]
        if verdicts:
            worst, number, when = min(verdicts, key=lambda one: DIVERGED.index(one[0]))
            found.setdefault((worst, when), {})[label] = number
    for name, when in sorted(found, key=lambda one: DIVERGED.index(one[0])):
        labels, numbers = (", ".join(some) for some in (found[name, when], found[name, when].values()))
        yield say("caution", name, labels=labels, when=when, numbers=numbers, guess=_guess(run))


def _losses(run: RunData, label: str) -> Iterator[tuple[str, dict[int, tuple[float, float]]]]:
    """Which test loss → seed → where it ended, and how many times as high as its lowest value."""
    of_model, at_clients = dict[int, tuple[float, float]](), dict[int, tuple[float, float]]()
    for seed in run.seeds:
        _, curve = run.server_values(label, seed, "loss")
        if len(curve):
            of_model[seed] = float(curve[-1]), _rise([curve])
        known = run.client_values(label, seed, "post_fit", "loss")
        if len(known):
            curves = [known.by_round().mean]
            end = float(curves[0][-1])
            if run.leaves_out_clients("post_fit"):  # means over other clients in every round say nothing about a rise
                curves = [known.values[known.clients == client] for client in known.last_round().clients]
            at_clients[seed] = end, _rise(curves)
    yield " of the global model", of_model
    yield " after local training", at_clients


def _rise(curves: Sequence[Floats]) -> float:
    """How many times as high as their lowest value losses ended; 0 if too few rounds are known."""
    rises = [float(one[-1] / one.min()) for one in curves if len(one) > 2 and one.min() > 0]
    return median(rises) if rises else 0.0


def _verdict(run: RunData, seeds: Mapping[int, tuple[float, float]]) -> tuple[str, str] | None:
    """What is wrong with a loss, and its number: the mean if noise may be why, otherwise that of the worst seed."""
    if not seeds:
        return None
    ends, rises = ({seed: pair[place] for seed, pair in seeds.items()} for place in (0, 1))
    mean, guess, several = fmean(ends.values()), _guess(run), len(run.seeds) > 1
    highest, steepest = max(ends, key=ends.__getitem__), max(rises, key=rises.__getitem__)
    if mean > guess and run.has_secret_noise and run.facts.get("rounds"):
        return "noise_won", f"{mean:.3g}" + (f" (mean over {_seeds(len(ends))})" if several else "")
    if ends[highest] > FAR_ABOVE_GUESSING * guess:  # even if it was as high from the first round on
        return "diverged_far", f"{ends[highest]:.3g}" + (f" (seed {highest})" if several else "")
    if rises[steepest] > 2:
        return "diverged", f"{rises[steepest]:.1f}" + (f" (seed {steepest})" if several else "")
    return None


def _guess(run: RunData) -> float:
    """The loss of guessing all classes alike; infinite if the loss is in other units."""
    classes = len((run.facts.get("labels") or {}).get("classes") or ()) or MANY_CLASSES
    of_classes = (run.description.get("task") or {}).get("loss") in ("cross_entropy", "bce")
    return math.log(max(classes, 2)) if of_classes else math.inf


def _same_weights(run: RunData) -> Iterator[str]:
    """Algorithms that computed the same: a method that nothing calls, or a setting without effect."""
    ended: dict[tuple[str | bytes, ...], list[str]] = {}
    for label in run.labels:
        cells = [run.cells[label, seed] for seed in run.seeds if (label, seed) in run.cells]
        if len(cells) == len(run.seeds) and all(one["weights_sha256"] and one["rounds_done"] for one in cells):
            # clients may have models of their own beside the same global one, as in Ditto
            measured = [
                run.client_values(label, seed, run.end_phase, "loss", one) for seed in run.seeds for one in SPLITS
            ]
            if any(map(len, measured)):
                losses = (one.values.tobytes() for one in measured)
                ended.setdefault((*(one["weights_sha256"] for one in cells), *losses), []).append(label)
    for labels in ended.values():
        if len(labels) > 1:
            yield say("caution", "same_weights", labels=" and ".join(labels))


def _overfitting(run: RunData) -> Iterator[str]:
    """Local training that helps on the training split but not on the test split."""
    metric = run.metric(run.main_metric)
    scale, unit = (100, " points") if metric.percent else (1, "")
    gains = []
    for label in run.labels:
        if run.is_pooled(label):  # it does not train at clients
            continue
        train, test = (_gain(run, label, split) for split in ("train", "test"))
        if train is not None and test is not None and train > 0.005 and test <= 0:
            gains.append(f"{label} (by {two_digits(train * scale)}{unit}, and by {two_digits(test * scale)})")
    if gains:
        yield say("caution", "overfitting", metric=metric.name, gains=", ".join(gains))


def _gain(run: RunData, label: str, split: str) -> float | None:
    """How much local training improves the main metric in the last round, on average over seeds."""
    gains = []
    for seed in run.seeds:
        found = (run.client_values(label, seed, phase, run.main_metric, split) for phase in ("pre_fit", "post_fit"))
        before, after = (values.last_round() for values in found)
        before = before.keep(np.isin(before.clients, after.clients))  # not all clients may have been drawn
        if len(before) and len(after):
            gains.append(float(after.values.mean() - before.values.mean()))
    sign = 1 if run.metric(run.main_metric).higher_is_better else -1
    return sign * float(np.mean(gains)) if gains else None


def _imitations(run: RunData) -> Iterator[str]:
    """Clients whose names readers could take for another's."""
    marked = [name for name, row in zip(run.client_names, run.clients, strict=True) if name != str(row["name"])]
    if marked:
        yield (
            f"{first_three(marked)}: names that look like another's, or that hide characters. Here they have the "
            "client's number, and unusual characters are written as their numbers. Find out whether a site imitates "
            "another."
        )


def _chosen_on_test(run: RunData) -> Iterator[str]:
    if run.result.rule == "best":
        yield say("caution", "best_round")
    if run.evaluation.get("stop") == "target":
        yield say("caution", "stopped_at_target")


def about_seeds(run: RunData) -> Iterator[str]:
    """What few seeds, or seeds that vary little, leave open."""
    if len(run.seeds) == 1:
        yield say("caution", "one_seed")
        return
    main = main_comparison(run)
    yield from _few_seeds(main) if main is not None else ()
    yield from wide_intervals.cautions(run)
    alike: dict[str, list[str]] = {}  # label → metrics
    for metric in run.metrics:
        for label, values in next((one.values for one in comparisons(run, metric)), {}).items():
            if spread(list(values.values())).std == 0:
                alike.setdefault(label, []).append(metric)
    for metrics_alike in dict.fromkeys(map(tuple, alike.values())):
        labels = ", ".join(label for label, some in alike.items() if tuple(some) == metrics_alike)
        yield say("caution", "no_spread", labels=labels, metrics=", ".join(metrics_alike))
    yield from _fixed(run)


def _fixed(run: RunData) -> Iterator[str]:
    """What all seeds share, so that intervals are not about it."""
    seed = (run.description.get("task") or {}).get("seed")  # of a Python program it is not known
    one_split, one_start = run.has_one_split, seed not in (None, "run")
    parts = {"one partition": one_split, "one split": one_split, "one set of initial weights": one_start}
    varied = {
        "other splits": not one_split,
        "other initial weights": seed == "run",
        "which clients take part": run.sampling is not None,
        "the noise of differential privacy": run.has_secret_noise,
        "the order of batches": True,
    }
    fixed, about = ([name for name, holds in some.items() if holds] for some in (parts, varied))
    if not fixed:
        return
    data = run.description.get("data")
    own = data.get("split_column") if isinstance(data, Mapping) else None  # a Python program may have made the data
    tables = " and ".join(name for name, holds in (("[data]", one_split), ("[task]", one_start)) if holds)
    advice = say("caution", "fixed_by_column" if own and one_split else "fixed_by_seed", column=own, tables=tables)
    nothing = ", and say nothing about other data" if one_split else ""
    shared, varying = (" and ".join(filter(None, [", ".join(some[:-1]), some[-1]])) for some in (fixed, about))
    yield say("caution", "fixed", fixed=shared, varied=varying, nothing=nothing, advice=advice)


def _few_seeds(main: Comparison) -> Iterator[str]:
    """Algorithms with few seeds, and pairs that share few: runs that are compared may have different seeds."""
    counts = {label: len(seeds) for label, seeds in main.values.items()}
    if len({*counts.values()}) == 1 and (same := min(counts.values())) < FEW_SEEDS:
        yield say("caution", "few_seeds" if same > 1 else "one_seed", seeds=same)
    elif few := [label for label, count in counts.items() if count < FEW_SEEDS]:
        yield say("caution", "few_seeds_of", labels=", ".join(f"{label} ({_seeds(counts[label])})" for label in few))
    common = {(a, b): len(main.values[a].keys() & main.values[b].keys()) for a, b in combinations(main.values, 2)}
    fewest = min(common, key=lambda pair: common[pair], default=None)
    if fewest is not None and common[fewest] < min(FEW_SEEDS, *counts.values()):
        yield say("caution", "few_in_common", count=common[fewest], pair=" and ".join(fewest))


def _seeds(count: int) -> str:
    return f"{count} seed" + ("s" if count != 1 else "")


def _incomparable(run: RunData) -> Iterator[str]:
    """Metrics that no client has, and those that algorithms have at different clients."""
    for name in (name for name, metric in run.metrics.items() if not metric.is_mean and name not in run.withheld):
        values = [[run.last_round(label, "post_fit", one) for label in run.labels] for one in ("loss", name)]
        if any(values[0]) and not any(values[1]):
            yield say("caution", "undefined_everywhere", metric=name)
        uneven = next((one.common for one in comparisons(run, name) if one.common), None)
        if uneven:
            counts = ", ".join(f"{count} (seed {seed})" for seed, count in uneven.items())
            yield say("caution", "uneven", metric=name, counts=counts)


def _withheld(run: RunData) -> Iterator[str]:
    """Metrics that policies of sites withhold, and those that cannot be computed over all clients' examples."""
    for name, clients in run.withheld.items():
        names = first_three([run.client_name(client) for client in clients])
        allow = json.dumps(["loss", *run.wanted_metrics])
        yield say("caution", "withheld", metric=name, clients=names, allow=allow)
    scored = run.facts.get("sending scores") or ()
    if run.is_network and len(scored) < len(run.clients):
        others = [name for name, metric in run.metrics.items() if not metric.is_mean]
        known = [name for name in others if any(one.key in PHASES for one in comparisons(run, name))]
        if known:
            yield say("caution", "not_pooled", metrics=", ".join(known))


def _data(run: RunData, others: Collection[str] = ()) -> Iterator[str]:
    """What algorithms say about the task, but for some, and what `fedloom data describe` warns of."""
    yield from about_algorithms(run, others)
    yield from about_weights(run, {label: (run, label) for label in run.labels})
    yield from about_data(run)


def about_weights(run: RunData, sources: Mapping[str, tuple[RunData, str]]) -> Iterator[str]:
    """Whether algorithms, each with its run and its label there, weigh clients in different ways."""
    ways = {
        label: (source.facts.get(unequal_weights.FACT) or {}).get(there) for label, (source, there) in sources.items()
    }
    known = {label: way for label, way in ways.items() if way is not None}
    yield from unequal_weights.caution(known, *training_sizes(run))


def about_algorithms(run: RunData, others: Collection[str]) -> Iterator[str]:
    """What algorithms say about the task, but for some, without what is about several of them together.

    What several of them say in the same words is one sentence.
    """
    left_out = [f"{label}: " for label in others]
    if unequal_weights.FACT in run.facts:  # so the sentence can be made again for these algorithms
        left_out.append(unequal_weights.BEGINNING)
    said = run.facts.get("cautions about algorithms") or ()
    merged: dict[str, list[str]] = {}  # what is said → the labels of the algorithms that say it
    for text in (text for text in said if not text.startswith(tuple(left_out))):
        label, _, rest = text.partition(": ")
        if label in run.labels:
            merged.setdefault(rest, []).append(label)
        else:
            merged.setdefault(text, [])
    yield from (f"{', '.join(labels)}: {text}" if labels else text for text, labels in merged.items())


def _network(run: RunData) -> Iterator[str]:
    if run.is_network and "secure_aggregation" not in (run.description.get("privacy") or {}):
        yield say("caution", "network")
    if run.is_network and (run.description.get("cohort") or {}).get("mode") == "async":
        yield say("caution", "asynchronous")


def _rounds(count: int) -> str:
    return f"{count} round" if count == 1 else f"{count} rounds"
