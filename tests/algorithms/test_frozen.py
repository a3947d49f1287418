"""Frozen parameters are neither sent nor kept: everything is as if they were constants in the model's code."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedloom import tree
from fedloom.algorithms import ALGORITHMS
from fedloom.compression.table import CompressTable
from fedloom.federation.engine import Evaluation, RoundRecord, fit
from fedloom.federation.sampling import Sampling
from fedloom.privacy.protection import Protection
from fedloom.privacy.table import PrivacyTable
from fedloom.task import Task
from tests.conftest import CLASSES, FEATURES, federation


class Features(nn.Module):
    """Random features that nobody trains, below and within what is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.random = nn.Linear(FEATURES, 9)
        self.random.requires_grad_(False)
        self.norm = nn.LayerNorm(9)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.middle = nn.Linear(9, 6)
        self.middle.bias.requires_grad_(False)
        nn.init.normal_(self.middle.bias)
        self.out = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        return self.out(torch.tanh(self.middle(self.norm(self.random(x)))))


class Constants(Features):
    """The same model, whose constants are buffers that are not saved."""

    def __init__(self) -> None:
        super().__init__()
        for part, name in ((self.random, "weight"), (self.random, "bias"), (self.middle, "bias")):
            value = getattr(part, name).detach()
            delattr(part, name)
            part.register_buffer(name, value, persistent=False)


FROZEN = {"random.weight", "random.bias", "middle.bias"}
WAYS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ALGORITHMS if name not in ("cocoa",)),
    *(("peer", {"weights": weights, "metric": "loss"}) for weights in ("score", "within_std", "metropolis")),
    ("peer", {"topology": "ring", "weights": "metropolis"}),
    ("staged", {"groups": 3}),
    ("fedavg", {"rule": "geometric_median"}),
    ("fedavg", {"rule": "centred_clipping"}),
    ("fedavg", {"optimizer": "adam", "optimizer_state": "keep"}),
    ("evaluation_weighted", {"metric": "loss"}),
]


def records(model: type[nn.Module], name: str, settings: dict[str, Any], **given: Any) -> list[RoundRecord]:
    """Two rounds with seven clients."""
    algorithm = ALGORITHMS[name](**({} if "lr" not in ALGORITHMS[name].known() else {"lr": 0.1}), **settings)
    data = federation((14, 9, 21, 12, 17, 10, 13))
    return list(fit(data, Task(model), algorithm, 2, evaluation=Evaluation(splits=("test",)), **given))


def assert_same(found: list[RoundRecord], wanted: list[RoundRecord]) -> None:
    """All that is learnt, kept, sent and measured is the same, to the last bit."""
    for one, other in zip(found, wanted, strict=True):
        assert tree.sha256_of_groups(one.state) == tree.sha256_of_groups(other.state)
        kept, expected = ({c: tree.sha256_of_groups(own) for c, own in r.own.items()} for r in (one, other))
        assert kept == expected
        sent, alike = ([(r.bytes_up, r.bytes_down, r.lengths) for r in each.reports] for each in (one, other))
        assert sent == alike
        assert str(one.clients) == str(other.clients)
        leaves = {name for groups in (one.state, *one.own.values()) for tree in groups.values() for name in tree}
        assert not leaves & FROZEN


@pytest.mark.parametrize(("name", "settings"), WAYS, ids=str)
def test_what_is_frozen_is_as_good_as_a_constant(name: str, settings: dict[str, Any]) -> None:
    assert_same(*(records(model, name, settings) for model in (Features, Constants)))


@pytest.mark.parametrize(
    "given",
    [
        {"compress": CompressTable(up={"name": "topk", "keep": 0.2}, down="bfloat16")},
        {"compress": CompressTable(up="powersgd", down="lossless")},
        {"secure_aggregation": {"min_clients": 3, "threshold": 0.67}},
        {"dp": {"noise_multiplier": 1.0, "clip": 0.5, "delta": 1e-3}},
    ],
    ids=str,
)
def test_compression_and_protections_only_see_what_is_learnt(
    given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("secrets.token_bytes", bytes)  # the same noise in both runs

    def run(model: type[nn.Module]) -> list[RoundRecord]:
        if "compress" in given:
            return records(model, "fedavg", {}, **given)
        sampling = Sampling(sampling="poisson", fraction=0.8) if "dp" in given else Sampling()
        protection = Protection(PrivacyTable(**given), sampling, 7, 2)
        return records(model, "fedavg", {"weights": "uniform"}, protection=protection, sampling=sampling)

    assert_same(run(Features), run(Constants))


def test_messages_and_what_clients_keep_have_the_bytes_of_what_is_learnt() -> None:
    size = sum(leaf.nbytes for name, leaf in Features().state_dict().items() if name not in FROZEN)
    first, _ = records(Features, "fedavg", {})
    assert {(report.bytes_up, report.bytes_down) for report in first.reports} == {(size + 8, size)}
    first, _ = records(Features, "ditto", {})
    assert {tree.size(own["personal"]) for own in first.own.values()} == {size}
