"""Tiny federations and models, and worker processes that the whole session shares."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedloom import tree
from fedloom.backends.vector import Vector, Workers
from fedloom.data.federation import Federation
from fedloom.data.split import Split
from fedloom.federation.engine import RoundRecord
from fedloom.task import Task
from fedloom.training.probe import probe

FEATURES = 16
CLASSES = 3
ALL_TRAIN = Split(train=1.0, validation=0.0, test=0.0)


def pytest_configure() -> None:
    from hypothesis import settings  # not above: worker processes import this file for its models

    # the clock decides nothing, and every run draws the same examples
    settings.register_profile("fedloom", deadline=None, derandomize=True, database=None)
    settings.load_profile("fedloom")
    torch.set_num_threads(1)  # as worker processes do; two threads on two busy cores wait for each other


def slow_after(quick: int, values: Iterable[Any]) -> list[Any]:
    """Parameters of a test: the first ones run in `make test`, the others in `make slow`.

    A tuple has a value for each parameter.
    """
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)), marks=[pytest.mark.slow] if number >= quick else []
        )
        for number, value in enumerate(values)
    ]


def federation(sizes: Sequence[int], *, seed: int = 0, split: Split = Split(), **more: Any) -> Federation:
    """Clients of these sizes, with examples of 16 features and 3 classes that a model can learn."""
    draws = np.random.default_rng(seed)
    y = draws.integers(0, CLASSES, sum(sizes))
    x = draws.normal(size=(sum(sizes), FEATURES)) + y[:, None] * 0.5
    offsets = np.cumsum([0, *sizes])
    names = tuple(f"client-{number}" for number in range(len(sizes)))
    given = {"split": split, "classes": ("a", "b", "c"), "names": names, **more}
    return Federation(torch.from_numpy(x).float(), torch.from_numpy(y), offsets, **given)


def numbers_federation(
    x: Sequence[Any], y: Sequence[Any], sizes: Sequence[int], split: Split = ALL_TRAIN
) -> Federation:
    """A regression with exactly these numbers."""
    return Federation(
        torch.tensor(x, dtype=torch.float64), torch.tensor(y, dtype=torch.float64), np.cumsum([0, *sizes]), split=split
    )


class Dense(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(FEATURES, 7)
        self.out = nn.Linear(7, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.hidden(x)))


class Normed(nn.Module):
    """Batch normalisation over single values, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(FEATURES, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.3)
        self.out = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.drop(torch.relu(self.norm(self.hidden(x)))))


class Pictures(nn.Module):
    """A convolution with batch normalisation over whole channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)
        self.out = nn.Linear(3 * 4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        seen = torch.relu(self.norm(self.conv(x.reshape(-1, 1, 4, 4))))
        return self.out(nn.functional.max_pool2d(seen, 2).flatten(1))


class Cumulative(nn.Module):
    """A plain mean of all batches' statistics: it reads its counter, so torch cannot vmap it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES, momentum=None)
        self.out = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x))


class Recurrent(nn.Module):
    """Something that torch cannot vmap, or only by looping over the lanes."""

    def __init__(self, layers: int = 1, dropout: float = 0.0) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 5, num_layers=layers, dropout=dropout, batch_first=True)
        self.out = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(x.reshape(-1, 4, 4))[0][:, -1])


class Noisy(nn.Module):
    """Draws from torch's global generator whenever it is called, in training and in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x + torch.rand_like(x))


class Logit(nn.Module):
    """A linear model with one number for two classes."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(FEATURES, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x).squeeze(-1)


def two_classes(data: Federation) -> Federation:
    """The same examples with the first class against the others."""
    return replace(data, y=(data.y > 0).long(), classes=("no", "yes"))


def last(records: Iterable[RoundRecord]) -> RoundRecord:
    """The record of the last round."""
    return list(records)[-1]


def facts(record: RoundRecord) -> dict[str, Any]:
    """All that a record says but the time it took: equal facts mean equal bits."""
    return {
        "round": record.round,
        "cohort": record.cohort,
        "complete": record.complete,
        "state": {group: tree.sha256(leaves) for group, leaves in record.state.items()},
        "own": {c: {group: tree.sha256(leaves) for group, leaves in own.items()} for c, own in record.own.items()},
        "clients": record.clients,
        "server": record.server,
        "reports": record.reports,
    }


def assert_close(a: RoundRecord, b: RoundRecord, tolerance: float = 1e-9) -> None:
    """Two records agree in every weight and every measurement."""
    trees = [(a.state[group], b.state[group]) for group in a.state]
    trees += [(a.own[client][group], b.own[client][group]) for client in a.own for group in a.own[client]]
    for one, other in trees:
        assert one.keys() == other.keys()
        for name in one:
            torch.testing.assert_close(one[name], other[name], rtol=tolerance, atol=tolerance)
    assert a.clients.keys() == b.clients.keys()
    for phase in a.clients:
        for client, splits in a.clients[phase].items():
            for split, measured in splits.items():
                other = b.clients[phase][client][split]
                assert measured.count == other.count
                assert measured.sums == pytest.approx(other.sums, rel=tolerance, abs=tolerance)
    for one, other in zip(a.reports, b.reports, strict=True):
        assert [epoch.keys() for epoch in one.history] == [epoch.keys() for epoch in other.history]
        for left, right in zip(one.history, other.history, strict=True):
            assert left == pytest.approx(right, rel=tolerance, abs=tolerance)


@pytest.fixture(scope="session")
def pools() -> Iterator[Callable[[int], Workers]]:
    """Worker processes by their number, started when first asked for and shared: starting takes seconds."""
    started: dict[int, Workers] = {}

    def pool(count: int) -> Workers:
        if count not in started:
            started[count] = Workers(count)
        return started[count]

    yield pool
    for workers in started.values():
        workers.close()


@pytest.fixture
def vector(pools: Callable[[int], Workers]) -> Callable[..., Vector]:
    """Makes vector backends on the session's workers."""

    def make(federation: Federation, task: Task, group: int = 1, workers: int = 2, **settings: Any) -> Vector:
        return Vector(federation, task, probe(federation, task).setup(group=group, **settings), pools(workers))

    return make


class Moody(nn.Module):
    """Refuses batches of twelve."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(FEATURES, 3)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] == 12:
            raise RuntimeError("twelve is right out")
        return self.out(x)


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
