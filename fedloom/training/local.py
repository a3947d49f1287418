"""Local training: train some clients, each from its own weights, and choose how.

`single.py` has the plain loop and step. `recorded.py` and `lanes.py` give the same results faster.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from fedloom.task import Task
from fedloom.training import optimizers
from fedloom.training.clients import Clients
from fedloom.training.fast_paths import reused
from fedloom.training.full_gradient import FullGradient, full_gradient
from fedloom.training.lanes import LaneTrainer, lane_trainer
from fedloom.training.recorded import RecordedTrainer
from fedloom.training.schedule import ClientResult, Correct, Groups, Step, Training, TrainingJob
from fedloom.training.single import SingleClientTrainer, client_tensors
from fedloom.tree import Tree, stack

__all__ = ["Correct", "FullGradient", "Groups", "Step", "Trained", "Training", "full_gradient", "train"]

LANES = 10  # fewer lanes do not pay for the cost of vmap
SMALL_MODEL = 256 * 1024  # bytes: above this, stacked weights leave the cache


class Trainer(Protocol):
    """A way to train clients. All ways give the same results."""

    def train(self, job: TrainingJob) -> list[ClientResult]:
        """Train all clients of a job: write their weights to `job.trained`, and return the rest in their order."""


@dataclass(frozen=True)
class Trained:
    """The result of local training, stacked over clients."""

    model: Tree
    own: Groups
    steps: Tensor
    history: tuple[tuple[dict[str, float], ...], ...] = ()  # per client, per epoch


def train(
    task: Task,
    data: Clients,
    start: Tree,
    training: Training,
    *,
    correct: Correct | None = None,
    shared: Groups | None = None,
    own: Groups | None = None,
) -> Trained:
    """Train every client from its row of `start`. `correct` may change each gradient before it is applied."""
    own = own or {}
    trained = {name: torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device) for name, leaf in start.items()}
    optimizer = own.get("optimizer") if training.optimizer_state == "keep" else None
    job = TrainingJob(task, data, start, training, correct, shared or {}, own, optimizer, trained)
    results = trainer_for(job).train(job)
    if optimizer is not None:
        own = {**own, "optimizer": stack([result.optimizer for result in results])}
    steps = torch.tensor([result.steps for result in results])
    return Trained(trained, own, steps, tuple(result.history for result in results))


def initial_optimizer(training: Training, task: Task, model: Tree) -> Groups:
    """Return what a client starts with if it keeps its optimiser's state between rounds."""
    if training.optimizer_state == "reset":
        return {}
    state = optimizers.initial_state(training, model, task.trainable)
    return {"optimizer": state} if state else {}


def lanes(
    wanted: int | Literal["auto"],
    model_bytes: int = 0,
    cohort: int = 2 * LANES,
    batch_size: int | str | None = None,
    pooled: bool = False,
) -> int:
    """Return how many clients to train side by side; 1 means one after another, with recorded steps.

    This is the one rule that chooses. It reads sizes, never timings, because the choice decides the results' bits.
    It is applied before the first round, to choose what `auto` means, and to every job.

    Processor time of a round, in batches of ten (`python benchmarks/lanes.py`, 2026-11-16, one thread, AVX-512):

    | model | bytes | clients | one by one | ten side by side | ratio |
    | --- | --- | --- | --- | --- | --- |
    | digits_mlp | 9,640 | 100 | 55 ms | 35 ms | 0.54 |
    | mnist_2nn | 796,840 | 20 | 55 ms | 63 ms | 1.12 |
    | mnist_cnn | 6,653,480 | 20 | 673 ms | 672 ms | 1.01 |
    """
    if wanted == 1 or batch_size == "full" or pooled:
        return 1  # a full batch fills the machine by itself, and so does the one client that owns all examples
    if wanted != "auto":
        return wanted
    return LANES if model_bytes <= SMALL_MODEL and cohort >= 2 * LANES else 1


def trainer_for(job: TrainingJob) -> Trainer:
    """Return the trainer for a job; one of an earlier job, where that saves recording its steps again."""
    data, batch_size = job.data, job.training.batch_size
    pooled = data.ids == (data.federation.everyone,)
    if isinstance(batch_size, int) and lanes(data.setup.group, batch_size=batch_size, pooled=pooled) > 1:
        examples = (data.federation.x, data.federation.y)
        kinds = tuple((value.shape[1:], value.dtype) for value in examples)
        return reused(LaneTrainer, job, lambda: lane_trainer(job, batch_size), data.setup, kinds, data.federation.scale)
    if batch_size == "full" or not data.setup.replay:
        return SingleClientTrainer()
    task, training, correct = job.task, job.training, job.correct
    return reused(RecordedTrainer, job, lambda: RecordedTrainer(task, training, correct, client_tensors(job, 0)))
