"""FedRep's phases are exact: whatever the optimiser, what is not trained stays as it is, bit for bit."""

from typing import Any

import pytest
import torch

from fedloom.algorithms import FedRep
from fedloom.errors import InputError
from fedloom.federation.engine import Evaluation, fit
from fedloom.task import Task
from fedloom.tree import Tree
from tests.conftest import ALL_TRAIN, Dense, federation

QUIET = Evaluation(splits=())
OPTIMIZERS: list[dict[str, Any]] = [
    {"lr": 0.1, "weight_decay": 0.1},
    {"lr": 0.1, "momentum": 0.9},
    {"lr": 0.1, "momentum": 0.9, "optimizer_state": "keep", "weight_decay": 0.1},
    {"lr": 0.01, "optimizer": "adam", "optimizer_state": "keep"},
    {"lr": 0.01, "optimizer": "adam", "optimizer_state": "keep", "weight_decay": 0.1, "clip": 0.5},
    {"lr": 1.0, "optimizer": "adadelta", "optimizer_state": "keep", "weight_decay": 0.1},
]


def plain(settings: dict[str, Any], parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """torch's own optimiser."""
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adadelta": torch.optim.Adadelta}
    given = {key: settings[key] for key in ("lr", "weight_decay", "momentum") if key in settings}
    if settings.get("optimizer") == "adadelta":
        given["rho"] = 0.9
    return kinds[settings.get("optimizer", "sgd")](parameters, **given)


def by_torch(task: Task, x: torch.Tensor, y: torch.Tensor, settings: dict[str, Any], rounds: int) -> tuple[Tree, Tree]:
    """One client, full batches: an optimiser for the head and one for the body; the head after its phase each round."""
    module, heads = task.build(), {}
    module.load_state_dict(task.initial())
    parts = {"head": list(module.out.parameters()), "body": list(module.hidden.parameters())}
    optimizers = {part: plain(settings, leaves) for part, leaves in parts.items()}
    for _ in range(rounds):
        for part, epochs in (("head", 3), ("body", 2)):
            if settings.get("optimizer_state") != "keep":
                optimizers[part] = plain(settings, parts[part])
            for _ in range(epochs):
                module.zero_grad()
                torch.nn.functional.cross_entropy(module(x), y).backward()
                if "clip" in settings:
                    torch.nn.utils.clip_grad_norm_(parts[part], settings["clip"])
                optimizers[part].step()
    heads = {name: leaf.detach() for name, leaf in module.named_parameters() if name.startswith("out")}
    return {name: leaf.detach() for name, leaf in module.named_parameters()}, heads


@pytest.mark.parametrize("settings", OPTIMIZERS, ids=str)
def test_head_and_body_have_an_optimiser_each_and_rest_while_the_other_is_trained(settings: dict[str, Any]) -> None:
    task, data = Task(Dense, dtype="float64"), federation((14,), split=ALL_TRAIN)
    algorithm = FedRep(batch_size="full", epochs=2.0, head_epochs=3.0, **settings)
    *_, record = fit(data, task, algorithm, 3, evaluation=QUIET)
    whole, head = by_torch(task, data.x.double(), data.y, settings, 3)
    for name in head:
        torch.testing.assert_close(record.own[0]["head"][name], head[name], rtol=1e-9, atol=1e-11)
    for name in whole.keys() - head.keys():
        torch.testing.assert_close(record.state["model"][name], whole[name], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("settings", OPTIMIZERS, ids=str)
def test_the_head_does_not_move_by_a_bit_while_the_body_is_trained(
    settings: dict[str, Any], group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedloom.federation.work import Place
    from fedloom.testing.ways import InProcess
    from fedloom.training import local
    from fedloom.training.probe import probe

    seen: list[tuple[Tree, Tree]] = []
    original = local.train

    def watched(task: Task, data: Any, start: Tree, *more: Any, **others: Any) -> local.Trained:
        trained = original(task, data, start, *more, **others)
        seen.append((start, trained.model))
        return trained

    monkeypatch.setattr(local, "train", watched)
    task, data = Task(Dense), federation((14, 9))
    backend = InProcess(Place(data, task, probe(data, task).setup(group=group)), ())
    list(fit(data, task, FedRep(batch_size=4, **settings), 2, evaluation=QUIET, backend=backend))
    phases = seen[: 2 * (len(seen) // 2)]
    assert len(phases) >= 4
    for number, (start, trained) in enumerate(phases):
        for name in start:
            same = torch.equal(start[name], trained[name])
            assert same == (name.startswith("out") == bool(number % 2)), f"phase {number}: {name}"


def test_a_head_or_a_body_that_is_frozen_is_refused() -> None:
    class Frozen(Dense):
        def __init__(self) -> None:
            super().__init__()
            self.hidden.requires_grad_(False)

    task = Task(Frozen)
    with pytest.raises(InputError, match="all of one are frozen"):
        FedRep().init_own(task, task.initial())
