"""fedloom's server halves against Flower's, on the same updates. Runs only where Flower is installed.

Clients have a loss whose gradient is their data, so that what each of them sends can be chosen: client k sends w + x_k.
"""

import importlib.util
import os
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from fedloom.algorithms import ALGORITHMS
from fedloom.data.federation import Federation
from fedloom.federation.engine import Evaluation, fit
from fedloom.task import Task
from tests.conformance.test_robust import as_given
from tests.conformance.transcriptions import Attendance
from tests.conftest import ALL_TRAIN

pytestmark = [
    pytest.mark.crosscheck,
    pytest.mark.skipif(importlib.util.find_spec("flwr") is None, reason="Flower is not installed: make crosscheck"),
]

Vector = NDArray[np.float64]
WIDTH, CLIENTS = 6, 9
ATTENDANCE = (tuple(range(CLIENTS)), (0, 1, 2, 4, 5, 6, 8), tuple(range(CLIENTS)))  # two are absent in round 2
EXAMPLES = (3, 1, 4, 1, 5, 9, 2, 6, 5)
AGREE = {"rtol": 1e-6, "atol": 1e-9}


@pytest.fixture(scope="module")
def flower() -> Any:
    """What is needed of Flower; it warns about itself while it is loaded, and must not call home."""
    os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from flwr import common
        from flwr.server import strategy
        from flwr.server.strategy import aggregate
    return SimpleNamespace(common=common, strategy=strategy, aggregate=aggregate)


def changes() -> Vector:
    """What each client adds to the weights it is sent; two of them are far off."""
    drawn = np.random.default_rng(11).normal(size=(CLIENTS, WIDTH))
    drawn[[3, 7]] *= 20.0
    return drawn


def in_fedloom(name: str, equal: bool = False, **settings: Any) -> tuple[Vector, list[Vector]]:
    """The initial weights, and those after every round."""
    if name not in ALGORITHMS:
        pytest.skip(f"fedloom has no algorithm '{name}' yet")
    sizes = np.ones(CLIENTS, dtype=int) if equal else np.array(EXAMPLES)
    x = torch.from_numpy(np.repeat(changes(), sizes, axis=0))
    labels = torch.zeros(len(x), dtype=torch.float64)
    data = Federation(x, labels, np.cumsum([0, *sizes]), split=ALL_TRAIN)
    task = Task(nn.Linear, as_given, [], args={"in_features": WIDTH, "out_features": 1, "bias": False}, dtype="float64")
    algorithm = ALGORITHMS[name](lr=1.0, batch_size="full", **settings)
    sampling, quiet = Attendance(rounds=ATTENDANCE, outlier_factor="off"), Evaluation(splits=())
    records = list(fit(data, task, algorithm, len(ATTENDANCE), sampling=sampling, evaluation=quiet))
    return task.initial()["weight"].numpy(), [record.state["model"]["weight"].numpy() for record in records]


def sent(w: Vector, cohort: tuple[int, ...], equal: bool = False) -> list[tuple[list[Vector], int]]:
    """The clients' answers as Flower's functions take them."""
    return [([w + changes()[k]], 1 if equal else EXAMPLES[k]) for k in cohort]


def in_flower(flower: Any, strategy: Any, start: Vector, first_round: int = 1) -> list[Vector]:
    """The weights after every round of one of Flower's strategies."""
    common, w, found = flower.common, start, []
    for number, cohort in enumerate(ATTENDANCE):
        results = []
        for weights, examples in sent(w, cohort):
            status = common.Status(common.Code.OK, "")
            results.append((None, common.FitRes(status, common.ndarrays_to_parameters(weights), examples, {})))
        parameters, _ = strategy.aggregate_fit(first_round + number, results, [])
        (w,) = common.parameters_to_ndarrays(parameters)
        found.append(w)
    return found


def compare(found: list[Vector], expected: list[Vector]) -> None:
    for number, (one, other) in enumerate(zip(found, expected, strict=True), 1):
        np.testing.assert_allclose(one, other, **AGREE, err_msg=f"after round {number}")


def test_fedavg(flower: Any) -> None:
    start, found = in_fedloom("fedavg")
    compare(found, in_flower(flower, flower.strategy.FedAvg(), start))


def test_fedavgm(flower: Any) -> None:
    start, found = in_fedloom("fedavgm", server_lr=0.7, server_momentum=0.6)
    given = {"initial_parameters": flower.common.ndarrays_to_parameters([start])}
    strategy = flower.strategy.FedAvgM(server_learning_rate=0.7, server_momentum=0.6, **given)
    compare(found, in_flower(flower, strategy, start))


def test_fedadam_with_bias_correction(flower: Any) -> None:
    settings = {"server_lr": 0.1, "beta1": 0.8, "beta2": 0.95, "tau": 1e-3}
    start, found = in_fedloom("fedadam", **settings, weights="examples", bias_correction=True)
    given = {"initial_parameters": flower.common.ndarrays_to_parameters([start])}
    strategy = flower.strategy.FedAdam(eta=0.1, beta_1=0.8, beta_2=0.95, tau=1e-3, **given)
    # Flower corrects by β^(round + 1), Kingma and Ba by β^round: count its rounds from 0
    compare(found, in_flower(flower, strategy, start, first_round=0))


def test_fedyogi(flower: Any) -> None:
    settings = {"server_lr": 0.1, "beta1": 0.8, "beta2": 0.95, "tau": 1e-3}
    start, found = in_fedloom("fedyogi", **settings, weights="examples")
    given = {"initial_parameters": flower.common.ndarrays_to_parameters([start])}
    strategy = flower.strategy.FedYogi(eta=0.1, beta_1=0.8, beta_2=0.95, tau=1e-3, **given)
    compare(found, in_flower(flower, strategy, start))


def test_fedadagrad_without_momentum(flower: Any) -> None:
    start, found = in_fedloom("fedadagrad", server_lr=0.1, beta1=0.0, tau=1e-3, weights="examples")
    given = {"initial_parameters": flower.common.ndarrays_to_parameters([start])}
    compare(found, in_flower(flower, flower.strategy.FedAdagrad(eta=0.1, tau=1e-3, **given), start))


RULES: dict[str, tuple[dict[str, Any], Callable[..., list[Vector]]]] = {
    "median": ({}, lambda functions, results: functions.aggregate_median(results)),
    # Flower cuts a share: of 9 and of 7 clients this is one at each end
    "trimmed_mean": ({"trim": 1}, lambda functions, results: functions.aggregate_trimmed_avg(results, 0.15)),
    "krum": ({"byzantine": 2}, lambda functions, results: functions.aggregate_krum(results, 2, 0)),
    "multi_krum": (
        {"byzantine": 2, "keep": 3},
        lambda functions, results: functions.aggregate_krum(results, 2, 3),
    ),
    "bulyan": (
        {"byzantine": 1},
        lambda functions, results: functions.aggregate_bulyan(results, 1, functions.aggregate_krum, to_keep=0),
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_robust_rules(flower: Any, name: str) -> None:
    parameters, function = RULES[name]
    w, found = in_fedloom("fedavg", equal=True, rule={"name": name, **parameters})
    expected = []
    for cohort in ATTENDANCE:
        (w,) = function(flower.aggregate, sent(w, cohort, equal=True))
        expected.append(w)
    compare(found, expected)
