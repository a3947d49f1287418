"""An algorithm's correction of the gradient."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedloom import tree
from fedloom.algorithms import FedAvg
from fedloom.errors import InputError, TrainingError
from fedloom.task import Task
from fedloom.training.correction import Step, reads_batch, with_zeros
from fedloom.training.settings import Training
from fedloom.tree import Groups, Tree
from tests.conftest import FEATURES, Dense, Noisy, Normed, Recurrent, federation, numbers_federation
from tests.training.helpers import MODELS, RAGGED, Prox, assert_trees_close, fit


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("group", [1, 4])
def test_a_proximal_correction_is_the_gradient_of_the_proximal_term(model: str, group: int) -> None:
    task, data = Task(MODELS[model], dtype="float64"), federation(RAGGED)
    training = Training(lr=0.1, batch_size=16, epochs=2)
    trained = fit(task, data, training, group, correct=Prox(mu=0.5).correct)
    assert_trees_close(trained.model, fit(task, data, training, 1, correct=Prox(mu=0.5).correct).model, 1e-9)
    assert tree.sha256(trained.model) != tree.sha256(fit(task, data, training, group).model)


def test_fedprox_by_hand() -> None:
    data = numbers_federation([[1.0], [2.0], [3.0]], [2.0, 3.0, 5.0], [3])
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 0.5)
    task = Task(model, loss="mse", metrics=[], dtype="float64")
    x, y, start = np.array([1.0, 2.0, 3.0]), np.array([2.0, 3.0, 5.0]), 0.5
    w = start
    for _ in range(3):
        w -= 0.01 * (2 * np.mean((w * x - y) * x) + 0.7 * (w - start))
    trained = fit(task, data, Training(lr=0.01, epochs=3, batch_size="full"), correct=Prox(mu=0.7).correct)
    assert trained.model["weight"].item() == pytest.approx(w, rel=1e-13)


class Spectral(nn.Module):
    """Its buffers decide about its output, and every call in training moves them."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.utils.parametrizations.spectral_norm(nn.Linear(FEATURES, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x)


def twice_minus_once(step: Step, shared: Groups, own: Groups) -> Tree:
    return tree.sub(tree.scale(step.grad, 2.0), step.grad_at(step.params))


@pytest.mark.parametrize(
    ("model", "batch_size", "group"),
    [
        *((model, 8, group) for model in MODELS.values() for group in (1, 3)),
        *((model, 8, 1) for model in (Spectral, Noisy, Recurrent)),
        *((model, "full", 1) for model in (Normed, Noisy)),
    ],
)
def test_the_gradient_at_the_present_weights_is_the_present_gradient(
    model: type[nn.Module], batch_size: Any, group: int
) -> None:
    task, data = Task(model, dtype="float64"), federation((9, 21))
    training = Training(batch_size=batch_size, epochs=2)
    settings = {"micro_batch": 6}  # so that a full batch has more than one pass
    corrected = fit(task, data, training, group, correct=twice_minus_once, **settings)
    assert_trees_close(corrected.model, fit(task, data, training, group, **settings).model)


class Hooked(Dense):
    """Has a hook that sees the gradient of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        next(self.parameters()).register_hook(lambda gradient: 2 * gradient)


def test_the_gradient_elsewhere_is_refused_where_hooks_on_parameters_would_not_see_it() -> None:
    with pytest.raises(TrainingError, match="The model has hooks on its parameters, which are not known"):
        fit(Task(Hooked), federation((9,)), Training(batch_size=8), correct=twice_minus_once)


def test_a_leaf_without_a_gradient_counts_as_zeros() -> None:
    leaves = {"used": torch.ones(2), "unused": torch.ones(3)}
    found = with_zeros({"used": torch.full((2,), 5.0), "unused": None}, leaves)
    assert {name: leaf.tolist() for name, leaf in found.items()} == {"used": [5.0, 5.0], "unused": [0.0, 0.0, 0.0]}


def test_only_the_algorithm_itself_says_that_its_correction_looks_at_the_batch() -> None:
    class Looking(FedAvg):
        """Looks at the batch of every step."""

        reads_batch = True

    assert [reads_batch(hook) for hook in (Looking().correct, FedAvg().correct, twice_minus_once, None)] == [
        True,
        False,
        False,
        False,
    ]


class Shortens(FedAvg):
    def correct(self, step: Step, shared: Groups, own: Groups) -> Tree:
        return {name: leaf[:1] for name, leaf in step.grad.items()}


class Widens(FedAvg):
    def correct(self, step: Step, shared: Groups, own: Groups) -> Tree:
        return {name: leaf.double() for name, leaf in step.grad.items()}


class Loses(FedAvg):
    def correct(self, step: Step, shared: Groups, own: Groups) -> Tree:
        return dict(list(step.grad.items())[1:])


class Invents(FedAvg):
    def correct(self, step: Step, shared: Groups, own: Groups) -> Tree:
        return {**step.grad, "more": torch.zeros(())}


class ReturnsNothing(FedAvg):
    def correct(self, step: Step, shared: Groups, own: Groups) -> Any:
        pass


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (
            Shortens,
            r"a tensor of shape \(1, 16\) and torch.float32 as the gradient of '(\S+)'\. It must return a tensor ",
        ),
        (
            Widens,
            r"a tensor of shape \(\d+, 16\) and torch.float64 as .*\. It must return .* torch.float32, as '(\S+)'",
        ),
        (Loses, r"no gradient for '(\S+)'"),
        (Invents, r"a gradient for '(more)'"),
        (ReturnsNothing, r"(None)\. It must return the gradient to use"),
    ],
)
def test_a_gradient_that_does_not_fit_is_refused_with_file_and_line(kind: Any, what: str, group: int) -> None:
    place = rf"{kind.__name__}\.correct \(\S*test_correction\.py, line \d+\)"
    for batch_size in (4, "full"):
        with pytest.raises(InputError, match=rf"^{place} returned {what}"):
            fit(Task(Dense), federation((6, 5)), Training(batch_size=batch_size), group, correct=kind().correct)


@pytest.mark.parametrize("what", ["step.grad", "step.params", "step.start", "own['kept']", "shared['model']"])
def test_a_correction_that_changes_its_inputs_in_place_is_refused(what: str) -> None:
    def correct(step: Step, shared: Groups, own: Groups) -> Tree:
        for leaf in eval(what, {"step": step, "own": own, "shared": shared}).values():
            leaf.mul_(2)
        return tree.scale(step.grad, 1.0)

    task, data = Task(Dense), federation((6, 5))
    kept = {"kept": {"number": torch.ones(2)}}
    with pytest.raises(InputError, match=r"changes .*\['\S+'\] in place\. Return a new tree instead\.$") as refused:
        fit(task, data, Training(), correct=correct, own=kept, shared={"model": task.initial()})
    assert f"changes {what}['" in str(refused.value)
