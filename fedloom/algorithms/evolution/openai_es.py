"""The evolution strategy of Salimans et al., and the random directions that it shares with SNES."""

from __future__ import annotations

from functools import lru_cache
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import model_validator
from torch import Tensor

from fedloom import keys
from fedloom.algorithm import Clients, Cohort, Groups, InputError, Task, Update, without
from fedloom.algorithms.evolution.fitness import FitnessName, Search
from fedloom.record import Count, Decay, NonNegative, Positive
from fedloom.tree import Tree, clone, concat, expand, flatten, row, select, stack, unflatten

EPSILON = 1e-8


class OpenAIES(Search):
    """Follows random changes that help; needs no gradients.

    w ← w + η / (n sigma) · Σ F_i ε_i, through Adam. Half of the population is w + sigma · ε, the other half is
    w − sigma · ε; clients rebuild the random directions ε from a seed. F is the clients' mean fitness as centred ranks.
    `travels` says what clients receive: the `model` and a seed; or only the last round's `fitness` and a seed, if all
    clients take part in every round and keep the model themselves. Use it for models whose gradients must stay secret
    or do not exist. It does better than neuroevolution on all but the smallest models.
    """

    name: ClassVar[str] = "openai_es"
    reference: ClassVar[str] = "Salimans et al., Evolution Strategies as a Scalable Alternative, 2017"

    fitness: FitnessName = "cross_entropy"
    """What candidates are judged by."""
    population: Count = 100
    """The number of candidates in a round: pairs of opposite changes."""
    sigma: Positive = 0.05
    """The standard deviation of the random changes."""
    server_lr: Positive = 0.02
    """The learning rate of the server's Adam."""
    beta1: Decay = 0.9
    """Decay of the mean gradient of the server's Adam."""
    beta2: Decay = 0.999
    """Decay of the mean squared gradient of the server's Adam."""
    decay: NonNegative = 0.0
    """Weight decay of the model in each round."""
    travels: Literal["model", "fitness"] = "model"
    """What clients receive: the model and a seed, or only the last round's fitness and a seed."""

    @model_validator(mode="after")
    def _pairs(self) -> OpenAIES:
        if self.population % 2:
            raise InputError(
                "The 'population' of openai_es must be even, because every direction is tried both ways. "
                f"Got {self.population}."
            )
        return self

    @property
    def needs_all_from_start(self) -> str:
        return "clients keep the model" if self.travels == "fitness" else ""

    def init(self, task: Task, model: Tree) -> Groups:
        optimizer = _untouched(task, model)
        nothing = torch.zeros(self.population // 2, dtype=torch.float64)
        last = {"seed": torch.zeros((), dtype=torch.int64), "utilities": nothing, "steps": optimizer["steps"]}
        return {"model": model, "optimizer": optimizer, "last": last}

    def init_own(self, task: Task, model: Tree) -> Groups:
        return {"model": model, "optimizer": _untouched(task, model)} if self.travels == "fitness" else {}

    def round(self, state: Groups, cohort: Cohort) -> Groups:
        seed = {"seed": torch.tensor(cohort.key("directions") >> 1)}
        if self.travels == "model":
            found = cohort.reduce(self.judge, {"model": state["model"], "now": seed})
        else:
            if len(cohort) < cohort.population:
                raise InputError(
                    'openai_es with travels = "fitness" needs every client in every round, because a client that '
                    f"misses one loses the model. Round {cohort.round} has {len(cohort)} of {cohort.population} "
                    'clients: leave out [cohort], or use travels = "model".'
                )
            found = cohort.reduce(self.follow, {"last": state["last"], "now": seed})
        fitness = found["fitness"]["fitness"]
        ranks = centred_ranks(fitness)
        pairs = self.population // 2
        last = {**seed, "utilities": ranks[:pairs] - ranks[pairs:]}
        model, optimizer = self.step(cohort.task, state["model"], state["optimizer"], last)
        cohort.note(fitness=float(fitness.max()), mean_fitness=float(fitness.mean()))
        return {"model": model, "optimizer": optimizer, "last": {**last, "steps": optimizer["steps"]}}

    def judge(self, task: Task, shared: Groups, own: Groups, data: Clients) -> tuple[Update, Groups]:
        return self.answer_around(task, shared["model"], shared["now"]["seed"], data), own

    def follow(self, task: Task, shared: Groups, own: Groups, data: Clients) -> tuple[Update, Groups]:
        """Take the server's last step on the model that each client keeps, then judge the candidates around it."""
        answers, kept = [], []
        for position, client in enumerate(data):
            model, optimizer = row(own["model"], position), row(own["optimizer"], position)
            if optimizer["steps"] < shared["last"]["steps"]:
                model, optimizer = self.step(task, model, optimizer, shared["last"])
            answers.append(self.answer_around(task, model, shared["now"]["seed"], client))
            kept.append({"model": model, "optimizer": optimizer})
        fitness = concat([answer.groups["fitness"] for answer in answers])
        update = Update({"fitness": fitness}, torch.cat([answer.weights("fitness") for answer in answers]))
        return update, {group: stack([mine[group] for mine in kept]) for group in own}

    def answer_around(self, task: Task, model: Tree, seed: Tensor, data: Clients) -> Update:
        """Return the fitness of the model plus and minus every direction."""
        centre = select(model, task.trainable)
        steps = directions_from(centre, seed, self.population // 2)
        population = around(centre, torch.tensor(self.sigma), torch.cat([steps, -steps]))
        return self.answer(task, population, without(model, centre), data)

    def step(self, task: Task, model: Tree, optimizer: Tree, last: Tree) -> tuple[Tree, Tree]:
        """Take one step of Adam up the estimated gradient, with the same bits on the server and on every client."""
        centre = select(model, task.trainable)
        steps = directions_from(centre, last["seed"], self.population // 2)
        weights, share = to_vector(centre), last["utilities"] / (self.population * self.sigma)
        gradient = weighted_sum(share, steps) - self.decay * weights
        count = int(optimizer["steps"]) + 1
        first = self.beta1 * optimizer["first"] + (1 - self.beta1) * gradient
        second = self.beta2 * optimizer["second"] + (1 - self.beta2) * gradient.square()
        scale = (second / (1 - self.beta2**count)).sqrt() + EPSILON
        weights = weights + self.server_lr / (1 - self.beta1**count) * first / scale
        moved = {"first": first, "second": second, "steps": optimizer["steps"] + 1}
        return {**model, **to_tree(weights, centre)}, moved


def _untouched(task: Task, model: Tree) -> Tree:
    """Return Adam's state before its first step."""
    nothing = torch.zeros(len(to_vector(select(model, task.trainable))), dtype=task.torch_dtype)
    return {"first": nothing, "second": nothing.clone(), "steps": torch.zeros((), dtype=torch.int64)}


# --- random directions that server and clients can rebuild from a seed


@lru_cache(maxsize=1)  # every client of a round asks for the same directions
def directions(key: int, count: int, size: int, dtype: torch.dtype) -> Tensor:
    """Draw standard normal numbers, one row for each direction. A row depends only on the key and its number."""
    kind = np.float64 if dtype == torch.float64 else np.float32
    drawn = [keys.generator(keys.key(key, "direction", row)).standard_normal(size, dtype=kind) for row in range(count)]
    return torch.from_numpy(np.stack(drawn)).to(dtype)


def directions_from(centre: Tree, seed: Tensor, count: int) -> Tensor:
    """Draw directions that fit a model."""
    vector = to_vector(centre)
    return directions(int(seed), count, len(vector), vector.dtype)


def to_vector(tree: Tree) -> Tensor:
    """Return a tree as one vector of numbers, leaf after leaf."""
    return flatten(expand(tree, 1))[0]


def to_tree(vector: Tensor, like: Tree) -> Tree:
    """Return a vector as a tree with the leaves of `like`."""
    return clone(row(unflatten(vector.unsqueeze(0), like), 0))


def around(centre: Tree, spread: Tensor, steps: Tensor) -> Tree:
    """Return a population: the centre plus `spread` times each row of `steps`."""
    return unflatten(to_vector(centre) + spread * steps, centre)


def weighted_sum(weights: Tensor, rows: Tensor) -> Tensor:
    """Return Σ weight · row, added in order: unlike a product, its bits do not depend on the number of threads."""
    total = torch.zeros_like(rows[0])
    for weight, direction in zip(weights.tolist(), rows, strict=True):
        total.add_(direction, alpha=weight)
    return total


def centred_ranks(fitness: Tensor) -> Tensor:
    """Return ranks from −½ for the worst to ½ for the best. Ties share the mean of their ranks.

    >>> centred_ranks(torch.tensor([3.0, -100.0, 3.0]))
    tensor([ 0.2500, -0.5000,  0.2500], dtype=torch.float64)
    """
    below = (fitness[:, None] > fitness[None, :]).sum(1)
    equal = (fitness[:, None] == fitness[None, :]).sum(1) - 1
    return (below + equal / 2.0).to(torch.float64) / (len(fitness) - 1) - 0.5
