"""The batch of a step: examples, outputs and features, and what a look at them leaves alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

import fedloom as fl
from fedloom import tree
from fedloom.algorithm import Clients, Groups, Step, Task, Tree, Update, View, add, batch, look, row, scale, uniform
from fedloom.algorithms import FedAvg
from fedloom.backends.serial import Serial
from fedloom.errors import InputError, TrainingError
from fedloom.federation.engine import Evaluation, fit
from fedloom.testing import check_algorithm
from fedloom.training import trainers
from fedloom.training.batch_view import Batch
from fedloom.training.lanes import LaneTrainer
from fedloom.training.probe import probe
from fedloom.training.recorded import RecordedTrainer
from tests.conftest import Dense, Normed, federation, last

QUIET = Evaluation(splits=())


def view_of(task: Task, rows: int = 5) -> Batch:
    drawn = torch.Generator().manual_seed(1)
    x, y = torch.randn(rows, 16, generator=drawn, dtype=task.torch_dtype), torch.arange(rows) % 3
    tensors = task.tensors
    return Batch(task, tensors.parameters, tree.clone(tensors.buffers), lambda: [(x.clone(), y, torch.tensor([1, 2]))])


def test_features_are_what_the_last_layer_is_given_or_a_named_one() -> None:
    task = Task(Dense, dtype="float64")
    seen, module = view_of(task), task.build()
    weights = task.initial()
    module.load_state_dict(weights)
    view = seen.at(weights)
    hidden = torch.tanh(module.hidden(seen.x))  # type: ignore[operator]
    assert torch.allclose(view.features(), hidden)
    assert torch.allclose(view.features("hidden"), seen.x)
    assert torch.allclose(view.output, module(seen.x))
    assert not view.output.requires_grad
    assert torch.equal(look(task, weights, seen.x).features(), view.features())
    with pytest.raises(InputError, match=r"no layer 'hiden' .* Known: hidden, out. Did you mean 'hidden'\?"):
        view.features("hiden")


def test_the_gradient_is_that_of_torch_and_dropout_is_that_of_the_step() -> None:
    """With dropout and batch normalisation: the same key draws the same units as the step itself."""
    task = Task(Normed, dtype="float64")
    task.module.train()
    seen = view_of(task)
    outputs: list[Tensor] = []

    def loss(view: View) -> Tensor:
        outputs.append(view.output.detach())
        return (view.features() ** 2).mean() + view.output.sum()

    found = seen.grad_of(loss)
    assert torch.equal(seen.grad_of(loss)["out.weight"], found["out.weight"])
    assert torch.equal(outputs[0], outputs[1])
    step = 1e-6
    leaf = task.tensors.parameters["hidden.bias"]
    sides = []
    for sign in (1, -1):
        with torch.no_grad():
            leaf[2] += sign * step
        value: list[Tensor] = []
        seen.grad_of(lambda view, value=value: value.append(loss(view)) or value[-1])
        sides.append(float(value[0].detach()))
        with torch.no_grad():
            leaf[2] -= sign * step
    assert float(found["hidden.bias"][2]) == pytest.approx((sides[0] - sides[1]) / (2 * step), rel=1e-5)


def test_a_look_changes_neither_buffers_nor_the_mode_nor_hooks() -> None:
    task = Task(Normed, dtype="float64")
    task.module.train()
    before = tree.clone({name: leaf.detach() for name, leaf in task.tensors.own.items()})
    seen = view_of(task)
    seen.at(task.initial())
    seen.grad_of(lambda view: view.output.sum())
    assert all(torch.equal(before[name], leaf) for name, leaf in task.tensors.own.items())
    assert task.module.training
    assert not any(part._forward_pre_hooks for part in task.module.modules())
    assert all(leaf.grad is None for leaf in task.tensors.parameters.values())


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_look_takes_examples_in_any_precision(dtype: str) -> None:
    task, x = Task(Dense, dtype=dtype), torch.randn(3, 16)
    found = [look(task, task.initial(), x.to(kind)).output for kind in (torch.float32, torch.float64)]
    assert {one.dtype for one in found} == {task.torch_dtype}
    assert torch.allclose(*found)


def test_a_loss_that_does_not_depend_on_the_weights_has_no_gradient() -> None:
    found = view_of(Task(Dense)).grad_of(lambda view: view.features("hidden").sum())
    assert all(not leaf.any() for leaf in found.values())


class Looking(FedAvg):
    """Adds the mean square of the features to the loss."""

    trains_once: ClassVar[bool] = False
    reads_batch: ClassVar[bool] = True

    def correct(self, step: Step, shared: Groups, own: Groups) -> Tree:
        assert len(step.batch.x) == len(step.batch.y)
        return add(step.grad, step.batch.grad_of(lambda view: (view.features() ** 2).mean()))


class NotDeclared(Looking):
    """Looks at the batch and does not say so."""

    reads_batch: ClassVar[bool] = False


@pytest.mark.parametrize("group", [1, 2])
def test_an_algorithm_that_does_not_say_that_it_looks_is_told_to(group: int) -> None:
    data, task = federation((9, 12)), Task(Dense)
    setup = probe(data, task).setup(group=group)
    with pytest.raises((InputError, TrainingError), match=r"only for algorithms with `reads_batch = True`"):
        list(fit(data, task, NotDeclared(), 1, evaluation=QUIET, backend=Serial(data, task, setup)))


@pytest.mark.parametrize("model", [Dense, Normed])
def test_clients_that_look_are_not_side_by_side_and_their_steps_are_recorded(
    model: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ways(algorithm: FedAvg, replay: bool) -> tuple[set[type], str]:
        used: list[Any] = []
        choose = trainers.trainer_for

        def noted(job: Any) -> Any:
            used.append(choose(job))
            return used[-1]

        monkeypatch.setattr(trainers, "trainer_for", noted)
        backend = Serial(data, task, probe(data, task).setup(group=2, replay=replay))
        state = last(fit(data, task, algorithm, 2, evaluation=QUIET, backend=backend)).state
        monkeypatch.setattr(trainers, "trainer_for", choose)
        tapes = [tape for one in used if isinstance(one, RecordedTrainer) for tape, _ in one.tapes.values()]
        assert None not in tapes
        return {type(one) for one in used}, tree.sha256(
            tree.map_leaves(lambda leaf: leaf.float().mul(1e4).round(), state["model"])
        )

    data, task = federation((10, 12)), Task(model, dtype="float64")
    assert ways(FedAvg(batch_size=4), True)[0] == {LaneTrainer}
    recorded, plain = ways(Looking(batch_size=4), True), ways(Looking(batch_size=4), False)
    assert recorded[0] == {RecordedTrainer}
    assert recorded[1] == plain[1]


def test_a_full_batch_is_one_pass_for_an_algorithm_that_looks() -> None:
    data, task = federation((600,)), Task(Dense, dtype="float64")
    backend = Serial(data, task, replace(probe(data, task).setup(group=1), micro_batch=16))
    found = last(fit(data, task, Looking(batch_size="full"), 1, evaluation=QUIET, backend=backend)).state["model"]
    module = task.build()
    module.load_state_dict(task.initial())
    rows = data.indices(0, "train")
    x, y = data.x[rows].double(), data.y[rows]
    hidden = torch.tanh(module.hidden(x))  # type: ignore[operator]
    (nn.functional.cross_entropy(module.out(hidden), y) + (hidden**2).mean()).backward()  # type: ignore[operator]
    for name, leaf in module.named_parameters():
        assert leaf.grad is not None
        assert torch.allclose(found[name], leaf.detach() - 0.1 * leaf.grad, atol=1e-12)


class Prototypes(FedAvg):
    """Pulls features towards the mean features of their class over all clients.

    Adds pull · ‖z − c_y‖² to the loss, where c ← Σ_k Σ z / Σ_k n over the examples of each class.
    """

    trains_once: ClassVar[bool] = False
    reads_batch: ClassVar[bool] = True
    pull: float = 0.1
    classes: int = 3

    def init(self, task: Task, model: Tree) -> Groups:
        width = model[task.trainable[-1].rpartition(".")[0] + ".weight"].shape[1]
        return {"model": model, "sums": {"features": torch.zeros(self.classes, width), "counts": torch.zeros(3, 1)}}

    def round(self, state: Groups, cohort: fl.Cohort) -> Groups:
        mean = cohort.reduce(self.client, state, rule=self.rule)
        return {"model": mean["model"], "sums": mean["sums"]}

    def client(self, task: Task, shared: Groups, own: Groups, data: Clients) -> tuple[Update, Groups]:
        update, own = super().client(task, shared, own, data)
        assert update.trained is not None
        sums = []
        for position in range(len(data)):
            x, y = batch(data, data.rows(position, "train"), task)
            features = look(task, row(update.trained.model, position), x).features().float()
            belongs = one_hot(y, self.classes).float().T
            sums.append({"features": belongs @ features, "counts": belongs.sum(1, keepdim=True)})
        groups = {**update.groups, "sums": tree.stack(sums)}
        weights = {"model": update.weights("model"), "sums": uniform(data.examples)}
        return Update(groups, weights, trained=update.trained, positions={"model": "model"}), own

    def correct(self, step: Step, shared: Groups, own: Groups) -> Tree:
        centres = shared["sums"]["features"] / shared["sums"]["counts"].clamp(min=1e-9)

        def apart(view: View) -> Tensor:
            return self.pull * ((view.features() - centres[step.batch.y].to(view.features().dtype)) ** 2).mean()

        known = shared["sums"]["counts"].sum() > 0  # nothing is known in the first round
        return add(step.grad, scale(step.batch.grad_of(apart), known.to(torch.float64)))


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [Looking, Prototypes])
def test_algorithms_that_look_keep_all_promises(algorithm: type[FedAvg]) -> None:
    check_algorithm(algorithm)
