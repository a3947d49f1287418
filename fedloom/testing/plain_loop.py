"""FedAvg as a PyTorch user would write it: a module, torch.optim and a loop, and nothing of fedloom's training code.

fedloom's numbers are compared with these. The loss of a batch is the value of the loss function on the batch. Every
client trains a new copy of the module in every round. The task builds the module and defines the metrics. Otherwise,
only a few random choices are fedloom's, so that the two can be compared:

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fedloom import keys
from fedloom.data.federation import Federation
from fedloom.data.split import SplitName
from fedloom.task import Task, leaves, widened
from fedloom.training import generators
from fedloom.training.settings import Training
from fedloom.tree import Tree

Values = dict[str, float]  # the loss, and metrics that are means over examples
Loss = Callable[[Any, Tensor], Tensor]
Key = Callable[[str, int], int]  # `client_key` of one client in one round
CALL = 0  # FedAvg calls its clients once in a round
LOSSES: dict[str, Callable[..., Tensor]] = {
    "cross_entropy": F.cross_entropy,
    "mse": F.mse_loss,
    "mae": F.l1_loss,
    "bce": F.binary_cross_entropy_with_logits,
}


@dataclass(frozen=True)
class PlainRound:
    """The results of one round of the plain loop. Dicts have an entry per client."""

    weights: Tree  # the new global weights
    losses: dict[int, list[float]]  # the mean training loss of every epoch
    measured: dict[str, dict[int, Values]]  # by phase: pre_fit, post_fit and, in the last round, final


def plain_fedavg(
    task: Task,
    federation: Federation,
    training: Training,
    rounds: int,
    *,
    seed: int = 0,
    split: SplitName = "test",
    evaluation_batch: int = 1000,
) -> Iterator[PlainRound]:
    """Compute rounds of FedAvg in which every client takes part: w ← Σ n_k w_k / Σ n_k.

    >>> import numpy as np
    >>> from fedloom import FedAvg, fit
    >>> data = Federation.from_arrays(np.eye(12), np.arange(12) % 3, clients=2)
    >>> task = Task(nn.Linear, args={"in_features": 12, "out_features": 3}, dtype="float64")
    >>> (reference,) = plain_fedavg(task, data, Training(batch_size=2), 1)
    >>> (record,) = fit(data, task, FedAvg(batch_size=2), 1)
    >>> bool((reference.weights["weight"] - record.state["model"]["weight"]).abs().max() < 1e-12)
    True
    """
    clients = range(federation.clients)
    counts = [len(federation.indices(client, "train")) for client in clients]
    kept: dict[int, Any] = {}  # optimiser states, where clients keep them

    def measured(trees: Sequence[Tree]) -> dict[int, Values]:
        return {c: evaluate(task, trees[c], federation, c, split, evaluation_batch) for c in clients}

    task.see(federation)
    weights = task.whole(task.initial())
    for round in range(1, rounds + 1):
        phases = {"pre_fit": measured([weights] * len(clients))}
        trained: list[Tree] = []
        losses: dict[int, list[float]] = {}
        for client in clients:
            key, own = partial(client_key, seed, round, client), training.of(federation.name(client))
            model, losses[client] = train_client(task, federation, client, weights, own, key, kept, round)
            trained.append(model)
        phases["post_fit"] = measured(trained)
        weights = mean(trained, counts)
        if round == rounds:
            phases["final"] = measured([weights] * len(clients))
        yield PlainRound(weights, losses, phases)


def client_key(seed: int, round: int, client: int, purpose: str, number: int) -> int:
    """Return the key of one client in one round, for a purpose and the number of a step or an epoch."""
    return keys.key(seed, purpose, round, CALL, client, number)


@generators.lent()
def train_client(
    task: Task,
    federation: Federation,
    client: int,
    start: Tree,
    training: Training,
    key: Key,
    kept: dict[int, Any],
    round: int = 1,
) -> tuple[Tree, list[float]]:
    """Train one client. Return its weights and the mean loss of every epoch."""
    module, loss_of = task.build(), fresh_loss(task)
    load(module, start)
    module.train()
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = make_optimizer(training, parameters)
    if client in kept:
        optimizer.load_state_dict(kept[client])
    sums: dict[int, float] = {}  # of every epoch
    counts: dict[int, int] = {}
    drawn = list(batches(federation.indices(client, "train"), training, key))
    for step, (epoch, rows) in enumerate(drawn):
        for group in optimizer.param_groups:
            group["lr"] = training.lr_at(round, step, len(drawn))
        x, y = examples(task, federation, rows)
        generators.seed(key("draws", step))
        optimizer.zero_grad(set_to_none=True)
        with KeyedDropout(key("dropout", step)):
            loss = loss_of(module(x), y).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        for parameter in parameters:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
        if training.clip is not None:
            nn.utils.clip_grad_norm_(parameters, training.clip)
        optimizer.step()
        sums[epoch] = sums.get(epoch, 0.0) + loss.item() * len(rows)
        counts[epoch] = counts.get(epoch, 0) + len(rows)
    if training.optimizer_state == "keep":
        kept[client] = copy.deepcopy(optimizer.state_dict())
    return leaves(module), [sums[epoch] / counts[epoch] for epoch in sums]


def batches(rows: Tensor, training: Training, key: Key) -> Iterator[tuple[int, Tensor]]:
    """Iterate over the batches of a round, each with its epoch. Epochs may be fractions."""
    size = len(rows) if training.batch_size == "full" else training.batch_size
    per_epoch = math.ceil(len(rows) / size)
    for step in range(max(1, round(training.epochs * per_epoch))):
        epoch, number = divmod(step, per_epoch)
        if training.batch_size == "full":
            yield epoch, rows
        else:
            order = torch.from_numpy(keys.permutation(key("batches", epoch), len(rows)))
            yield epoch, rows[order[number * size : (number + 1) * size]]


@torch.no_grad()
def evaluate(
    task: Task, weights: Tree, federation: Federation, client: int, split: SplitName, largest: int = 1000
) -> Values:
    """Return loss and metrics on one split: Σ n_b · value(batch b) / n over equal batches of at most `largest` rows.

    Every batch gets a new copy of the module in evaluation mode, so that no batch affects the next.
    """
    rows = federation.indices(client, split)
    sums: Values = {}
    scores: dict[str, list[Tensor]] = {metric.name: [] for metric in task.measures if metric.scores is not None}
    for batch in torch.tensor_split(rows, math.ceil(len(rows) / largest)) if len(rows) else ():
        x, y = examples(task, federation, batch)
        # inside a mode, torch computes some models in another way: use it only if dropout is active in evaluation
        for mode in (KeyedDropout(0), nullcontext()):
            module, loss_of = task.build(), fresh_loss(task)
            load(module, weights)
            module.eval()
            with generators.lent(), mode:
                generators.seed(0)
                output = module(x.clone())
                found = {"loss": loss_of(output, y).mean().item()}
            if isinstance(mode, KeyedDropout) and mode.calls:
                break
        for metric in task.measures:
            if metric.values is not None:
                found[metric.name] = metric.values(output, y).to(torch.float64).mean().item()
            if metric.scores is not None:
                scores[metric.name].append(metric.scores(output, y).clone())
        for name, value in found.items():
            sums[name] = sums.get(name, 0.0) + value * len(batch)
    means = {name: value / len(rows) for name, value in sums.items()}
    for metric in task.measures if means else ():
        if metric.of_mean is not None:
            means[metric.name] = metric.of_mean(means[metric.name])
        if metric.summary is not None:  # such as AUROC, of all examples together
            targets = examples(task, federation, rows)[1]
            means[metric.name] = metric.summary(torch.cat(scores[metric.name]).numpy(), targets.numpy())
    return means


def fresh_loss(task: Task) -> Loss:
    """Return a new copy of the task's loss, so that a loss with a state starts from the beginning."""
    if not isinstance(task.loss, str):
        copied = copy.deepcopy(task.loss)
        return widened(copied, task.torch_dtype) if isinstance(copied, nn.Module) else copied
    named = LOSSES[task.loss]
    if task.loss == "cross_entropy":
        return named
    return lambda output, target: named(output.reshape(target.shape), target.to(output.dtype))


@torch.no_grad()
def load(module: nn.Module, weights: Tree) -> None:
    """Copy weights into a module."""
    for name, leaf in (*module.named_parameters(), *module.named_buffers()):
        if name in weights:
            leaf.copy_(weights[name])


def mean(trees: Sequence[Tree], counts: Sequence[int]) -> Tree:
    """Return Σ n_k w_k / Σ n_k of every leaf, in double precision. Whole numbers are rounded.

    A leaf that is the same everywhere, such as a frozen parameter, is not computed: rounding would change it.
    """
    found = {}
    for name, first in trees[0].items():
        if all(torch.equal(tree[name], first) for tree in trees):
            found[name] = first
            continue
        kind = torch.complex128 if first.is_complex() else torch.float64
        total = sum(tree[name].to(kind) * count for tree, count in zip(trees, counts, strict=True)) / sum(counts)
        assert isinstance(total, Tensor)
        exact = first.is_floating_point() or first.is_complex()
        found[name] = (total if exact else total.round()).to(first.dtype)
    return found


def make_optimizer(training: Training, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return torch's optimiser for these settings."""
    given: dict[str, Any] = {"lr": training.lr, "weight_decay": training.weight_decay}
    if training.epsilon is not None:
        given["eps"] = training.epsilon
    if training.optimizer in ("sgd", "nesterov"):
        nesterov = training.optimizer == "nesterov"
        return torch.optim.SGD(parameters, momentum=training.momentum, nesterov=nesterov, **given)
    if training.optimizer in ("adam", "adamw"):
        kind = torch.optim.Adam if training.optimizer == "adam" else torch.optim.AdamW
        return kind(parameters, betas=(training.beta1, training.beta2), **given)
    if training.optimizer == "rmsprop":
        given |= {"alpha": training.rho, "momentum": training.momentum, "centered": bool(training.centered)}
        return torch.optim.RMSprop(parameters, **given)
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


class KeyedDropout(TorchFunctionMode):
    """Computes dropout as torch defines it, but draws the masks from a key."""

    ELEMENTS = (F.dropout, F.alpha_dropout)
    CHANNELS = (F.dropout1d, F.dropout2d, F.dropout3d, F.feature_alpha_dropout)  # drop whole channels

    def __init__(self, key: int) -> None:
        super().__init__()
        self.key = torch.tensor(keys.words(key))
        self.calls = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        known = func in (*self.ELEMENTS, *self.CHANNELS)
        return (partial(self.dropped, func) if known else func)(*args, **(kwargs or {}))

    def dropped(
        self, func: Callable[..., Tensor], input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        """Return the result of a dropout function."""
        again = torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
        if not training or p == 0 or again:  # inside a checkpoint, torch draws itself: it restores its generator
            return func(input, p, training, inplace)
        shape = (*input.shape[:2], *(1 for _ in input.shape[2:])) if func in self.CHANNELS else input.shape
        keep = (keys.uniform(self.key, math.prod(shape), self.calls) >= p).reshape(shape)
        self.calls += 1
        if func in (F.alpha_dropout, F.feature_alpha_dropout):
            floor = -1.7580993408473766  # −scale · alpha of SELU; the factors below keep mean and variance
            a = ((1 - p) * (1 + p * floor**2)) ** -0.5 if p < 1 else 0.0
            output = torch.where(keep, input, floor) * a - a * p * floor
        else:
            output = input * keep / (1 - p if p < 1 else 1)
        return input.copy_(output) if inplace else output
