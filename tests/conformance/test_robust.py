"""Robust rules in whole rounds, and in every algorithm that has one."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedloom.algorithm import Algorithm, Update
from fedloom.algorithms import ALGORITHMS, FedAvg
from fedloom.data.federation import Federation
from fedloom.errors import TrainingError
from fedloom.federation.engine import Evaluation, fit
from fedloom.federation.sampling import Sampling
from fedloom.task import Task
from fedloom.training.clients import Clients
from fedloom.tree import Tree
from tests.aggregation.rules_by_hand import (
    EVERY_RULE,
    WIDTH,
    apply,
    bulyan,
    centred_clipping,
    drawn,
    krum,
    median,
    multi_krum,
    norm_bounding,
    trimmed_mean,
)
from tests.conformance.transcriptions import Attendance
from tests.conftest import ALL_TRAIN, Pictures, federation, slow_after

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


# --- in every algorithm that has a rule

WITH_RULE = [
    name for name, kind in ALGORITHMS.items() if "rule" in kind.model_fields and name not in ("staged", "svrg")
]
ADAPTIVE = ("fedadagrad", "fedadam", "fedyogi")
PLAIN = {"lr": 0.1, "batch_size": 5}


def models_after(
    algorithm: Algorithm, task: Task, clients: int = 5, outlier_factor: float | Literal["off"] = "off"
) -> list[Tree]:
    """The models that all clients use after two rounds."""
    data, own, state = federation([20] * clients), {}, {}
    sampling = Sampling(outlier_factor=outlier_factor)
    for record in fit(data, task, algorithm, 2, sampling=sampling, evaluation=Evaluation(splits=())):
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
@pytest.mark.parametrize("name", [name for name in WITH_RULE if name not in ("evaluation_weighted", "selective")])
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


@pytest.mark.parametrize("name", slow_after(4, WITH_RULE))
def test_a_lying_client_moves_every_algorithm_without_a_rule_and_none_with_one(name: str) -> None:
    kind, task = ALGORITHMS[name], Task(Pictures, dtype="float64")
    given = {**PLAIN, **({"clusters": 1} if name == "ifca" else {})}
    if name not in ADAPTIVE:  # whose steps are as long however wrong a client is
        try:
            moved = farthest(models_after(lying(kind)(**given), task), models_after(kind(**given), task))
        except TrainingError:
            moved = float("inf")  # so far that nothing is finite any more
        assert moved > 1e4
    if name not in {*ADAPTIVE, "selective"}:  # selective averaging sees each answer, and does not sum
        # a sum leaves out the client whose change is far longer than the others', and that client keeps what it had
        others = models_after(lying(kind)(**given), task, outlier_factor=10)[1:]
        assert farthest(others, models_after(kind(**given), task)[1:]) < 1.0
    honest = models_after(kind(**given, rule="median"), task)
    # the median of five moves at most to its neighbour: by about as much as honest clients differ
    assert farthest(models_after(lying(kind)(**given, rule="median"), task), honest) < 1.0
