"""Recorded computations: replaying one is doing it again, bit for bit, or it is not recorded at all."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.models import build
from fedloom.training.masking import Masked
from fedloom.training.modules import ModuleTensors
from fedloom.training.tape import CannotRecord, Tape, record, recorded
from fedloom.tree import Tree


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.norm, self.out = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.dropout(self.norm(self.hidden(x)).relu(), 0.4, self.training))


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.max_pool2d(self.conv(x), 2).relu().flatten(1))


class Words(nn.Module):
    def __init__(self, **settings: int) -> None:
        super().__init__()
        self.model = build("next_word_lstm", vocabulary=12, embedding=4, units=5, **settings)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


def numbers(*shape: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(sum(shape)).normal(size=shape)).float()


def tokens(*shape: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(0).integers(0, 12, size=shape))


class Sideways(nn.Module):
    """Words looked up by indices that are not laid out one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(12, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.words(x.t()).tanh().mean(0) + self.words(x[:, :2]).sum(1))


MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "dense": (lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)), numbers(7, 6)),
    "normalised, with dropout": (Normed, numbers(7, 6)),
    "pooled": (Pooled, numbers(7, 1, 8, 8)),
    "words": (Words, tokens(7, 4)),
    "words, sideways": (Sideways, tokens(7, 4)),
    "words in a normalised cell": (lambda: Words(layer_norm=True), tokens(7, 4)),
}


class Training:
    """One step of SGD on tensors that stay where they are."""

    def __init__(self, model: nn.Module, x: Tensor, lr: float = 0.3) -> None:
        self.model, self.x, self.y, self.lr = model, x.clone(), torch.arange(len(x)) % 3, lr
        self.key = torch.tensor([5, 6])
        self.tensors = ModuleTensors(model)
        self.given = (self.tensors.parameters, self.tensors.buffers, self.x, self.y, self.key)

    def step(self) -> None:
        self.step_on(*self.given)

    def step_on(self, parameters: Tree, buffers: Tree, x: Tensor, y: Tensor, key: Tensor) -> None:
        with Masked(key), self.tensors.replaced({**parameters, **buffers}):
            loss = F.cross_entropy(self.model(x), y)
        gradients = torch.autograd.grad(loss, list(parameters.values()))
        with torch.no_grad():
            torch._foreach_add_(list(parameters.values()), list(gradients), alpha=-self.lr)

    def record(self) -> Tape:
        return record(self.step_on, *self.given)

    def changes(self) -> list[Tensor]:
        return [leaf.detach() for leaf in (*self.model.parameters(), *self.model.buffers())]

    def put(self, values: list[Tensor], x: Tensor, key: list[int]) -> None:
        with torch.no_grad():
            for leaf, value in zip(self.changes(), values, strict=True):
                leaf.copy_(value)
        self.x.copy_(x)
        self.key.copy_(torch.tensor(key))


def both(training: Training, replay: Callable[[], None]) -> tuple[list[Tensor], list[Tensor]]:
    """What three steps on other examples do, by themselves and replayed."""
    before = [leaf.clone() for leaf in training.changes()]
    found = []
    for step in (training.step, replay):
        training.put(before, training.x, [5, 6])
        for number in range(3):
            training.x.copy_(training.x.roll(1, 0))
            training.key.copy_(torch.tensor([number, 9]))
            step()
        found.append([leaf.clone() for leaf in training.changes()])
        training.x.copy_(training.x.roll(-3, 0))
    return found[0], found[1]


def no_grad(replay: Callable[[], None]) -> Callable[[], None]:
    return torch.no_grad()(replay)


@pytest.mark.parametrize("name", MODELS)
def test_a_replayed_step_gives_the_same_bits_on_other_values(name: str) -> None:
    torch.manual_seed(0)
    make, x = MODELS[name]
    training = Training(make(), x)
    tape = training.record()
    done, replayed = both(training, no_grad(tape.replay))
    assert all(torch.equal(a, b) for a, b in zip(done, replayed, strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_a_fused_step_is_the_same_up_to_rounding(name: str) -> None:
    torch.manual_seed(0)
    make, x = MODELS[name]
    training = Training(make().double(), x.double() if x.is_floating_point() else x)
    tape = training.record().fused()
    done, replayed = both(training, no_grad(tape.replay))
    for a, b in zip(done, replayed, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


class Factors(nn.Module):
    """Two parameters whose gradients are products with each other."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Parameter(numbers(7, 2).double()), nn.Parameter(numbers(2, 3).double())

    def forward(self, x: Tensor) -> Tensor:
        return self.left @ self.right + x[:, :3]


def test_parameters_that_are_factors_of_each_others_gradients_are_changed_together() -> None:
    training = Training(Factors(), numbers(7, 6).double())
    tape = training.record().fused()
    done, replayed = both(training, no_grad(tape.replay))
    for a, b in zip(done, replayed, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


def tried(computation: Callable[..., object], x: Tensor, total: Tensor) -> Tape:
    """A recording of a computation that adds something to a total."""
    return recorded(computation, (x, total), (x,), lambda: (total,), (x.flip(0) * 0.5,))


def test_recording_leaves_everything_as_it_was() -> None:
    training = Training(MODELS["normalised, with dropout"][0](), numbers(7, 6))
    before = [leaf.clone() for leaf in (*training.changes(), training.x)]
    recorded(training.step_on, training.given, (training.x,), training.changes, (numbers(7, 6).flip(0),))
    assert all(torch.equal(a, b) for a, b in zip(before, (*training.changes(), training.x), strict=True))


def test_plain_sgd_never_stores_the_gradient_of_a_weight_matrix() -> None:
    """The work of a step, counted: a regression here is a slower round."""
    training = Training(build("mnist_2nn"), numbers(10, 784))
    tape = training.record()
    assert len(tape) == 20
    stored = [tuple(o.shape) for kernel in tape.kernels for o in kernel.outputs if o is not None]
    assert (200, 784) in stored
    fused = tape.fused()
    assert len(fused) == 20
    matrices = {(200, 784), (200, 200), (10, 200)}
    made = [tuple(o.shape) for k in fused.kernels if not k.in_place for o in k.outputs if o is not None]
    assert not [shape for shape in made if shape in matrices and shape != (10, 200)]  # (10, 200) is a batch, too


def test_an_embedding_is_changed_in_the_rows_that_were_seen() -> None:
    training = Training(MODELS["words"][0](), tokens(7, 4))
    made = [
        tuple(o.shape) for k in training.record().fused().kernels if not k.in_place for o in k.outputs if o is not None
    ]
    assert (12, 4) not in made


def test_what_does_not_change_is_computed_once() -> None:
    x, total = torch.ones(3), torch.zeros(3)
    tape = record(lambda x, total: total.add_(x * torch.arange(3).float().exp()), x, total)
    assert len(tape) == 2


def test_a_result_that_nothing_reads_is_not_computed() -> None:
    def computation(x: Tensor, total: Tensor) -> None:
        (x.exp() + 3).sin()
        total.add_(x)

    assert len(record(computation, torch.ones(3), torch.zeros(3))) == 1


def test_a_constant_that_is_changed_in_place_is_made_again() -> None:
    def computation(x: Tensor, total: Tensor) -> None:
        fresh = torch.zeros(3)
        fresh += x
        total.copy_(fresh)

    total = torch.zeros(3)
    tape = record(computation, torch.ones(3), total)
    with torch.no_grad():
        tape.replay()
        tape.replay()
    assert total.tolist() == [1, 1, 1]


LEAKS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x.sum()),
    "int": lambda x: int(x.sum()),
    "index": lambda x: [1, 2, 3, 4][x.argmax()],
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "detached numpy": lambda x: x.detach().cpu().numpy(),
    "asarray": lambda x: np.asarray(x),
    "array": lambda x: np.array(x),
    "a numpy function": lambda x: np.add(x, 1),
    "dlpack": lambda x: np.from_dlpack(x),
    "memory view": lambda x: memoryview(x.numpy()),
    "storage": lambda x: x.untyped_storage()[0],
    "typed storage": lambda x: x.storage(),
    "address": lambda x: x.data_ptr(),
    "pickle": lambda x: pickle.dumps(x),
    "deep copy": lambda x: copy.deepcopy(x),
    "text": lambda x: str(x),
    "format": lambda x: f"{x.sum():.3f}",
    "truth": lambda x: 1 if (x > 0).any() else 2,
    "comparison": lambda x: torch.equal(x, x + 1),
    "closeness": lambda x: torch.allclose(x, x),
    "membership": lambda x: 1.0 in x,
    "rows by a mask": lambda x: x[x > 0],
    "nonzero": lambda x: x.nonzero(),
    "unique": lambda x: x.unique(),
    "split at values": lambda x: torch.tensor_split(x, (x > 0).sum().reshape(1)),
    "a list of values": lambda x: torch.tensor([x[0], x[1]]),
    "repeats": lambda x: x.repeat_interleave((x > 0).long()),
    "one hot": lambda x: F.one_hot(x.long()),
    "range": lambda x: torch.arange(int(x.sum())),
    "torch's generator": lambda x: torch.rand(3),
    "dropout": lambda x: F.dropout(x, 0.5),
    "other memory": lambda x: x.set_(torch.zeros(3)),
    "another shape": lambda x: x.unsqueeze_(0),
    "transposed in place": lambda x: (x * 1).reshape(1, 3).transpose_(0, 1),
}


@pytest.mark.parametrize("name", LEAKS)
def test_no_value_reaches_python_while_a_step_is_recorded(name: str) -> None:
    x, total = torch.ones(3), torch.zeros(3)

    def computation(x: Tensor, total: Tensor) -> None:
        LEAKS[name](x)
        total.add_(x)

    with pytest.raises(Exception):
        record(computation, x, total)
    with pytest.raises(CannotRecord):
        tried(computation, x, total)


def test_what_is_neither_given_nor_made_inside_is_not_changed() -> None:
    outside = torch.zeros(3)
    with pytest.raises(CannotRecord, match="neither a parameter nor a buffer"):
        tried(lambda x, total: outside.add_(x), torch.ones(3), torch.zeros(3))


def test_what_a_recording_does_not_see_is_found_by_trying() -> None:
    calls: list[int] = []

    def counts_its_calls(x: Tensor, total: Tensor) -> None:
        calls.append(1)
        total.add_(x * len(calls))

    def draws_from_numpy(x: Tensor, total: Tensor) -> None:
        total.add_(x + float(np.random.normal()))

    def draws_rarely(x: Tensor, total: Tensor) -> None:
        total.add_(x * (2 if random.random() < 1e-9 else 1))

    for computation in (counts_its_calls, draws_from_numpy, draws_rarely):
        with pytest.raises(CannotRecord):
            tried(computation, torch.ones(3), torch.zeros(3))


def test_torchs_own_lstm_is_left_alone() -> None:
    model = nn.LSTM(3, 4)
    tensors = ModuleTensors(model)

    def computation(parameters: Tree, x: Tensor, total: Tensor) -> None:
        with tensors.replaced(parameters):
            gradient = torch.autograd.grad(model(x)[0].sum(), list(parameters.values()))
        total.add_(gradient[0].sum())

    x, total = torch.ones(5, 2, 3), torch.zeros(())
    with pytest.raises(CannotRecord, match="LSTM"):
        recorded(computation, (tensors.parameters, x, total), (x,), lambda: (total,), (x * 2,))
