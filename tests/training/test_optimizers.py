"""Local optimisers against torch.optim."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fedloom import keys
from fedloom.training import optimizers
from fedloom.training.local import Training

NAMES = ("weight", "bias")
SHAPES = {"weight": (3, 2), "bias": (3,)}
STEPS = 7

CASES: dict[str, tuple[Training, Callable[..., torch.optim.Optimizer]]] = {
    "sgd": (Training(lr=0.3), lambda p: torch.optim.SGD(p, lr=0.3)),
    "weight decay": (Training(lr=0.3, weight_decay=0.2), lambda p: torch.optim.SGD(p, lr=0.3, weight_decay=0.2)),
    "momentum": (Training(lr=0.1, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "momentum and weight decay": (
        Training(lr=0.1, momentum=0.5, weight_decay=0.3),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5, weight_decay=0.3),
    ),
    "adam": (Training(optimizer="adam", lr=0.05), lambda p: torch.optim.Adam(p, lr=0.05)),
    "adam with other constants": (
        Training(optimizer="adam", lr=0.05, beta1=0.5, beta2=0.6, epsilon=0.1, weight_decay=0.2),
        lambda p: torch.optim.Adam(p, lr=0.05, betas=(0.5, 0.6), eps=0.1, weight_decay=0.2),
    ),
    "nesterov": (
        Training(optimizer="nesterov", lr=0.1, momentum=0.9, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    ),
    "adamw": (
        Training(optimizer="adamw", lr=0.05, beta1=0.8, weight_decay=0.2),
        lambda p: torch.optim.AdamW(p, lr=0.05, betas=(0.8, 0.999), weight_decay=0.2),
    ),
    "rmsprop": (Training(optimizer="rmsprop", lr=0.02), lambda p: torch.optim.RMSprop(p, lr=0.02, alpha=0.9)),
    "rmsprop with everything": (
        Training(optimizer="rmsprop", lr=0.02, rho=0.7, momentum=0.5, centered=True, epsilon=1e-3, weight_decay=0.1),
        lambda p: torch.optim.RMSprop(p, lr=0.02, alpha=0.7, momentum=0.5, centered=True, eps=1e-3, weight_decay=0.1),
    ),
    "adagrad": (Training(optimizer="adagrad", lr=0.2), lambda p: torch.optim.Adagrad(p, lr=0.2)),
    "adagrad with other constants": (
        Training(optimizer="adagrad", lr=0.2, epsilon=0.5, weight_decay=0.1),
        lambda p: torch.optim.Adagrad(p, lr=0.2, eps=0.5, weight_decay=0.1),
    ),
    "adadelta": (Training(optimizer="adadelta", lr=0.9), lambda p: torch.optim.Adadelta(p, lr=0.9)),
    "adadelta with other constants": (
        Training(optimizer="adadelta", lr=0.9, rho=0.5, epsilon=0.01, weight_decay=0.1),
        lambda p: torch.optim.Adadelta(p, lr=0.9, rho=0.5, eps=0.01, weight_decay=0.1),
    ),
}


def draw(lane: int, name: str, purpose: str) -> Tensor:
    return torch.from_numpy(keys.generator(keys.key(lane, purpose, name)).normal(size=SHAPES[name]))


def gradient(lane: int, step: int, name: str, value: Tensor) -> Tensor:
    """A bowl of another place in every lane, and some noise in every step."""
    return 2 * (value - draw(lane, name, "centre")) + 0.1 * draw(lane * 100 + step, name, "noise")


def torchs_way(
    make: Callable[..., torch.optim.Optimizer], lane: int, steps: int, rates: list[float] | None = None
) -> dict[str, Tensor]:
    parameters = {name: torch.nn.Parameter(draw(lane, name, "start")) for name in NAMES}
    optimizer = make(list(parameters.values()))
    lr = optimizer.param_groups[0]["lr"]
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * (rates[step] if rates else 1.0)
        for name, parameter in parameters.items():
            parameter.grad = gradient(lane, step, name, parameter.detach())
        optimizer.step()
    return {name: parameter.detach() for name, parameter in parameters.items()}


@pytest.mark.parametrize("case", CASES)
def test_seven_steps_are_those_of_torch(case: str) -> None:
    training, make = CASES[case]
    parameters = {name: draw(0, name, "start") for name in NAMES}
    state = optimizers.initial_state(training, parameters, NAMES)
    for step in range(STEPS):
        gradients = [gradient(0, step, name, parameters[name]) for name in NAMES]
        optimizers.update(training, NAMES, list(parameters.values()), gradients, state)
    expected = torchs_way(make, 0, STEPS)
    for name in NAMES:
        torch.testing.assert_close(parameters[name], expected[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_lanes_at_different_step_counts_are_each_those_of_torch(case: str) -> None:
    training, make = CASES[case]
    lanes, head_start = 3, (0, 4, 1)
    parameters = {name: torch.stack([draw(lane, name, "start") for lane in range(lanes)]) for name in NAMES}
    state = optimizers.initial_state(training, parameters, NAMES, lanes)
    for lane, ahead in enumerate(head_start):  # each lane on its own, as views of the stack
        own = {name: leaf[lane] for name, leaf in state.items()}
        mine = [parameters[name][lane] for name in NAMES]
        for step in range(ahead):
            gradients = [gradient(lane, step, name, parameters[name][lane]) for name in NAMES]
            optimizers.update(training, NAMES, mine, gradients, own)
    for step in range(STEPS):
        gradients = [
            torch.stack(
                [gradient(lane, head_start[lane] + step, name, parameters[name][lane]) for lane in range(lanes)]
            )
            for name in NAMES
        ]
        optimizers.update(training, NAMES, list(parameters.values()), gradients, state)
    for lane in range(lanes):
        expected = torchs_way(make, lane, head_start[lane] + STEPS)
        for name in NAMES:
            torch.testing.assert_close(parameters[name][lane], expected[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_a_rate_that_changes_is_a_learning_rate_that_changes(case: str) -> None:
    training, make = CASES[case]
    rates = [0.5, 1.0, 0.25, 2.0, 0.0, 1.0, 0.1]
    parameters = {name: torch.stack([draw(lane, name, "start") for lane in range(2)]) for name in NAMES}
    state = optimizers.initial_state(training, parameters, NAMES, 2)
    for step in range(STEPS):
        gradients = [
            torch.stack([gradient(lane, step, name, parameters[name][lane]) for lane in range(2)]) for name in NAMES
        ]
        rate = torch.tensor([rates[step], 1.0], dtype=torch.float64)  # another one in each lane
        optimizers.update(training, NAMES, list(parameters.values()), gradients, state, rate)
    for lane in range(2):
        expected = torchs_way(make, lane, STEPS, rates if lane == 0 else None)
        for name in NAMES:
            torch.testing.assert_close(parameters[name][lane], expected[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_left_as_they_were(case: str) -> None:
    training, _ = CASES[case]
    parameters = {name: draw(0, name, "start") for name in NAMES}
    state = optimizers.initial_state(training, parameters, NAMES)
    gradients = [draw(1, name, "start") for name in NAMES]
    for _ in range(2):
        optimizers.update(training, NAMES, list(parameters.values()), gradients, state)
    for name, left in zip(NAMES, gradients, strict=True):
        assert torch.equal(left, draw(1, name, "start"))


@pytest.mark.parametrize(
    ("training", "slots"),
    [
        (Training(), ()),
        (Training(momentum=0.5), ("velocity",)),
        (Training(optimizer="adam"), ("first", "second")),
        (Training(optimizer="nesterov", momentum=0.5), ("velocity",)),
        (Training(optimizer="adamw"), ("first", "second")),
        (Training(optimizer="rmsprop"), ("square",)),
        (Training(optimizer="rmsprop", momentum=0.5, centered=True), ("square", "velocity", "mean")),
        (Training(optimizer="adagrad"), ("total",)),
        (Training(optimizer="adadelta"), ("square", "delta")),
    ],
)
def test_an_optimizer_begins_with_zeros_for_what_is_trained(training: Training, slots: tuple[str, ...]) -> None:
    weights = {"weight": torch.ones(2, 3), "bias": torch.ones(2), "running_mean": torch.ones(4)}
    state = optimizers.initial_state(training, weights, NAMES)
    expected = {f"{slot}:{name}" for slot in slots for name in NAMES}
    assert set(state) == (expected | {f"steps:{name}" for name in NAMES} if slots else set())
    assert all(torch.count_nonzero(leaf) == 0 for leaf in state.values())
    assert all(state[name].shape == weights[name.split(":")[1]].shape for name in expected)


def test_adam_takes_gradients_that_lie_across_memory() -> None:
    training, make = CASES["adam"]
    start, gradients = draw(0, "weight", "start"), [draw(step, "weight", "noise").t() for step in range(3)]
    ours, theirs = start.t().contiguous(), torch.nn.Parameter(start.t().contiguous())
    state = optimizers.initial_state(training, {"weight": ours}, ("weight",))
    optimizer = make([theirs])
    for gradient in gradients:
        assert not gradient.is_contiguous()
        optimizers.update(training, ("weight",), [ours], [gradient], state)
        theirs.grad = gradient
        optimizer.step()
    torch.testing.assert_close(ours, theirs.detach(), rtol=1e-12, atol=1e-12)
