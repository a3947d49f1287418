"""FedAvg as a PyTorch user would write it: a module, torch.optim and a loop, and nothing of fedloom's training code.

fedloom's numbers are compared with these. The loss of a batch is the value of the loss function on the batch. Every
client trains a new copy of the module in every round. Only a few random choices are fedloom's, so that the two can be
compared:

- The batches of epoch e are cut from the client's training rows in the order
  `keys.permutation(keys.key(seed, "batches", round, call, client, e), rows)`.
- Before every step, torch's, Python's and numpy's generators are seeded from
  `keys.key(seed, "draws", round, call, client, step)`; before every batch of an evaluation they are seeded with 0.
- The n-th call of a dropout function in a step keeps values where `keys.uniform(key, count, n) >= p`, with the key
  `keys.key(seed, "dropout", round, call, client, step)`; in an evaluation the key is 0.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fedloom import keys
from fedloom.data.federation import Federation
from fedloom.data.split import SplitName
from fedloom.task import Task
from fedloom.training.schedule import Training
from fedloom.tree import Tree

Values = dict[str, float]  # the loss, and metrics that are means over examples
Loss = Callable[[Any, Tensor], Tensor]
CALL = 0  # FedAvg calls its clients once in a round


@dataclass(frozen=True)
class PlainRound:
    """The results of one round of the plain loop. Dicts have an entry per client."""

    weights: Tree  # the new global weights
    losses: dict[int, list[float]]  # the mean training loss of every epoch
    before: dict[int, dict[SplitName, Values]]  # metrics of the global weights before this round
    after: dict[int, dict[SplitName, Values]]  # metrics of the client's weights after training


def plain_fedavg(
    task: Task,
    federation: Federation,
    training: Training,
    rounds: int,
    *,
    seed: int = 0,
    splits: Sequence[SplitName] = ("test",),
    evaluation_batch: int = 1000,
) -> Iterator[PlainRound]:
    """Compute rounds of FedAvg in which every client takes part: w ← Σ n_k w_k / Σ n_k.

    >>> from fedloom import FedAvg, fit
    >>> data = Federation.from_arrays(np.eye(12), np.arange(12) % 3, clients=2)
    >>> task = Task(nn.Linear, args={"in_features": 12, "out_features": 3}, dtype="float64")
    >>> (reference,) = plain_fedavg(task, data, Training(batch_size=2), 1)
    >>> (record,) = fit(data, task, FedAvg(batch_size=2), 1)
    >>> bool((reference.weights["weight"] - record.state["model"]["weight"]).abs().max() < 1e-12)
    True
    """
    weights = initial_weights(task)
    kept: dict[int, dict[str, Any]] = {}  # optimiser states, where clients keep them
    for round in range(1, rounds + 1):
        trained: list[Tree] = []
        losses, before, after = {}, {}, {}
        for client in range(federation.clients):
            before[client] = {s: evaluate(task, weights, federation, client, s, evaluation_batch) for s in splits}
            with generators_given_back():
                found = train_client(task, federation, client, weights, training, seed, round, kept)
            trained.append(found[0])
            losses[client] = found[1]
            after[client] = {s: evaluate(task, found[0], federation, client, s, evaluation_batch) for s in splits}
        counts = [len(federation.indices(client, "train")) for client in range(federation.clients)]
        weights = mean(trained, counts, unchanged=frozen(task, weights))
        yield PlainRound(weights, losses, before, after)


def train_client(
    task: Task,
    federation: Federation,
    client: int,
    start: Tree,
    training: Training,
    seed: int,
    round: int,
    kept: dict[int, dict[str, Any]],
) -> tuple[Tree, list[float]]:
    """Train one client. Return its weights and the mean loss of every epoch."""
    module, loss_of = fresh_module(task), fresh_loss(task)
    load(module, start)
    module.train()
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = make_optimizer(training, parameters)
    if training.optimizer_state == "keep" and client in kept:
        optimizer.load_state_dict(kept[client])

    rows = federation.indices(client, "train")
    size = len(rows) if training.batch_size == "full" else training.batch_size
    per_epoch = math.ceil(len(rows) / size)
    losses: list[float] = []
    for step in range(steps(training, per_epoch)):
        epoch, number = divmod(step, per_epoch)
        if number == 0:
            order = rows
            if training.batch_size != "full":
                key = keys.key(seed, "batches", round, CALL, client, epoch)
                order = rows[torch.from_numpy(keys.permutation(key, len(rows)))]
            losses.append(0.0)
            seen = 0
        batch = order[number * size : (number + 1) * size]
        x, y = examples(task, federation, batch)
        seed_generators(keys.key(seed, "draws", round, CALL, client, step))
        optimizer.zero_grad(set_to_none=True)
        with KeyedDropout(keys.key(seed, "dropout", round, CALL, client, step)):
            loss = loss_of(module(x), y).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        for parameter in parameters:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
        if training.clip is not None:
            nn.utils.clip_grad_norm_(parameters, training.clip)
        optimizer.step()
        losses[-1] = (losses[-1] * seen + loss.item() * len(batch)) / (seen + len(batch))
        seen += len(batch)
    if training.optimizer_state == "keep":
        kept[client] = copy.deepcopy(optimizer.state_dict())
    return leaves(module), losses


@torch.no_grad()
def evaluate(
    task: Task, weights: Tree, federation: Federation, client: int, split: SplitName, largest: int = 1000
) -> Values:
    """Return loss and metrics on one split: Σ n_b · value(batch b) / n over equal batches of at most `largest` rows.

    Every batch gets a new copy of the module in evaluation mode, so that no batch affects the next.
    """
    rows = federation.indices(client, split)
    sums: Values = {}
    for batch in torch.tensor_split(rows, math.ceil(len(rows) / largest)) if len(rows) else ():
        x, y = examples(task, federation, batch)
        # inside a mode, torch computes some models in another way: use it only if dropout is active in evaluation
        for mode in (KeyedDropout(0), nullcontext()):
            module, loss_of = fresh_module(task), fresh_loss(task)
            load(module, weights)
            module.eval()
            with generators_given_back():
                seed_generators(0)
                with mode:
                    output = module(x.clone())
                    found = {"loss": loss_of(output, y).mean().item()}
            if isinstance(mode, KeyedDropout) and mode.calls:
                break
        for metric in task.measures:
            if metric.name == "accuracy":
                found["accuracy"] = accuracy(output, y)
            elif metric.values is not None:
                found[metric.name] = metric.values(output, y).to(torch.float64).mean().item()
        for name, value in found.items():
            sums[name] = sums.get(name, 0.0) + value * len(batch)
    return {name: value / len(rows) for name, value in sums.items()}


# --- modules, losses and their weights


def fresh_module(task: Task) -> nn.Module:
    """Build a new module, so that everything it keeps in Python (counters, generators) starts from the beginning."""
    with generators_given_back():
        torch.manual_seed(keys.key(task.seed, "init") >> 1)
        if isinstance(task.model, str):
            from fedloom.models import build

            module = build(task.model, **task.args)
        else:
            module = copy.deepcopy(task.model) if isinstance(task.model, nn.Module) else task.model(**task.args)
    if task.dtype == "float64":
        wide = {torch.float32: torch.float64, torch.complex64: torch.complex128}
        # leaves for which the model chose a dtype, such as bfloat16, keep it
        module._apply(lambda leaf: leaf.to(wide.get(leaf.dtype, leaf.dtype)))  # type: ignore[no-untyped-call]
    return module


def fresh_loss(task: Task) -> Loss:
    """Return a new copy of the task's loss, so that a loss with a state starts from the beginning."""
    if isinstance(task.loss, str):
        return LOSSES[task.loss]
    return copy.deepcopy(task.loss)


def _mse(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output.reshape(target.shape), target.to(output.dtype))


def _mae(output: Tensor, target: Tensor) -> Tensor:
    return F.l1_loss(output.reshape(target.shape), target.to(output.dtype))


def _bce(output: Tensor, target: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(output.reshape(target.shape), target.to(output.dtype))


LOSSES: dict[str, Loss] = {"cross_entropy": F.cross_entropy, "mse": _mse, "mae": _mae, "bce": _bce}


def accuracy(output: Tensor, target: Tensor) -> float:
    """Return the share of examples whose class has the largest output, or the right sign if there is one output."""
    if output.dim() == 1 or output.shape[-1] == 1:
        right = (output.reshape(-1) > 0) == (target.reshape(-1) > 0)
    else:
        right = output.argmax(-1) == target
    return right.to(torch.float64).mean().item()


def leaves(module: nn.Module) -> Tree:
    """Return copies of all parameters and saved buffers. A parameter with two names appears once."""
    saved = module.state_dict().keys()
    named = {**dict(module.named_parameters()), **{n: b for n, b in module.named_buffers() if n in saved}}
    return {name: leaf.detach().clone() for name, leaf in named.items()}


@torch.no_grad()
def load(module: nn.Module, weights: Tree) -> None:
    """Copy weights into a module."""
    for name, leaf in (*module.named_parameters(), *module.named_buffers()):
        if name in weights:
            leaf.copy_(weights[name])


def initial_weights(task: Task) -> Tree:
    """Return the weights that the first round starts with."""
    return leaves(fresh_module(task)) if task.init == "torch" else task.initial()


def frozen(task: Task, weights: Tree) -> Tree:
    """Return the parameters that are not trained."""
    named = fresh_module(task).named_parameters()
    return {name: weights[name] for name, parameter in named if not parameter.requires_grad}


def mean(trees: Sequence[Tree], counts: Sequence[int], unchanged: Tree) -> Tree:
    """Return Σ n_k w_k / Σ n_k of every leaf, in double precision. Whole numbers are rounded."""
    found = {}
    for name, first in trees[0].items():
        kind = torch.complex128 if first.is_complex() else torch.float64
        total = sum(tree[name].to(kind) * count for tree, count in zip(trees, counts, strict=True)) / sum(counts)
        assert isinstance(total, Tensor)
        exact = first.is_floating_point() or first.is_complex()
        found[name] = (total if exact else total.round()).to(first.dtype)
    return {**found, **unchanged}


def steps(training: Training, per_epoch: int) -> int:
    """Return the number of steps of a client in a round. Epochs may be fractions."""
    return max(1, round(training.epochs * per_epoch))


def make_optimizer(training: Training, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return torch's optimiser for these settings."""
    given: dict[str, Any] = {"lr": training.lr, "weight_decay": training.weight_decay}
    if training.epsilon is not None:
        given["eps"] = training.epsilon
    if training.optimizer == "sgd":
        return torch.optim.SGD(parameters, momentum=training.momentum, **given)
    if training.optimizer == "adam":
        return torch.optim.Adam(parameters, betas=(training.beta1, training.beta2), **given)
    if training.optimizer == "adagrad":
        return torch.optim.Adagrad(parameters, **given)
    return torch.optim.Adadelta(parameters, rho=training.rho, **given)


def examples(task: Task, federation: Federation, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows of the federation as the model takes them."""
    x, y = federation.x[rows], federation.y[rows]
    if x.is_floating_point():
        x = x.to(task.torch_dtype)
    elif federation.scale != 1.0 or x.dtype == torch.uint8:
        x = x.to(task.torch_dtype) * federation.scale
    return x, y.to(task.torch_dtype) if y.is_floating_point() else y


# --- randomness: the contract with fedloom


def seed_generators(key: int) -> None:
    """Seed the three global generators that a model may draw from."""
    torch.manual_seed(key >> 1)
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)


@contextmanager
def generators_given_back() -> Iterator[None]:
    """Restore the global generators afterwards."""
    before = torch.random.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.random.set_rng_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])


class KeyedDropout(TorchFunctionMode):
    """Computes dropout as torch defines it, but draws the masks from a key."""

    def __init__(self, key: int) -> None:
        super().__init__()
        self.key = torch.tensor(keys.words(key))
        self.calls = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (F.dropout, F.alpha_dropout):
            return self.dropped(func, False, *args, **(kwargs or {}))
        if func in (F.dropout1d, F.dropout2d, F.dropout3d, F.feature_alpha_dropout):
            return self.dropped(func, True, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def dropped(
        self,
        func: Callable[..., Tensor],
        channels: bool,
        input: Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> Tensor:
        """Return the result of a dropout function. `channels` drops whole channels (the first two dimensions)."""
        again = torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
        if not training or p == 0 or again:  # inside a checkpoint, torch draws itself: it restores its generator
            return func(input, p, training, inplace)
        shape = (*input.shape[:2], *(1 for _ in input.shape[2:])) if channels else input.shape
        keep = (keys.uniform(self.key, math.prod(shape), self.calls) >= p).reshape(shape)
        self.calls += 1
        if func in (F.alpha_dropout, F.feature_alpha_dropout):
            floor = -1.7580993408473766  # −scale · alpha of SELU; the factors below keep mean and variance
            a = ((1 - p) * (1 + p * floor**2)) ** -0.5 if p < 1 else 0.0
            output = torch.where(keep, input, floor) * a - a * p * floor
        else:
            output = input * keep / (1 - p if p < 1 else 1)
        return input.copy_(output) if inplace else output
