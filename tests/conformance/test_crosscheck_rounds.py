"""Whole rounds against pfl-research: the same clients, the same batches in the same order, the same model in float64.

Runs only where pfl-research is installed. It hands a client's change on in float32, so the models can agree to about
1e-7 of that change; 1e-6 is asked for. What is defined differently there:

- FedAvg counts every client equally unless told to count examples; both are compared.
- SCAFFOLD always counts clients equally, and c moves by (m/K) times the mean change of the controls of m out of K
  clients, as here. The server's learning rate is that of a central optimiser.
- SCAFFOLD's new control, option II, is c_k − c + (w_k − w) / (steps · lr) there. Algorithm 1 of the paper, and
  fedloom, have (w − w_k) instead, which makes it a gradient. So a round is compared that begins with controls which
  both are given, and the new controls after the sign of that one term is turned.
"""

import importlib
import importlib.util
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedloom.algorithm import Algorithm
from fedloom.algorithms import FedAvg, Scaffold
from fedloom.federation.engine import Evaluation, RoundRecord, Snapshot, fit
from fedloom.tree import Tree
from tests.conformance.transcriptions import SEED, Attendance, TwoLayers, World, three_clients

pytestmark = [
    pytest.mark.crosscheck,
    pytest.mark.skipif(
        importlib.util.find_spec("pfl") is None, reason="pfl-research is not installed: make crosscheck"
    ),
]

AGREE = {"rtol": 1e-6, "atol": 1e-6}
COHORTS = [(0, 1, 2), (0, 2)]


USED = {
    "aggregate.simulate": ["SimulatedBackend"],
    "aggregate.weighting": ["WeightByDatapoints"],
    "algorithm.base": ["NNAlgorithmParams"],
    "algorithm.federated_averaging": ["FederatedAveraging"],
    "algorithm.scaffold": ["SCAFFOLD", "SCAFFOLDParams"],
    "data.dataset": ["Dataset"],
    "data.federated_dataset": ["FederatedDataset"],
    "data.user_state": ["InMemoryUserStateStorage"],
    "hyperparam": ["NNTrainHyperParams"],
    "model.pytorch": ["PyTorchModel"],
    "stats": ["MappedVectorStatistics"],
}


@pytest.fixture(scope="module")
def pfl() -> Any:
    """What is needed of pfl-research, which warns about itself while it is loaded."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        modules = {importlib.import_module(f"pfl.{module}"): names for module, names in USED.items()}
    return SimpleNamespace(**{name: getattr(module, name) for module, names in modules.items() for name in names})


class Net(nn.Module):
    """A model as pfl-research wants it."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.net = world.model.torch().to(torch.float64)
        self.net.load_state_dict(world.task.initial())

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.net(x), y)

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        return {}


def in_order(pfl: Any, world: World, client: int) -> Any:
    """One client's data set, whose every epoch comes in the batches that fedloom draws."""
    assert world.batch is not None
    batches = world.batches(client, round=1)
    each = len(batches) // world.epochs
    epochs = iter([batches[begin : begin + each] for begin in range(0, len(batches), each)])

    class InOrder(pfl.Dataset):  # type: ignore[misc, name-defined]
        def iter(self, batch_size: int | None) -> Iterator[list[Tensor]]:
            assert batch_size == world.batch
            for rows in next(epochs):
                yield [world.federation.x[rows], world.federation.y[rows]]

    rows = world.rows(client)
    return InOrder([world.federation.x[rows], world.federation.y[rows]], user_id=str(client))


def round_in_pfl(
    pfl: Any, world: World, algorithm: Any, parameters: Any, server_lr: float, by_examples: bool = False
) -> Tree:
    """The model after one round."""
    net, cohort = Net(world), world.rounds[0]
    model = pfl.PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=server_lr))
    users = iter(cohort)
    data = pfl.FederatedDataset(lambda user: in_order(pfl, world, user), lambda: next(users))
    algorithm._current_central_iteration = 1  # round 0 would evaluate, and forget the controls
    algorithm.run(
        parameters,
        pfl.SimulatedBackend(data, None, [pfl.WeightByDatapoints()] if by_examples else []),
        model,
        pfl.NNTrainHyperParams(
            local_num_epochs=world.epochs, local_learning_rate=world.lr, local_batch_size=world.batch
        ),
        send_metrics_to_platform=False,
    )
    return {name: leaf.detach() for name, leaf in net.net.named_parameters()}


def one_round(world: World) -> dict[str, Any]:
    """pfl-research's parameters for it."""
    return {
        "central_num_iterations": 2,
        "evaluation_frequency": 2,
        "train_cohort_size": len(world.rounds[0]),
        "val_cohort_size": 0,
    }


def round_in_fedloom(world: World, algorithm: Algorithm, begin: Snapshot | None = None) -> RoundRecord:
    (record,) = fit(
        world.federation,
        world.task,
        algorithm,
        1,
        seed=SEED,
        sampling=Attendance(rounds=world.rounds),
        evaluation=Evaluation(splits=()),
        resume=begin,
    )
    return record


def agree(found: Tree, expected: Tree, what: str) -> None:
    assert found.keys() == expected.keys()
    for name in found:
        np.testing.assert_allclose(found[name].numpy(), expected[name].numpy(), **AGREE, err_msg=f"{what}: {name}")


def differ(one: Tree, other: Tree) -> bool:
    return any(float((one[name] - other[name]).abs().max()) > 1e-3 for name in one)


@pytest.mark.parametrize("weights", ["examples", "uniform"])
@pytest.mark.parametrize("cohort", COHORTS)
def test_a_round_of_fedavg(pfl: Any, cohort: tuple[int, ...], weights: str) -> None:
    world = three_clients(TwoLayers(), rounds=(cohort,))
    found = round_in_fedloom(world, FedAvg(**world.training, weights=weights)).state["model"]
    parameters = pfl.NNAlgorithmParams(**one_round(world))
    expected = round_in_pfl(pfl, world, pfl.FederatedAveraging(), parameters, 1.0, by_examples=weights == "examples")
    agree(found, expected, "the model")
    assert differ(found, world.task.initial())


def some_controls(world: World, number: int) -> Tree:
    """Controls of the size of a gradient, that differ from client to client."""
    draws = np.random.default_rng(number)
    return {name: torch.from_numpy(0.3 * draws.normal(size=shape)) for name, shape in world.model.leaves.items()}


@pytest.mark.parametrize("server_lr", [1.0, 0.6])
@pytest.mark.parametrize("cohort", COHORTS)
def test_a_round_of_scaffold(pfl: Any, cohort: tuple[int, ...], server_lr: float) -> None:
    world = three_clients(TwoLayers(), rounds=(cohort,))
    server, own = some_controls(world, 99), {client: some_controls(world, client) for client in range(3)}
    begin = Snapshot(
        0, {"model": world.task.initial(), "control": server}, {k: {"control": kept} for k, kept in own.items()}
    )
    found = round_in_fedloom(world, Scaffold(**world.training, server_lr=server_lr), begin)

    def theirs(control: Tree) -> Any:
        return pfl.MappedVectorStatistics({f"net.{name}": leaf.clone() for name, leaf in control.items()})

    storage, algorithm = pfl.InMemoryUserStateStorage(), pfl.SCAFFOLD()
    algorithm._server_c = theirs(server)
    for client, kept in own.items():
        storage.save_state(theirs(kept), str(client), "local_c")
    parameters = pfl.SCAFFOLDParams(
        **one_round(world), population=3, use_gradient_as_control_variate=False, user_state_storage=storage
    )
    expected = round_in_pfl(pfl, world, algorithm, parameters, server_lr)
    agree(found.state["model"], expected, "the model")
    without = round_in_fedloom(world, Scaffold(**world.training, server_lr=server_lr)).state["model"]
    assert differ(found.state["model"], without), "the controls made no difference"

    def turned(new: Tree, plain: Tree) -> Tree:
        """The control with the sign of what was added to `plain` turned."""
        return {name: 2 * plain[name] - leaf for name, leaf in new.items()}

    for client in cohort:
        kept = storage.load_state(str(client), "local_c")
        new = {name: kept[f"net.{name}"] for name in server}
        plain = {name: own[client][name] - server[name] for name in server}
        agree(found.own[client]["control"], turned(new, plain), f"the control of client {client}")
    new = {name: algorithm._server_c[f"net.{name}"] for name in server}
    plain = {name: leaf * (1 - len(cohort) / 3) for name, leaf in server.items()}
    agree(found.state["control"], turned(new, plain), "the server's control")
