"""What a client computes: local training, in lanes and plain, and full gradients."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from fedloom import keys, tree
from fedloom.algorithms import FedAvg
from fedloom.data.federation import Federation
from fedloom.data.split import Split
from fedloom.errors import InputError, TrainingError
from fedloom.task import Task
from fedloom.training import local
from fedloom.training.clients import Clients, Setup
from fedloom.training.evaluation import evaluate
from fedloom.training.local import Groups, Step, Trained, Training
from fedloom.training.modules import load
from fedloom.training.probe import probe
from fedloom.training.recorded import RecordedTrainer
from fedloom.training.schedule import TrainingJob
from fedloom.training.single import client_tensors, clip
from fedloom.tree import Tree
from tests.conftest import (
    ALL_TRAIN,
    FEATURES,
    Dense,
    Noisy,
    Normed,
    Pictures,
    Recurrent,
    federation,
    numbers_federation,
)

RAGGED = (4, 9, 33, 21, 60)
MODELS = {"dense": Dense, "normed": Normed, "pictures": Pictures}


def clients(task: Task, data: Federation, group: int = 1, **settings: Any) -> Clients:
    setup = probe(data, task).setup(group=group, **settings)
    return Clients(data, tuple(range(data.clients)), seed=7, round=3, call=1, setup=setup)


def fit(
    task: Task,
    data: Federation,
    training: Training,
    group: int = 1,
    start: Tree | None = None,
    correct: Any = None,
    shared: Groups | None = None,
    own: Groups | None = None,
    **settings: Any,
) -> Trained:
    start = tree.expand(task.initial(), data.clients) if start is None else start
    chosen = clients(task, data, group, **settings)
    return local.train(task, chosen, start, training, correct=correct, shared=shared, own=own)


def assert_trees_close(a: Tree, b: Tree, tolerance: float = 1e-10) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=tolerance, atol=tolerance)


def batches(data: Clients, position: int, epoch: int, size: int) -> list[Tensor]:
    """The rows of each batch of one epoch, in the order that the client's key gives."""
    rows = data.rows(position, "train")
    order = rows[torch.from_numpy(keys.permutation(data.key(position, "batches", epoch), len(rows)))]
    return [order[begin : begin + size] for begin in range(0, len(order), size)]


def by_torch(
    task: Task,
    data: Clients,
    position: int,
    make: Callable[..., torch.optim.Optimizer],
    epochs: int,
    size: int,
    clip: float | None = None,
) -> Tree:
    """The same local training, written with torch.optim and autograd."""
    module = task.build()
    load(module, task.initial())
    module.train()
    optimizer = make(module.parameters())
    for epoch in range(epochs):
        for rows in batches(data, position, epoch, size):
            optimizer.zero_grad()
            x, y = data.federation.x[rows].to(task.torch_dtype), data.federation.y[rows]
            F.cross_entropy(module(x), y).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(module.parameters(), clip)
            optimizer.step()
    return {name: leaf.detach() for name, leaf in module.state_dict().items()}


class Prox(FedAvg):
    """FedProx: a pull towards where the client began."""

    mu: float = 0.5

    def correct(self, step: Step, shared: Groups, own: Groups) -> Tree:
        return tree.add(step.grad, tree.sub(step.params, step.start), scale=self.mu)


class LookBack(FedAvg):
    """Variance reduction: the gradient minus that at the start, plus what the server and the client know."""

    def correct(self, step: Step, shared: Groups, own: Groups) -> Tree:
        reduced = tree.sub(step.grad, step.grad_at(step.start))
        return tree.add(tree.add(reduced, shared["direction"]), own["control"], scale=-1.0)


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("model", ["dense", "pictures"])
@pytest.mark.parametrize(
    ("training", "make"),
    [
        (Training(lr=0.2, epochs=2, batch_size=8), lambda p: torch.optim.SGD(p, lr=0.2)),
        (
            Training(lr=0.05, momentum=0.9, weight_decay=0.1, epochs=2, batch_size=8),
            lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1),
        ),
        (Training(optimizer="adam", lr=0.01, epochs=2, batch_size=8), lambda p: torch.optim.Adam(p, lr=0.01)),
    ],
    ids=["sgd", "momentum", "adam"],
)
def test_local_training_is_torchs_on_the_keyed_order_of_batches(
    model: str, training: Training, make: Callable[..., torch.optim.Optimizer], group: int
) -> None:
    task, data = Task(MODELS[model], dtype="float64"), federation(RAGGED)
    trained = fit(task, data, training, group)
    for position in range(data.clients):
        expected = by_torch(task, clients(task, data), position, make, epochs=2, size=8)
        # Adam divides by a root that is nearly zero where a gradient is: rounding shows there
        assert_trees_close(tree.row(trained.model, position), expected, 1e-9)


@pytest.mark.parametrize("group", [1, 3])
def test_clipping_is_torchs_clip_grad_norm(group: int) -> None:
    task, data = Task(Dense, dtype="float64"), federation(RAGGED)
    trained = fit(task, data, Training(lr=0.5, batch_size=8, epochs=2, clip=0.2), group)
    free = fit(task, data, Training(lr=0.5, batch_size=8, epochs=2), group)
    assert tree.sha256(trained.model) != tree.sha256(free.model)
    for position in range(data.clients):
        make = lambda p: torch.optim.SGD(p, lr=0.5)  # noqa: E731
        expected = by_torch(task, clients(task, data), position, make, epochs=2, size=8, clip=0.2)
        assert_trees_close(tree.row(trained.model, position), expected)


def job_of(task: Task, training: Training = Training(), **settings: Any) -> TrainingJob:
    data = federation(RAGGED)
    start = tree.expand(task.initial(), data.clients)
    given = {"correct": None, "shared": {}, "own": {}, "optimizer": None, "trained": start, **settings}
    those = Clients(data, tuple(range(data.clients)), setup=Setup(replay=True))
    return TrainingJob(task, those, start, training, **given)


def test_whole_batches_are_recorded_and_short_ones_only_of_small_models() -> None:
    def recorded(task: Task) -> list[int]:
        training = Training(batch_size=100)
        trainer = RecordedTrainer(task, training, None, client_tensors(job_of(task, training), 0))
        return [count for count in (1, 32, 33, 99, 100) if trainer.records(count)]

    assert recorded(Task(Dense)) == [1, 32, 100]
    assert recorded(Task("mnist_cnn")) == [100]


def test_a_trainer_is_found_again_when_an_equal_algorithm_comes_from_another_process() -> None:
    task = Task(Dense)

    def trainer(mu: float) -> object:
        return local.trainer_for(job_of(task, correct=Prox(mu=mu).correct))

    assert isinstance(trainer(0.5), RecordedTrainer)
    assert trainer(0.5) is trainer(0.5)
    assert trainer(0.7) is not trainer(0.5)


class Chosen(FedAvg):
    """A field that is a list."""

    layers: list[str] = Field(default_factory=lambda: ["hidden.weight"])

    def correct(self, step: Step, shared: Groups, own: Groups) -> Tree:
        return {name: leaf * 0 if name in self.layers else leaf for name, leaf in step.grad.items()}


@pytest.mark.parametrize("group", [1, 2])
def test_an_algorithm_with_a_correction_may_have_fields_of_any_kind(group: int) -> None:
    task, data = Task(Dense), federation((9, 20))
    trained = fit(task, data, Training(batch_size=8), group, correct=Chosen().correct)
    assert torch.equal(trained.model["hidden.weight"][0], task.initial()["hidden.weight"])
    assert not torch.equal(trained.model["out.weight"][0], task.initial()["out.weight"])


def test_a_gradient_within_the_bound_is_not_clipped() -> None:
    gradient = {"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}
    assert torch.equal(clip(gradient, 10.0)["a"], gradient["a"])
    assert clip(gradient, 1.0)["b"].item() == pytest.approx(0.8, abs=1e-6)


@pytest.mark.parametrize(
    "training", [Training(batch_size=8, epochs=2), Training(batch_size=8, optimizer="adam", epochs=2)]
)
@pytest.mark.parametrize("model", MODELS)
def test_lanes_compute_what_a_client_computes_alone(model: str, training: Training) -> None:
    task, data = Task(MODELS[model], dtype="float64"), federation(RAGGED)
    plain = fit(task, data, training)
    for group in (2, 8):
        grouped = fit(task, data, training, group)
        assert_trees_close(grouped.model, plain.model, 1e-8)
        assert grouped.steps.tolist() == plain.steps.tolist()
        for one, other in zip(grouped.history, plain.history, strict=True):
            assert [epoch["loss"] for epoch in one] == pytest.approx([epoch["loss"] for epoch in other])


@pytest.mark.parametrize("model", MODELS)
def test_a_clients_bits_do_not_depend_on_its_lane_or_its_neighbours(model: str) -> None:
    task, data = Task(MODELS[model]), federation(RAGGED)
    training = Training(batch_size=8, epochs=2, momentum=0.9)
    together = fit(task, data, training, 3)
    chosen = clients(task, data, 3)
    for position in range(data.clients):
        alone = local.train(task, replace(chosen, ids=(position,)), tree.expand(task.initial(), 1), training)
        assert tree.sha256(tree.row(alone.model, 0)) == tree.sha256(tree.row(together.model, position))


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


@pytest.mark.parametrize("model", MODELS)
def test_a_correction_that_looks_at_another_gradient_is_the_same_in_lanes(model: str) -> None:
    task, data = Task(MODELS[model], dtype="float64"), federation(RAGGED)
    training = Training(lr=0.1, batch_size=16, epochs=2)
    trainable = tree.select(task.initial(), task.trainable)
    shared = {"direction": tree.scale(trainable, 0.01)}
    own = {"control": tree.stack([tree.scale(trainable, 0.02 * client) for client in range(data.clients)])}
    plain = fit(task, data, training, 1, correct=LookBack().correct, shared=shared, own=own)
    grouped = fit(task, data, training, 3, correct=LookBack().correct, shared=shared, own=own)
    assert_trees_close(grouped.model, plain.model, 1e-9)
    again = fit(task, data, training, 1, correct=LookBack().correct, shared=shared, own=tree_of_zeros(own))
    assert tree.sha256(again.model) != tree.sha256(plain.model)


def tree_of_zeros(groups: Groups) -> Groups:
    return {group: tree.zeros_like(one) for group, one in groups.items()}


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


@pytest.mark.parametrize("group", [1, 3])
def test_weights_that_were_given_are_never_changed(group: int) -> None:
    task, data = Task(Normed), federation(RAGGED)
    shared = {"model": task.initial()}
    own = {
        "optimizer": tree.expand(local.initial_optimizer(ADAM_KEEP, task, task.initial())["optimizer"], data.clients)
    }
    before = tree.sha256(shared["model"]), tree.sha256(own["optimizer"])
    start = tree.expand(shared["model"], data.clients)
    fit(task, data, ADAM_KEEP, group, start, correct=Prox().correct, shared=shared, own=own)
    assert (tree.sha256(shared["model"]), tree.sha256(own["optimizer"])) == before


ADAM_KEEP = Training(optimizer="adam", lr=0.01, batch_size=8, optimizer_state="keep")


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("training", [ADAM_KEEP, Training(momentum=0.9, batch_size=8, optimizer_state="keep")])
def test_a_kept_optimizer_goes_on_where_it_stopped(training: Training, group: int) -> None:
    task, data = Task(Dense, dtype="float64"), federation((33, 60, 9))
    state = local.initial_optimizer(training, task, task.initial())["optimizer"]
    own = {"optimizer": tree.stack([state] * data.clients), "other": {"x": torch.ones(data.clients)}}
    first = fit(task, data, training, group, own=own)
    second = fit(task, data, training, group, start=first.model, own=first.own)
    # the same without a pause: two epochs of the same order of batches, by torch
    for position in range(data.clients):
        module = task.build()
        load(module, task.initial())
        optimizer = (
            torch.optim.Adam(module.parameters(), lr=0.01)
            if training.optimizer == "adam"
            else torch.optim.SGD(module.parameters(), lr=training.lr, momentum=0.9)
        )
        for rows in batches(clients(task, data), position, 0, 8) * 2:
            optimizer.zero_grad()
            F.cross_entropy(module(data.x[rows].double()), data.y[rows]).backward()
            optimizer.step()
        assert_trees_close(tree.row(second.model, position), dict(module.state_dict()), 1e-9)
    assert second.own["optimizer"]["steps:out.bias"].tolist() == (2 * first.steps).tolist()
    assert torch.equal(second.own["other"]["x"], torch.ones(3))
    reset = fit(task, data, training.replace(optimizer_state="reset"), group, start=first.model)
    assert tree.sha256(reset.model) != tree.sha256(second.model)


def test_only_an_optimizer_that_is_kept_and_has_a_state_is_kept() -> None:
    task = Task(Dense)
    assert local.initial_optimizer(Training(optimizer="adam"), task, task.initial()) == {}
    assert local.initial_optimizer(Training(optimizer_state="keep"), task, task.initial()) == {}
    assert list(local.initial_optimizer(ADAM_KEEP, task, task.initial())) == ["optimizer"]


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize(
    ("epochs", "batch_size", "steps"),
    [
        (1, 10, [1, 3, 6]),  # 6, 30 and 60 training examples
        (2, 10, [2, 6, 12]),
        (0.5, 10, [1, 2, 3]),  # 1.5 steps of 3 are two
        (1.5, 10, [2, 4, 9]),  # 4.5 steps of 3 are four: halves go to the even number
        (0.01, 10, [1, 1, 1]),  # never less than one
        (1, 7, [1, 5, 9]),
        (1, 1000, [1, 1, 1]),
        (3, "full", [3, 3, 3]),
    ],
)
def test_epochs_may_be_fractions_and_the_last_batch_smaller(
    epochs: float, batch_size: Any, steps: list[int], group: int
) -> None:
    task, data = Task(Dense), federation((6, 30, 60), split=ALL_TRAIN)
    assert fit(task, data, Training(epochs=epochs, batch_size=batch_size), group).steps.tolist() == steps


def test_half_an_epoch_is_the_first_half_of_the_whole_one() -> None:
    task, data = Task(Dense, dtype="float64"), federation((32,), split=ALL_TRAIN)
    rows = batches(clients(task, data), 0, 0, 8)
    weights = {name: leaf.clone().requires_grad_() for name, leaf in task.initial().items()}
    for part in rows[:2]:
        output = torch.func.functional_call(task.module, weights, (data.x[part].double(),))
        found = torch.autograd.grad(F.cross_entropy(output, data.y[part]), list(weights.values()))
        weights = {n: (w - 0.1 * g).detach().requires_grad_() for (n, w), g in zip(weights.items(), found, strict=True)}
    trained = fit(task, data, Training(epochs=0.5, batch_size=8, lr=0.1))
    assert_trees_close(tree.row(trained.model, 0), {name: leaf.detach() for name, leaf in weights.items()})


def test_every_epoch_has_another_order_and_every_client_and_round_its_own() -> None:
    task, data = Task(Dense), federation((20, 20), split=ALL_TRAIN)
    one = clients(task, data)
    orders = [
        tuple((torch.cat(batches(chosen, position, epoch, 8)) % 20).tolist())
        for chosen in (one, replace(one, round=4), replace(one, call=2), replace(one, seed=8))
        for position in (0, 1)
        for epoch in (0, 1)
    ]
    assert len(set(orders)) == len(orders)


@pytest.mark.parametrize("batch_size", ["full", 1000])
@pytest.mark.parametrize("group", [1, 2])
def test_a_full_batch_is_all_examples_at_once(batch_size: Any, group: int) -> None:
    task, data = Task(Dense, dtype="float64"), federation((5, 40), split=ALL_TRAIN)
    trained = fit(task, data, Training(lr=0.3, batch_size=batch_size), group)
    for position in range(2):
        weights = {name: leaf.requires_grad_() for name, leaf in task.initial().items()}
        rows = data.indices(position, "train")
        output = torch.func.functional_call(task.module, weights, (data.x[rows].double(),))
        found = torch.autograd.grad(F.cross_entropy(output, data.y[rows]), list(weights.values()))
        expected = {n: (w - 0.3 * g).detach() for (n, w), g in zip(weights.items(), found, strict=True)}
        assert_trees_close(tree.row(trained.model, position), expected)


def test_a_full_batch_in_passes_is_the_full_batch() -> None:
    task, data = Task(Dense, dtype="float64"), federation((50, 7), split=ALL_TRAIN)
    whole = fit(task, data, Training(batch_size="full", epochs=2))
    passes = fit(task, data, Training(batch_size="full", epochs=2), micro_batch=16)
    assert_trees_close(passes.model, whole.model, 1e-12)
    assert passes.history[0][0]["loss"] == pytest.approx(whole.history[0][0]["loss"])


EPOCHS = 15


@pytest.mark.parametrize("group", [1, 3])
def test_early_stopping_restores_the_best_weights_seen_and_stops(group: int) -> None:
    task, data = Task(Dense, dtype="float64"), federation((60, 90, 40), seed=3)
    training = Training(lr=1.5, epochs=EPOCHS, batch_size=8, patience=2)
    trained = fit(task, data, training, group)
    chosen = clients(task, data)
    stopped_early = 0
    for position in range(data.clients):
        losses = [epoch["validation_loss"] for epoch in trained.history[position]]
        per_epoch = -(-len(data.indices(position, "train")) // 8)
        best = int(np.argmin(losses))
        assert trained.steps[position] == (best + 1) * per_epoch  # those that the returned weights saw
        if len(losses) < EPOCHS:
            stopped_early += 1
            assert len(losses) == best + 1 + 2  # two epochs that were no better, and no third
        restored = evaluate(task, tree.row(trained.model, position), chosen, position, "validation").values(task)
        assert restored["loss"] == pytest.approx(losses[best], rel=1e-9)
        # and they are the weights of that epoch: a run that ends there has the same
        until = fit(task, data, Training(lr=1.5, epochs=best + 1, batch_size=8), 1)
        assert_trees_close(tree.row(trained.model, position), tree.row(until.model, position), 1e-6)
    assert stopped_early >= 2


@pytest.mark.parametrize("group", [1, 2])
def test_early_stopping_without_validation_examples_names_the_client(group: int) -> None:
    data = federation((20, 30), split=ALL_TRAIN)
    with pytest.raises(InputError, match=r"Client 'client-0' has no validation examples, which patience .* needs"):
        fit(Task(Dense), data, Training(epochs=5, batch_size=10, patience=1), group)


@pytest.mark.parametrize("group", [1, 3])
def test_the_history_has_the_mean_training_loss_of_every_epoch(group: int) -> None:
    task, data = Task(Dense, dtype="float64"), federation((12, 50), split=ALL_TRAIN)
    history = fit(task, data, Training(lr=1e-9, epochs=2.5, batch_size=8), group).history
    # with hardly any learning the loss stays that of the initial weights
    for position in range(2):
        rows = data.indices(position, "train")
        output = torch.func.functional_call(task.module, task.initial(), (data.x[rows].double(),))
        expected = F.cross_entropy(output, data.y[rows]).item()
        losses = [epoch["loss"] for epoch in history[position]]
        assert losses[:2] == pytest.approx([expected, expected], rel=1e-6)
    assert len(history[1]) == 3


@pytest.mark.parametrize("model", [Noisy, lambda: Recurrent(layers=2, dropout=0.5)], ids=["rand_like", "lstm dropout"])
def test_a_model_that_draws_by_itself_is_reproducible_and_leaves_the_generator_alone(model: Any) -> None:
    task, data = Task(model), federation((9, 20))
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.random.get_rng_state()
        found.append(tree.sha256(fit(task, data, Training(batch_size=8, epochs=2)).model))
        assert torch.equal(torch.random.get_rng_state(), before)
    assert found[0] == found[1]


@pytest.mark.parametrize("model", [Noisy, lambda: Recurrent(layers=2, dropout=0.5)], ids=["rand_like", "lstm dropout"])
def test_the_full_gradient_of_a_model_that_draws_by_itself_is_reproducible_too(model: Any) -> None:
    task, data = Task(model), federation((9, 20))
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.random.get_rng_state()
        full = local.full_gradient(task, clients(task, data), tree.expand(task.initial(), 2))
        found.append(tree.sha256(full.gradient))
        assert torch.equal(torch.random.get_rng_state(), before)
    assert found[0] == found[1]


def test_a_model_that_draws_by_itself_draws_anew_in_every_step_and_for_every_client() -> None:
    task, data = Task(Noisy), federation((8,), split=ALL_TRAIN)
    twins = Federation(
        data.x.repeat(2, 1), data.y.repeat(2), np.array([0, 8, 16]), split=ALL_TRAIN, classes=data.classes
    )
    one_step = fit(task, twins, Training(batch_size="full"))
    assert not torch.equal(one_step.model["out.weight"][0], one_step.model["out.weight"][1])
    losses = [epoch["loss"] for epoch in fit(task, twins, Training(batch_size="full", lr=1e-12, epochs=3)).history[0]]
    assert len(set(losses)) == 3


class Memory(nn.Module):
    """Keeps a running mean in a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(FEATURES, 3)
        self.register_buffer("seen", torch.zeros(FEATURES), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen.mul_(0.5).add_(0.5 * x.detach().mean(0))
        return self.out(x - self.seen)


def test_a_buffer_that_is_not_saved_does_not_leak_from_one_client_to_the_next() -> None:
    task, data = Task(Memory), federation((9, 20))
    chosen = clients(task, data)
    together = local.train(task, chosen, tree.expand(task.initial(), 2), Training())
    alone = local.train(task, replace(chosen, ids=(1,)), tree.expand(task.initial(), 1), Training())
    assert tree.sha256(tree.row(alone.model, 0)) == tree.sha256(tree.row(together.model, 1))


class Frozen(nn.Module):
    """A parameter that is not trained and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 4)
        self.first.weight.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(2))
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.first(x).relu())


@pytest.mark.parametrize("group", [1, 3])
def test_what_is_frozen_or_unused_stays_and_the_rest_learns(group: int) -> None:
    task, data = Task(Frozen, dtype="float64"), federation((20, 30))
    trained = fit(task, data, Training(momentum=0.9, weight_decay=0.0, epochs=2, batch_size=8), group).model
    initial = task.initial()
    for client in range(2):
        assert torch.equal(trained["first.weight"][client], initial["first.weight"])
        assert torch.equal(trained["unused"][client], initial["unused"])
        assert not torch.equal(trained["first.bias"][client], initial["first.bias"])


class TiedWeights(nn.Module):
    """Encoder and decoder share one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(FEATURES, FEATURES, bias=False)
        self.decode = nn.Linear(FEATURES, FEATURES, bias=False)
        self.decode.weight = self.encode.weight
        self.out = nn.Linear(FEATURES, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.decode(torch.tanh(self.encode(x))))


@pytest.mark.parametrize("group", [1, 3])
def test_tied_weights_stay_tied(group: int) -> None:
    task, data = Task(TiedWeights, dtype="float64"), federation((20, 30))
    trained = fit(task, data, Training(batch_size=8), group).model
    for position in range(2):
        make = lambda p: torch.optim.SGD(p, lr=0.1)  # noqa: E731
        expected = by_torch(task, clients(task, data), position, make, epochs=1, size=8)
        assert torch.equal(expected["encode.weight"], expected["decode.weight"])
        torch.testing.assert_close(trained["encode.weight"][position], expected["encode.weight"])


class TimeMajor(nn.Module):
    """Dropout where examples are the second dimension, as in many a recurrent or attention model."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.out = nn.Linear(1, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.drop(x.t().unsqueeze(-1))).mean(0)


class BatchMean(nn.Module):
    """Examples see each other outside of batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(FEATURES, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x - x.mean(0))


class InstanceNormed(nn.Module):
    """Instance normalisation with running statistics over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(4, track_running_stats=True)
        self.out = nn.Linear(FEATURES, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x.reshape(-1, 4, 4)).flatten(1))


@pytest.mark.parametrize("model", [TimeMajor, BatchMean, InstanceNormed])
def test_a_model_that_would_see_the_padding_gives_the_same_with_any_group_size(model: type[nn.Module]) -> None:
    task, data = Task(model, dtype="float64"), federation((9, 20, 33))
    training = Training(batch_size=8)
    assert_trees_close(fit(task, data, training, 3).model, fit(task, data, training, 1).model)


@pytest.mark.parametrize("model", MODELS)
def test_the_full_gradient_is_that_of_the_mean_loss(model: str) -> None:
    task, data = Task(MODELS[model], dtype="float64"), federation((9, 30))
    full = local.full_gradient(task, clients(task, data), tree.expand(task.initial(), 2))
    one = fit(task, data, Training(lr=0.25, batch_size="full"))
    stepped = tree.add(tree.expand(tree.select(task.initial(), task.trainable), 2), full.gradient, scale=-0.25)
    assert_trees_close(stepped, tree.select(one.model, task.trainable), 1e-12)
    assert_trees_close(full.buffers, {n: leaf for n, leaf in one.model.items() if n not in task.trainable}, 1e-12)
    assert full.losses.tolist() == pytest.approx([history[0]["loss"] for history in one.history], rel=1e-6)


# what can go wrong


def empty_client() -> Federation:
    return replace(federation((6, 8)), offsets=np.array([0, 6, 6, 14]), names=("anna", "ben", "cleo"))


@pytest.mark.parametrize("group", [1, 3])
def test_a_client_without_training_examples_is_named(group: int) -> None:
    message = r"Client 'ben' has no training examples, so it cannot train\. Change data\.split or the partition\."
    with pytest.raises(InputError, match=message):
        fit(Task(Dense), empty_client(), Training(), group)


def test_a_full_gradient_without_training_examples_names_the_client() -> None:
    task, data = Task(Dense), empty_client()
    with pytest.raises(InputError, match="Client 'ben' has no training examples"):
        local.full_gradient(task, clients(task, data), tree.expand(task.initial(), 3))


@pytest.mark.parametrize("group", [1, 3])
def test_batch_norm_of_one_example_names_the_client(group: int) -> None:
    data = federation((6, 1, 8), split=ALL_TRAIN)
    message = (
        r"Client 'client-1' has one training example, but the model's batch normalisation needs at least two in a "
        r"batch\. Leave such clients out, use a larger batch_size, or normalise with nn\.LayerNorm or nn\.GroupNorm\."
    )
    with pytest.raises(InputError, match=message):
        fit(Task(Normed), data, Training(), group)
    with pytest.raises(InputError, match="'client-0' trains on batches of one example"):
        fit(Task(Normed), data, Training(batch_size=1), group)
    # over whole pictures one example has many values per channel
    assert fit(Task(Pictures), data, Training(), group).steps.tolist() == [1, 1, 1]


@pytest.mark.parametrize("group", [1, 2])
def test_a_last_batch_of_one_example_is_an_error_or_left_out(group: int) -> None:
    task, data = Task(Normed, dtype="float64"), federation((8, 17, 4), split=ALL_TRAIN)
    message = r"Client 'client-1' has 17 training examples, so with batch_size = 8 its last batch has one.*drop_last"
    with pytest.raises(InputError, match=message):
        fit(task, data, Training(batch_size=8), group)
    trained = fit(task, data, Training(batch_size=8, epochs=2, drop_last=True), group)
    assert trained.steps.tolist() == [2, 4, 2]  # a client's only batch stays
    assert fit(Task(Dense), data, Training(batch_size=8), group).steps.tolist() == [1, 3, 1]  # not normalised


def with_bad_client() -> Federation:
    data = federation((20, 20, 20), split=ALL_TRAIN)
    data.x[20:40] = torch.nan
    return data


@pytest.mark.parametrize("group", [1, 2])
def test_a_loss_that_is_not_finite_names_round_client_and_value(group: int) -> None:
    message = r"^Round 3, client 'client-1', local training.*: the loss is nan.*\. A smaller lr or a clip may help\.$"
    with pytest.raises(TrainingError, match=message):
        fit(Task(Dense), with_bad_client(), Training(batch_size=8), group)


def test_the_plain_step_also_names_the_step() -> None:
    with pytest.raises(TrainingError, match=r"client 'client-1', local training, step 1 of 6: the loss is nan"):
        fit(Task(Dense), with_bad_client(), Training(batch_size=8, epochs=2))


def test_a_full_gradient_that_is_not_finite_names_round_and_client() -> None:
    task, data = Task(Dense), with_bad_client()
    with pytest.raises(TrainingError, match=r"Round 3, client 'client-1', its full gradient: the loss is nan"):
        local.full_gradient(task, clients(task, data), tree.expand(task.initial(), 3))


class Squares(nn.Module):
    """Explodes when the step is too large."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.w).square().sum(-1)


@pytest.mark.parametrize("group", [1, 2])
def test_a_huge_learning_rate_ends_in_an_error_and_not_in_bad_weights(group: int) -> None:
    data = federation((20, 20), split=ALL_TRAIN)
    regression = Federation(data.x, data.y.float(), data.offsets, split=ALL_TRAIN)
    with pytest.raises(TrainingError, match=r"Round 3, client '[01]', local training.*: the loss is (nan|inf)"):
        fit(Task(Squares, loss="mse", metrics=[]), regression, Training(lr=1e6, epochs=20, batch_size=4), group)


class Moody(nn.Module):
    """Refuses some of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(FEATURES, 3)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] == 12:
            raise RuntimeError("twelve is right out")
        return self.out(x)


def test_an_error_inside_the_model_names_client_and_step() -> None:
    data = federation((16, 28, 16), split=ALL_TRAIN)
    message = r"^Round 3, client 'client-1', local training, step 2 of 2: RuntimeError: twelve is right out$"
    with pytest.raises(TrainingError, match=message) as caught:
        fit(Task(Moody), data, Training(batch_size=16))
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_an_error_inside_a_correction_names_the_client() -> None:
    def broken(step: Step, shared: Groups, own: Groups) -> Tree:
        raise KeyError("control")

    with pytest.raises(
        TrainingError, match=r"Round 3, client 'client-0', local training, step 1 of 1: KeyError: 'control'"
    ):
        fit(Task(Dense), federation((8,), split=ALL_TRAIN), Training(batch_size=8), correct=broken)


def test_an_error_of_clients_side_by_side_points_to_the_serial_backend() -> None:
    data = federation((8, 13), split=Split(train=0.5, validation=0.5, test=0.0))
    message = (
        r"^Round 3: a step of the clients 'client-0', 'client-1', which are trained side by side, failed: "
        r'RuntimeError: twelve is right out\nUse run\.backend = "serial" to see which client and step\.$'
    )
    with pytest.raises(TrainingError, match=message):
        fit(Task(Moody), data, Training(batch_size=12), group=2)


@pytest.mark.parametrize("group", [1, 2])
def test_a_kept_optimizer_belongs_to_the_weights_that_patience_returns(group: int) -> None:
    data = federation((24, 40), seed=3, split=Split(train=0.5, validation=0.5, test=0.0))
    task = Task(Dense, dtype="float64")
    training = Training(lr=1.5, momentum=0.5, epochs=12, batch_size=8, optimizer_state="keep", patience=2)
    state = local.initial_optimizer(training, task, task.initial())["optimizer"]
    trained = fit(task, data, training, group, own={"optimizer": tree.stack([state] * 2)})
    assert trained.own["optimizer"]["steps:out.bias"].tolist() == trained.steps.tolist()
    epochs = [len(history) for history in trained.history]
    per_epoch = [-(-len(data.indices(client, "train")) // 8) for client in range(2)]
    assert any(steps < done * each for steps, done, each in zip(trained.steps.tolist(), epochs, per_epoch, strict=True))
