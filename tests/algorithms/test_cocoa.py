"""CoCoA+ arrives at the optimum of the problem that its docstring states, whichever clients take part."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedloom.algorithms import CoCoA
from fedloom.errors import InputError
from fedloom.federation.engine import Evaluation, fit
from fedloom.federation.sampling import Sampling
from fedloom.task import Task
from tests.conftest import last, numbers_federation

QUIET = Evaluation(splits=())
SIZES = (4, 30, 9, 17, 2, 12)  # a cohort says little about how many examples there are in all
PENALTY = 0.3
Vector = NDArray[np.float64]


def examples(yes_or_no: bool = False) -> tuple[Vector, Vector]:
    draws = np.random.default_rng(8)
    x = draws.normal(size=(sum(SIZES), 3))
    y = x @ np.array([1.0, -2.0, 0.5]) + 0.7 + 0.2 * draws.normal(size=len(x))
    return x, (y > 0).astype(np.float64) if yes_or_no else y


def trained(x: Vector, y: Vector, loss: str, rounds: int, sampling: Sampling, **settings: object) -> Vector:
    task = Task(nn.Linear, loss, [], args={"in_features": 3, "out_features": 1}, dtype="float64")
    algorithm = CoCoA(regularization=PENALTY, local_passes=3, **settings)
    data = numbers_federation(x.tolist(), y.tolist(), SIZES)
    model = last(fit(data, task, algorithm, rounds, seed=1, sampling=sampling, evaluation=QUIET)).state["model"]
    return np.append(model["weight"].numpy().ravel(), model["bias"].numpy())


def ridge_optimum(x: Vector, y: Vector) -> Vector:
    """Of mean (x·w + b − y)² + λ/2 ‖(w, b)‖², where its gradient is zero."""
    inputs = np.column_stack([x, np.ones(len(x))])
    return np.linalg.solve(2 * inputs.T @ inputs / len(x) + PENALTY * np.eye(4), 2 * inputs.T @ y / len(x))


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", ["adding", "averaging"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(count=2), Sampling(count=1), Sampling(fraction=0.4)])
def test_it_finds_the_ridge_optimum_of_all_clients_however_few_take_part(sampling: Sampling, aggregation: str) -> None:
    x, y = examples()
    found = trained(x, y, "mse", 300, sampling, aggregation=aggregation)
    np.testing.assert_allclose(found, ridge_optimum(x, y), rtol=0, atol=1e-6)


@pytest.mark.parametrize("soft", [False, True], ids=["labels", "probabilities"])
def test_it_finds_the_optimum_of_the_tasks_own_logistic_loss(soft: bool) -> None:
    x, y = examples(yes_or_no=True)
    y = 0.1 + 0.8 * y if soft else y
    found = trained(x, y, "bce", 150, Sampling(count=2))
    inputs = np.column_stack([x, np.ones(len(x))])
    gradient = inputs.T @ (1 / (1 + np.exp(-inputs @ found)) - y) / len(x) + PENALTY * found
    assert np.abs(gradient).max() < 1e-6  # of mean loss + λ/2 ‖w‖², which is strictly convex


def test_before_all_clients_have_taken_part_the_problem_is_that_of_the_clients_that_have() -> None:
    x, y = examples()
    found = trained(x, y, "mse", 200, Sampling(count=2, redraw_every=1000))
    data = numbers_federation(x.tolist(), y.tolist(), SIZES)
    present = torch.cat([data.indices(client, "train") for client in Sampling(count=2).draw(6, 1, 1)]).numpy()
    np.testing.assert_allclose(found, ridge_optimum(x[present], y[present]), rtol=0, atol=1e-6)


def test_what_would_be_another_problem_is_refused() -> None:
    with pytest.raises(InputError, match="regularization"):
        CoCoA(weight_decay=0.1)

    class Frozen(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 1)
            self.bias.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    task = Task(Frozen, "mse", [])
    with pytest.raises(InputError, match="frozen"):
        CoCoA().init(task, task.initial())
