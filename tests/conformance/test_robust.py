"""Robust rules against brute force: written again from the papers, with loops instead of tensor operations."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn

from fedloom.algorithm import Algorithm, Update
from fedloom.algorithms import ALGORITHMS, FedAvg
from fedloom.data.federation import Federation
from fedloom.errors import InputError, TrainingError
from fedloom.federation.engine import Evaluation, fit
from fedloom.task import Task
from fedloom.training.clients import Clients
from fedloom.tree import Tree
from tests.conformance.transcriptions import Attendance
from tests.conftest import ALL_TRAIN, Pictures, federation

robust = pytest.importorskip("fedloom.aggregation.robust")

Vectors = NDArray[np.float64]  # one row per client
WIDTH = 5
seeds = st.integers(0, 2**32 - 1)


def rule(name: str, **parameters: Any) -> Callable[[Any, Any], Any]:
    return robust.RULES[name](**parameters)


def apply(name: str, x: Vectors, weights: Vectors | None = None, **parameters: Any) -> Vectors:
    """A rule on rows of numbers, which it sees as trees of two leaves."""
    stacked = {"a": torch.from_numpy(x[:, :3].copy()), "b": torch.from_numpy(x[:, 3:].copy()).reshape(len(x), 1, -1)}
    given_weights = torch.ones(len(x), dtype=torch.float64) if weights is None else torch.from_numpy(weights)
    before = {leaf: stacked[leaf].clone() for leaf in stacked}
    found = rule(name, **parameters)(stacked, given_weights)
    assert all(torch.equal(before[leaf], stacked[leaf]) for leaf in stacked), "the rule changed its input"
    assert found["a"].shape == (3,)
    assert found["b"].shape == (1, WIDTH - 3)
    return np.concatenate([found["a"].numpy(), found["b"].numpy().ravel()])


def drawn(seed: int, clients: int, scale: float = 1.0) -> Vectors:
    return np.random.default_rng(seed).normal(size=(clients, WIDTH)) * scale


def coarse(seed: int, clients: int) -> Vectors:
    """Many equal numbers."""
    return np.random.default_rng(seed).integers(-2, 3, size=(clients, WIDTH)).astype(np.float64)


def drawn_weights(seed: int, clients: int) -> Vectors:
    return np.random.default_rng(seed + 1).integers(1, 30, size=clients).astype(np.float64)


# --- brute force


def middle(values: list[float]) -> float:
    values, half = sorted(values), len(values) // 2
    return values[half] if len(values) % 2 else (values[half - 1] + values[half]) / 2


def median(x: Vectors) -> Vectors:
    return np.array([middle(list(column)) for column in x.T])


def trimmed_mean(x: Vectors, trim: int) -> Vectors:
    return np.array([sum(sorted(column)[trim : len(column) - trim]) / (len(column) - 2 * trim) for column in x.T])


def krum_scores(x: Vectors, byzantine: int) -> list[float]:
    """For each change the sum of its squared distances to the n − f − 2 nearest others."""
    near = max(len(x) - byzantine - 2, 1)
    return [
        sum(sorted(float(((x[i] - x[j]) ** 2).sum()) for j in range(len(x)) if j != i)[:near]) for i in range(len(x))
    ]


def krum(x: Vectors, byzantine: int) -> Vectors:
    return x[int(np.argmin(krum_scores(x, byzantine)))]


def multi_krum(x: Vectors, byzantine: int, keep: int | None = None) -> Vectors:
    best = np.argsort(krum_scores(x, byzantine), kind="stable")[: keep or len(x) - byzantine]
    return x[best].mean(0)


def bulyan(x: Vectors, byzantine: int) -> Vectors:
    rest, chosen = list(range(len(x))), []
    while len(chosen) < len(x) - 2 * byzantine:
        chosen.append(rest.pop(int(np.argmin(krum_scores(x[rest], byzantine)))))
    return bulyan_of(x, chosen, byzantine)


def bulyan_of(x: Vectors, chosen: Iterable[int], byzantine: int) -> Vectors:
    """Bulyan's second half: for each coordinate the mean of the θ − 2f chosen values nearest to their median."""
    columns = []
    for column in x[list(chosen)].T:
        centre = middle(list(column))
        nearest = sorted(column, key=lambda value, centre=centre: abs(value - centre))
        nearest = nearest[: len(nearest) - 2 * byzantine]
        columns.append(sum(nearest) / len(nearest))
    return np.array(columns)


def chosen_by_bulyan(x: Vectors, byzantine: int) -> set[frozenset[int]]:
    """All that Bulyan's first half may choose, if ties are broken in any way."""
    found = {frozenset[int]()}
    for _ in range(len(x) - 2 * byzantine):
        longer = set()
        for chosen in found:
            rest = [i for i in range(len(x)) if i not in chosen]
            scores = krum_scores(x[rest], byzantine)
            longer |= {chosen | {i} for i, score in zip(rest, scores, strict=True) if score <= min(scores) + 1e-12}
        found = longer
    return found


def shortened(row: Vectors, longest: float) -> Vectors:
    length = float(np.sqrt((row**2).sum()))
    return row if length <= longest else row / length * longest


def centred_clipping(x: Vectors, radius: float, iterations: int) -> Vectors:
    centre = np.zeros(x.shape[1])
    for _ in range(iterations):
        centre = centre + sum(shortened(row - centre, radius) for row in x) / len(x)
    return centre


def norm_bounding(x: Vectors, weights: Vectors, bound: float) -> Vectors:
    short = [shortened(row, bound) for row in x]
    return sum(weight * row for weight, row in zip(weights, short, strict=True)) / weights.sum()


def sum_of_distances(x: Vectors, weights: Vectors, point: Vectors) -> float:
    return float(sum(weight * np.linalg.norm(row - point) for weight, row in zip(weights, x, strict=True)))


def weighted_distance_optimum(x: Vectors, weights: Vectors) -> float:
    from scipy.optimize import minimize

    starts = [x.mean(0), *x]
    return min(
        sum_of_distances(x, weights, np.array(minimize(lambda p: sum_of_distances(x, weights, p), begin, tol=1e-12).x))
        if number == 0
        else sum_of_distances(x, weights, begin)
        for number, begin in enumerate(starts)
    )


# --- the rules equal brute force


@given(seeds, st.integers(1, 9))
def test_median(seed: int, clients: int) -> None:
    for x in (drawn(seed, clients), coarse(seed, clients)):
        np.testing.assert_allclose(apply("median", x, drawn_weights(seed, clients)), median(x), rtol=1e-12, atol=1e-14)


@given(seeds, st.integers(1, 9), st.integers(0, 4))
def test_trimmed_mean(seed: int, clients: int, trim: int) -> None:
    x = drawn(seed, clients)
    if 2 * trim >= clients:
        with pytest.raises(InputError):
            apply("trimmed_mean", x, trim=trim)
        return
    for x in (drawn(seed, clients), coarse(seed, clients)):
        found = apply("trimmed_mean", x, drawn_weights(seed, clients), trim=trim)
        np.testing.assert_allclose(found, trimmed_mean(x, trim), rtol=1e-12, atol=1e-14)


@given(seeds, st.integers(1, 3), st.integers(0, 4))
def test_krum(seed: int, byzantine: int, more: int) -> None:
    x = drawn(seed, 2 * byzantine + 3 + more)
    found = apply("krum", x, drawn_weights(seed, len(x)), byzantine=byzantine)
    np.testing.assert_array_equal(found, krum(x, byzantine))


@given(seeds, st.integers(1, 3), st.integers(0, 4), st.integers(1, 5) | st.none())
def test_multi_krum(seed: int, byzantine: int, more: int, keep: int | None) -> None:
    x = drawn(seed, 2 * byzantine + 3 + more)
    found = apply(
        "multi_krum", x, drawn_weights(seed, len(x)), byzantine=byzantine, **({} if keep is None else {"keep": keep})
    )
    np.testing.assert_allclose(found, multi_krum(x, byzantine, keep), rtol=1e-12, atol=1e-14)


def test_multi_krum_that_keeps_one_is_krum() -> None:
    x = drawn(1, 8)
    np.testing.assert_allclose(apply("multi_krum", x, byzantine=2, keep=1), apply("krum", x, byzantine=2), rtol=1e-15)


@given(seeds, st.integers(1, 2), st.integers(0, 4))
def test_bulyan(seed: int, byzantine: int, more: int) -> None:
    x = drawn(seed, 4 * byzantine + 3 + more)
    found = apply("bulyan", x, drawn_weights(seed, len(x)), byzantine=byzantine)
    np.testing.assert_allclose(found, bulyan(x, byzantine), rtol=1e-12, atol=1e-14)


@given(seeds, st.integers(1, 8))
@settings(max_examples=40)
def test_geometric_median(seed: int, clients: int) -> None:
    x = drawn(seed, clients)
    for weights in (np.ones(clients), drawn_weights(seed, clients)):
        found = apply("geometric_median", x, weights, iterations=2000, tolerance=1e-12)
        reached = sum_of_distances(x, weights, found)
        assert reached <= weighted_distance_optimum(x, weights) * (1 + 1e-4) + 1e-5


def test_the_geometric_median_of_a_line_and_of_a_majority() -> None:
    line = np.zeros((3, WIDTH))
    line[:, 0] = [0.0, 1.0, 10.0]
    np.testing.assert_allclose(apply("geometric_median", line), line[1], atol=1e-2)
    majority = np.ones((5, WIDTH))
    majority[3:] = drawn(2, 2, 100.0)
    np.testing.assert_allclose(apply("geometric_median", majority), np.ones(WIDTH), atol=1e-3)


@given(seeds, st.integers(1, 8), st.sampled_from([0.1, 1.0, 10.0]), st.integers(1, 4))
def test_centred_clipping(seed: int, clients: int, radius: float, iterations: int) -> None:
    x = drawn(seed, clients)
    found = apply("centred_clipping", x, radius=radius, iterations=iterations)
    np.testing.assert_allclose(found, centred_clipping(x, radius, iterations), rtol=1e-9, atol=1e-12)


def test_centred_clipping_counts_clients_not_the_examples_they_claim_to_have() -> None:
    x, weights = drawn(0, 6), drawn_weights(0, 6)
    found = apply("centred_clipping", x, weights, radius=1.0, iterations=3)
    np.testing.assert_allclose(found, centred_clipping(x, 1.0, 3), rtol=1e-9, atol=1e-12)


@given(seeds, st.integers(1, 8), st.sampled_from([0.1, 1.0, 10.0]))
def test_norm_bounding(seed: int, clients: int, bound: float) -> None:
    x, weights = drawn(seed, clients), drawn_weights(seed, clients)
    found = apply("norm_bounding", x, weights, bound=bound)
    np.testing.assert_allclose(found, norm_bounding(x, weights, bound), rtol=1e-9, atol=1e-12)


# --- what they refuse


@pytest.mark.parametrize(
    ("name", "clients", "parameters"),
    [
        ("krum", 4, {"byzantine": 1}),
        ("krum", 6, {"byzantine": 2}),
        ("multi_krum", 4, {"byzantine": 1}),
        ("multi_krum", 5, {"byzantine": 1, "keep": 6}),
        ("bulyan", 6, {"byzantine": 1}),
        ("bulyan", 10, {"byzantine": 2}),
        ("trimmed_mean", 4, {"trim": 2}),
        ("trimmed_mean", 3, {"trim": 2}),
    ],
)
def test_too_few_clients_are_refused(name: str, clients: int, parameters: dict[str, Any]) -> None:
    with pytest.raises(InputError) as said:
        apply(name, drawn(0, clients), **parameters)
    assert str(clients) in str(said.value), f"the message does not say how many clients there are: {said.value}"


@pytest.mark.parametrize(
    ("name", "clients", "parameters"),
    [("krum", 5, {"byzantine": 1}), ("bulyan", 7, {"byzantine": 1}), ("trimmed_mean", 3, {"trim": 1})],
)
def test_just_enough_clients_are_taken(name: str, clients: int, parameters: dict[str, Any]) -> None:
    assert np.isfinite(apply(name, drawn(0, clients), **parameters)).all()


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("trimmed_mean", {"trim": -1}),
        ("krum", {"byzantine": -1}),
        ("multi_krum", {"byzantine": -1}),
        ("multi_krum", {"byzantine": 1, "keep": 0}),
        ("bulyan", {"byzantine": -1}),
        ("geometric_median", {"iterations": 0}),
        ("geometric_median", {"tolerance": 0.0}),
        ("centred_clipping", {"radius": 0.0}),
        ("centred_clipping", {"iterations": 0}),
        ("norm_bounding", {"bound": -1.0}),
        ("median", {"trim": 1}),
    ],
)
def test_bad_parameters_are_refused_when_the_rule_is_made(name: str, parameters: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"parameter"):
        rule(name, **parameters)


# --- what holds for any input


EVERY_RULE: dict[str, dict[str, Any]] = {
    "median": {},
    "trimmed_mean": {"trim": 2},
    "krum": {"byzantine": 1},
    "multi_krum": {"byzantine": 1},
    "bulyan": {"byzantine": 1},
    "geometric_median": {"iterations": 500, "tolerance": 1e-12},
    "centred_clipping": {"radius": 1.0, "iterations": 5},
    "norm_bounding": {"bound": 1.0},
}
CENTRED = {"centred_clipping", "norm_bounding"}  # no change at all is special for them: they are not translated


def test_no_rule_is_forgotten() -> None:
    assert EVERY_RULE.keys() == robust.RULES.keys()


@pytest.mark.parametrize("name", sorted(EVERY_RULE.keys() - {"bulyan"}))
@given(seed=seeds, clients=st.integers(7, 9))
@settings(max_examples=25)
def test_the_order_of_clients_does_not_matter(name: str, seed: int, clients: int) -> None:
    x, weights = drawn(seed, clients), drawn_weights(seed, clients)
    order = np.random.default_rng(seed).permutation(clients)
    one = apply(name, x, weights, **EVERY_RULE[name])
    other = apply(name, x[order], weights[order], **EVERY_RULE[name])
    np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-8)


@given(seed=seeds, clients=st.integers(7, 9))
@settings(max_examples=25)
def test_the_order_of_clients_decides_ties_in_bulyan_and_nothing_else(seed: int, clients: int) -> None:
    # where one neighbour is left to count, two changes that are each other's nearest always have the same score
    x = drawn(seed, clients)
    order = np.random.default_rng(seed).permutation(clients)
    found = apply("bulyan", x[order], byzantine=1)
    allowed = [bulyan_of(x, chosen, 1) for chosen in chosen_by_bulyan(x, 1)]
    assert any(np.allclose(found, outcome, rtol=1e-9, atol=1e-12) for outcome in allowed)


@pytest.mark.parametrize("name", sorted(EVERY_RULE.keys() - CENTRED))
@given(seed=seeds, clients=st.integers(7, 9))
@settings(max_examples=25)
def test_a_common_shift_is_kept(name: str, seed: int, clients: int) -> None:
    x, shift = drawn(seed, clients), drawn(seed + 1, 1, 3.0)[0]
    one = apply(name, x + shift, **EVERY_RULE[name])
    np.testing.assert_allclose(one, apply(name, x, **EVERY_RULE[name]) + shift, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", EVERY_RULE)
@given(seed=seeds)
@settings(max_examples=25)
def test_one_outlier_does_not_move_the_result_far(name: str, seed: int) -> None:
    x = drawn(seed, 9)
    worst = max(float(np.linalg.norm(a - b)) for a, b in combinations(x[:8], 2))
    x[8] = 1e6 * x[8] / np.linalg.norm(x[8])
    moved = np.linalg.norm(apply(name, x, **EVERY_RULE[name]) - x[:8].mean(0))
    assert moved <= worst


@pytest.mark.parametrize("name", ["median", "trimmed_mean", "krum", "multi_krum", "bulyan"])
def test_an_infinite_change_is_an_outlier_like_any_other(name: str) -> None:
    x = drawn(3, 9)
    x[4, 1] = np.inf
    assert np.isfinite(apply(name, x, **EVERY_RULE[name])).all()


@pytest.mark.parametrize("name", EVERY_RULE)
def test_equal_changes_stay_what_they_are(name: str) -> None:
    x = np.tile(drawn(5, 1, 0.1), (7, 1))
    np.testing.assert_allclose(apply(name, x, **EVERY_RULE[name]), x[0], rtol=1e-9)


@pytest.mark.parametrize("name", EVERY_RULE)
def test_no_change_at_all_stays_none(name: str) -> None:
    np.testing.assert_allclose(apply(name, np.zeros((7, WIDTH)), **EVERY_RULE[name]), 0.0, atol=1e-12)


# --- the whole way, through an experiment


def as_given(output: Tensor, target: Tensor) -> Tensor:
    """A loss whose gradient is minus the example itself, so that a step of 1 adds what the data says."""
    return -output.reshape(-1)


@pytest.mark.parametrize("name", EVERY_RULE)
def test_a_round_adds_what_the_rule_makes_of_the_changes(name: str) -> None:
    x = drawn(7, 9)
    x[8] *= 50.0
    data = Federation(torch.from_numpy(x), torch.zeros(9, dtype=torch.float64), np.arange(10), split=ALL_TRAIN)
    task = Task(nn.Linear, as_given, [], args={"in_features": WIDTH, "out_features": 1, "bias": False}, dtype="float64")
    rounds = (tuple(range(9)), (0, 1, 2, 3, 5, 6, 7, 8))
    given_rule = {"name": name, **EVERY_RULE[name]}
    algorithm = FedAvg(rule=name if not EVERY_RULE[name] else given_rule, lr=1.0, batch_size="full", weights="uniform")
    w = task.initial()["weight"].numpy().ravel()
    for record in fit(data, task, algorithm, 2, sampling=Attendance(rounds=rounds), evaluation=Evaluation(splits=())):
        present = x[list(record.cohort)]
        w = w + {
            "median": median,
            "trimmed_mean": lambda v: trimmed_mean(v, 2),
            "krum": lambda v: krum(v, 1),
            "multi_krum": lambda v: multi_krum(v, 1),
            "bulyan": lambda v: bulyan(v, 1),
            "geometric_median": lambda v: apply("geometric_median", v, **EVERY_RULE["geometric_median"]),
            "centred_clipping": lambda v: centred_clipping(v, 1.0, 5),
            "norm_bounding": lambda v: norm_bounding(v, np.ones(len(v)), 1.0),
        }[name](present)
        np.testing.assert_allclose(record.state["model"]["weight"].numpy().ravel(), w, rtol=1e-9, atol=1e-9)


def test_unknown_rules_are_refused_with_what_is_known() -> None:
    with pytest.raises(InputError, match="median"):
        FedAvg(rule="medain")
    with pytest.raises(InputError, match="byzantine"):
        FedAvg(rule={"name": "krum", "byzantime": 1})


def test_counters_are_averaged_whatever_the_rule() -> None:
    stacked = {"w": torch.from_numpy(drawn(1, 7)), "steps": torch.tensor([1, 2, 3, 4, 5, 6, 7])}
    for name, parameters in EVERY_RULE.items():
        found = rule(name, **parameters)(stacked, torch.ones(7, dtype=torch.float64))
        assert found["steps"].dtype == torch.int64
        assert int(found["steps"]) == 4


# --- in every algorithm that has a rule

WITH_RULE = [
    name for name, kind in ALGORITHMS.items() if "rule" in kind.model_fields and name not in ("staged", "svrg")
]
ADAPTIVE = ("fedadagrad", "fedadam", "fedyogi")
PLAIN = {"lr": 0.1, "batch_size": 5}


def models_after(algorithm: Algorithm, task: Task, clients: int = 5) -> list[Tree]:
    """The models that all clients use after two rounds."""
    data, own, state = federation([20] * clients), {}, {}
    for record in fit(data, task, algorithm, 2, evaluation=Evaluation(splits=())):
        state = record.state
        own.update(record.own)
    nothing = algorithm.init_own(task, task.initial())
    return [algorithm.model(task, state, own.get(client, nothing)) for client in range(clients)]


def farthest(one: list[Tree], other: list[Tree]) -> float:
    return max(float((a[name] - b[name]).abs().max()) for a, b in zip(one, other, strict=True) for name in a)


def test_rules_are_for_every_algorithm_whose_server_takes_means() -> None:
    without = {"pooled", "local", "peer", "cocoa", "qfedavg", "fed_dropout"}  # docs/reference/algorithms.md says why
    without |= {"neuroevolution", "random_search", "openai_es", "snes"}
    assert {name for name, kind in ALGORITHMS.items() if "rule" not in kind.model_fields} == without


# a trimmed mean counts every client the same, and scores differ even where sizes do not
@pytest.mark.parametrize("name", [name for name in WITH_RULE if name != "evaluation_weighted"])
def test_a_rule_that_cuts_nothing_is_the_plain_mean_in_every_algorithm(name: str) -> None:
    # clients of one size: rules count clients, and FedNova's steps are as many everywhere
    kind, task = ALGORITHMS[name], Task(Pictures, dtype="float64")
    nothing_cut = kind(**PLAIN, rule={"name": "trimmed_mean", "trim": 0})
    assert farthest(models_after(nothing_cut, task), models_after(kind(**PLAIN), task)) < 1e-9


def lying(kind: type[Algorithm]) -> type[Algorithm]:
    """The same algorithm with one client whose every answer is far off."""

    def lie(update: Update, data: Clients) -> Update:
        if 0 not in data.ids:
            return update
        at = data.ids.index(0)
        wrong = {
            group: {
                name: torch.cat([leaf[:at], leaf[at : at + 1] + 1e6, leaf[at + 1 :]])
                if leaf.is_floating_point()
                else leaf
                for name, leaf in stacked.items()
            }
            for group, stacked in update.groups.items()
        }
        return replace(update, groups=wrong)

    def told(method: str) -> Callable[..., Any]:
        def answer(self: Any, task: Task, shared: Any, own: Any, data: Clients) -> tuple[Update, Any]:
            update, kept = getattr(kind, method)(self, task, shared, own, data)
            return lie(update, data), kept

        answer.__name__ = method
        return answer

    methods = {method: told(method) for method in ("client", "gradient") if hasattr(kind, method)}
    return type("Lying", (kind,), {**methods, "__module__": __name__, "__doc__": "One client lies."})


@pytest.mark.parametrize("name", WITH_RULE)
def test_a_lying_client_moves_every_algorithm_without_a_rule_and_none_with_one(name: str) -> None:
    kind, task = ALGORITHMS[name], Task(Pictures, dtype="float64")
    given = {**PLAIN, **({"clusters": 1} if name == "ifca" else {})}
    if name not in ADAPTIVE:  # whose steps are as long however wrong a client is
        try:
            moved = farthest(models_after(lying(kind)(**given), task), models_after(kind(**given), task))
        except TrainingError:
            moved = float("inf")  # so far that nothing is finite any more
        assert moved > 1e4
    honest = models_after(kind(**given, rule="median"), task)
    # the median of five moves at most to its neighbour: by about as much as honest clients differ
    assert farthest(models_after(lying(kind)(**given, rule="median"), task), honest) < 1.0
