"""MOON against a loop in plain torch, with its loss written in another way: the cross-entropy of two similarities."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from fedloom import tree
from fedloom.algorithms import FedAvg, Moon
from fedloom.backends.serial import Serial
from fedloom.errors import InputError
from fedloom.federation.engine import Evaluation, fit
from fedloom.task import Task
from fedloom.training.probe import probe
from tests.conftest import CLASSES, FEATURES, Dense, federation, last

QUIET = Evaluation(splits=())
LR, MU, TEMPERATURE = 0.2, 3.0, 0.4


class Encoder(nn.Module):
    """A picture encoder with batch normalisation, a projection and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)
        self.projection = nn.Linear(3 * FEATURES, 5)
        self.head = nn.Linear(5, CLASSES)

    def features(self, x: Tensor) -> Tensor:
        return torch.relu(self.projection(torch.relu(self.norm(self.conv(x.reshape(-1, 1, 4, 4)))).flatten(1)))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def by_hand(task: Task, data: object, rounds: int, steps: int) -> Encoder:
    """Rounds of MOON over two clients, each with all of its examples in every step."""
    globally = task.build()
    globally.load_state_dict(task.initial())
    previous = [copy.deepcopy(globally) for _ in range(2)]
    cosine, entropy = nn.CosineSimilarity(dim=-1), nn.CrossEntropyLoss()
    for _ in range(rounds):
        locally = []
        for client in range(2):
            rows = data.indices(client, "train")  # type: ignore[attr-defined]
            x, y = data.x[rows].double(), data.y[rows]  # type: ignore[attr-defined]
            net, old, now = copy.deepcopy(globally).train(), previous[client].eval(), globally.eval()
            optimizer = torch.optim.SGD(net.parameters(), lr=LR)
            for _ in range(steps):
                optimizer.zero_grad()
                z = net.features(x)  # type: ignore[operator]
                with torch.no_grad():
                    positive, negative = now.features(x), old.features(x)  # type: ignore[operator]
                logits = torch.stack([cosine(z, positive), cosine(z, negative)], 1) / TEMPERATURE
                contrastive = entropy(logits, torch.zeros(len(x), dtype=torch.long))
                (entropy(net.head(z), y) + MU * contrastive).backward()  # type: ignore[operator]
                optimizer.step()
            previous[client] = net
            locally.append((len(rows), net.state_dict()))
        total = sum(count for count, _ in locally)
        globally.load_state_dict(
            {name: sum(count / total * state[name] for count, state in locally) for name in locally[0][1]}
        )
    return globally  # type: ignore[return-value]


@pytest.mark.parametrize("batch_size", ["full", 100], ids=["plain", "recorded"])
def test_three_rounds_match_plain_torch(batch_size: object) -> None:
    data, task = federation((20, 30)), Task(Encoder, dtype="float64")
    algorithm = Moon(lr=LR, mu=MU, temperature=TEMPERATURE, epochs=3, batch_size=batch_size)
    backend = Serial(data, task, probe(data, task).setup(group=1))
    found = last(fit(data, task, algorithm, 3, evaluation=QUIET, backend=backend)).state["model"]
    for name, leaf in by_hand(task, data, rounds=3, steps=3).state_dict().items():
        if leaf.is_floating_point():
            torch.testing.assert_close(found[name], leaf, rtol=1e-9, atol=1e-11)


def test_a_layer_can_be_named_and_a_wrong_name_is_an_error() -> None:
    data, task = federation((10, 12)), Task(Dense, dtype="float64")

    def model(**settings: object) -> dict[str, Tensor]:
        algorithm = Moon(**{"mu": 5.0, "epochs": 2, **settings})
        return last(fit(data, task, algorithm, 3, evaluation=QUIET)).state["model"]

    assert tree.sha256(model()) == tree.sha256(model(layer="out"))
    # what the first layer is given does not depend on the weights
    torch.testing.assert_close(model(layer="hidden"), model(mu=0.0), rtol=0, atol=1e-12)
    assert not torch.allclose(model()["hidden.weight"], model(mu=0.0)["hidden.weight"], atol=1e-6)
    with pytest.raises(InputError, match=r"no layer 'ot' .* Did you mean 'out'\?"):
        model(layer="ot")


def test_without_the_contrast_it_is_fedavg() -> None:
    data, task = federation((10, 12)), Task(Dense)
    states = [last(fit(data, task, one, 2, evaluation=QUIET)).state["model"] for one in (Moon(mu=0.0), FedAvg())]
    assert tree.sha256(states[0]) == tree.sha256(states[1])
