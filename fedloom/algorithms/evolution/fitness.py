"""The client half of all searches without gradients: how well each candidate does on a client's examples."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from typing import ClassVar, Literal
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap

from fedloom import keys
from fedloom.algorithm import Algorithm, Clients, Cohort, Groups, InputError, Task, Update, without
from fedloom.training import evaluation, generators
from fedloom.training.clients import Setup
from fedloom.training.masking import Masked
from fedloom.tree import Tree, clone, map_leaves, row

FitnessName = Literal["mse", "cross_entropy", "accuracy", "loss"]
HOPELESS = -100_000.0  # replaces a fitness that cannot be computed
TOGETHER = 4096  # the most candidates × examples in one pass over a single client
BLOCK = 8  # examples in a block, if several clients are computed side by side


class Search(Algorithm):
    """Clients judge candidates; the server sees only the mean of their fitness, weighted by examples."""

    takes_complex: ClassVar[bool] = False

    fitness: FitnessName = "mse"
    """What candidates are judged by."""
    examples: Literal["all", "one"] = "all"
    """Judge candidates on all training examples of a client, or on one example drawn in each round."""

    def init_own(self, task: Task, model: Tree) -> Groups:
        return {}

    def passes(self, method: str) -> float:
        candidates = getattr(self, "population", 1)
        return candidates / 3 if self.examples == "all" else 0.0  # an evaluation costs about a third of a gradient

    def ask(self, cohort: Cohort, population: Tree, model: Tree) -> Tensor:
        """Return the fitness of each candidate over all examples of the cohort."""
        shared = {"population": population, "fixed": without(model, population)}
        return cohort.reduce(self.judge, shared)["fitness"]["fitness"]

    def judge(self, task: Task, shared: Groups, own: Groups, data: Clients) -> tuple[Update, Groups]:
        """Answer with one number for each candidate."""
        return self.answer(task, shared["population"], shared["fixed"], data), own

    def answer(self, task: Task, population: Tree, fixed: Tree, data: Clients) -> Update:
        """Return the fitness of a population on each client's examples; all candidates share the leaves in `fixed`."""
        held = [self._rows(data, position) for position in range(len(data))]
        if data.setup.group > 1:
            found = fitness_side_by_side(task, population, fixed, data, held, self.fitness)
        else:
            found = []
            for position, rows in enumerate(held):
                try:
                    found.append(fitness_on(task, population, fixed, data, rows, self.fitness))
                except Exception as error:
                    raise data.blame(error, "the fitness of the candidates", position) from error
        counts = torch.tensor([len(rows) for rows in held], dtype=torch.float64)
        return Update({"fitness": {"fitness": torch.stack(found)}}, counts)

    def _rows(self, data: Clients, position: int) -> Tensor:
        rows = data.rows(position, "train")
        if self.examples == "all":
            return rows
        drawn = int(keys.hashes(data.key(position, "example"), 1)[0]) * len(rows) >> 32
        return rows[drawn : drawn + 1]


@torch.no_grad()
def fitness_on(task: Task, population: Tree, fixed: Tree, data: Clients, rows: Tensor, kind: FitnessName) -> Tensor:
    """Return the mean fitness of every individual on some rows of the federation, in double precision.

    A pass computes all individuals together. The sizes of passes depend only on the numbers of individuals and rows.
    """
    individuals = len(next(iter(population.values())))
    total = torch.zeros(individuals, dtype=torch.float64)
    for part in evaluation.passes(rows, max(TOGETHER // individuals, 1)):
        x, y = evaluation.batch(data, part, task)
        outputs = population_outputs(task, population, fixed, x, data.setup)
        total += scores(task, outputs, y, kind).sum(1, dtype=torch.float64).cpu()
    mean = total / len(rows)
    return torch.where(torch.isfinite(mean), mean, HOPELESS)


@torch.no_grad()
def fitness_side_by_side(
    task: Task, population: Tree, fixed: Tree, data: Clients, held: Sequence[Tensor], kind: FitnessName
) -> list[Tensor]:
    """Do the same for several clients at once. Each client's examples are padded to whole blocks.

    Every pass has exactly `group` blocks, and the last pass is filled with dummies. Because all passes have one shape,
    an example gets the same bits whatever else is in its pass, so a cohort can be cut anywhere.
    """
    individuals, lanes = len(next(iter(population.values()))), data.setup.group
    sizes = [-(-len(rows) // BLOCK) for rows in held]
    padded, real = [], []
    for rows, size in zip(held, sizes, strict=True):
        padded.append(torch.cat([rows, rows[-1:].expand(size * BLOCK - len(rows))]))
        real.append(torch.arange(size * BLOCK) < len(rows))
    dummies = -sum(sizes) % lanes * BLOCK
    padded.append(held[0][:1].expand(dummies))
    real.append(torch.zeros(dummies, dtype=torch.bool))
    sums = []
    passes = (torch.split(torch.cat(parts), lanes * BLOCK) for parts in (padded, real))
    for part, mask in zip(*passes, strict=True):
        x, y = evaluation.batch(data, part, task)
        values = scores(task, population_outputs(task, population, fixed, x, data.setup), y, kind).cpu()
        sums.append(torch.where(mask, values, 0.0).double().reshape(individuals, lanes, BLOCK).sum(2))
    blocks = torch.split(torch.cat(sums, 1)[:, : sum(sizes)], sizes, 1)
    means = [block.sum(1) / len(rows) for block, rows in zip(blocks, held, strict=True)]
    return [torch.where(torch.isfinite(mean), mean, HOPELESS) for mean in means]


def scores(task: Task, outputs: Tensor, y: Tensor, kind: FitnessName) -> Tensor:
    """Return how well each individual does on each example; higher is better.

    `mse` is the negative mean squared error against one-hot labels (or against the numbers of a regression),
    `cross_entropy` is the negative cross-entropy, `accuracy` is 1 or 0, and `loss` is the negative of the task's loss.

    >>> outputs = torch.tensor([[[1.0, 0.0]], [[0.5, 0.5]]])  # two individuals, one example, two classes
    >>> scores(Task(torch.nn.Identity), outputs, torch.tensor([0]), "mse")
    tensor([[-0.0000],
            [-0.2500]])
    """
    if kind == "loss":
        return -torch.stack([task.losses(output, y) for output in outputs])
    if kind == "mse":
        target = F.one_hot(y, outputs.shape[-1]) if _has_classes(outputs, y) else y
        target = target.to(outputs.dtype)
        return -(outputs.reshape(*outputs.shape[:2], -1) - target.reshape(len(y), -1)).square().mean(2)
    if not _has_classes(outputs, y):
        raise InputError(
            f'fitness = "{kind}" needs classes and one output for each class. Use fitness = "mse" or "loss".'
        )
    if kind == "accuracy":
        right = (outputs.argmax(-1) == y) & ~outputs.isnan().any(-1)  # argmax would take a NaN as the largest
        return right.to(outputs.dtype).reshape(*outputs.shape[:2], -1).mean(2)
    log = F.log_softmax(outputs, -1)
    chosen = log.gather(-1, y.expand(len(outputs), *y.shape).unsqueeze(-1))
    return chosen.reshape(*outputs.shape[:2], -1).mean(2)


def _has_classes(outputs: Tensor, y: Tensor) -> bool:
    return not y.is_floating_point() and outputs.dim() == y.dim() + 2 and outputs.shape[-1] > 1


@torch.no_grad()
def population_outputs(task: Task, population: Tree, fixed: Tree, x: Tensor, setup: Setup = Setup()) -> Tensor:
    """Return the outputs of every individual in evaluation mode: individuals × examples × outputs."""
    training = task.module.training
    task.module.eval()
    try:
        if setup.rows_apart and _can_stack(task, population, fixed, x, setup):
            with generators.lent(), task.python_state.fresh():
                return _stacked(task, population, fixed, x, setup)
        return _one_by_one(task, population, fixed, x, setup)
    finally:
        task.module.train(training)


def _stacked(task: Task, population: Tree, fixed: Tree, x: Tensor, setup: Setup) -> Tensor:
    others = {**task.given, **fixed}
    keyed = Masked(torch.zeros(2, dtype=torch.int64, device=x.device)) if setup.drops_evaluating else nullcontext()

    def one(individual: Tree) -> Tensor:
        with task.tensors.replaced({**others, **individual}):
            output: Tensor = task.module(x)
        return output

    with keyed:
        outputs: Tensor = vmap(one)(population)
    return outputs


def _one_by_one(task: Task, population: Tree, fixed: Tree, x: Tensor, setup: Setup) -> Tensor:
    found = []
    for number in range(len(next(iter(population.values())))):
        with generators.lent(), task.python_state.fresh():
            generators.seed(0, setup.device)  # all individuals draw the same numbers
            individual = {**fixed, **row(population, number)}
            found.append(evaluation.outputs(task, individual, x.clone(), setup.drops_evaluating).clone())
    return torch.stack(found)


_CAN_STACK: WeakKeyDictionary[Task, bool] = WeakKeyDictionary()


def _can_stack(task: Task, population: Tree, fixed: Tree, x: Tensor, setup: Setup) -> bool:
    """Whether a model can be vmapped over its weights with the same result; tried once for each task."""
    if task not in _CAN_STACK:
        two, few = map_leaves(lambda leaf: leaf[:2], population), x[:2].clone()
        others, state = {**task.given, **fixed}, task.python_state
        copies = clone(others)
        try:
            with warnings.catch_warnings(), generators.lent(), state.fresh():
                warnings.simplefilter("error")
                together = _stacked(task, two, copies, few.clone(), setup)
                untouched = not state.changed()
            untouched &= all(torch.equal(leaf, copies[name]) for name, leaf in others.items())
            alone = _one_by_one(task, two, fixed, few, setup)
            same = torch.allclose(together, alone, rtol=1e-4, atol=1e-5, equal_nan=True)
            _CAN_STACK[task] = same and untouched
        except Exception:
            _CAN_STACK[task] = False
    return _CAN_STACK[task]
