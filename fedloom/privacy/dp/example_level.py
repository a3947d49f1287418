"""Differential privacy of examples: a client trains with clipped gradients of single examples, and noise (DP-SGD).

In each step, every example takes part with probability q = batch_size / examples, and the gradient is
(Σ clipped gradients + N(0, (z · max_grad_norm)²)) / batch_size. The client computes and adds everything itself, so the
guarantee holds against the server too. Gradients of single examples come from Opacus. The number of a client's examples
is not protected.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from fedloom import tree
from fedloom.discovery import optional
from fedloom.errors import InputError, TrainingError
from fedloom.privacy import words
from fedloom.privacy.dp import accounting, clipping, noise
from fedloom.privacy.dp.accounting import Mechanism
from fedloom.privacy.dp.apart import MANY, check_apart
from fedloom.training import generators, optimizers
from fedloom.training.correction import Step, called
from fedloom.training.evaluation import batch, passes
from fedloom.training.local import clip
from fedloom.training.modules import load
from fedloom.training.schedule import ClientResult, TrainingJob
from fedloom.training.settings import Training
from fedloom.training.training_rows import training_rows
from fedloom.tree import Tree

if TYPE_CHECKING:
    from fedloom.algorithm import Algorithm
    from fedloom.privacy.table import ExampleTable

ROWS = 64  # gradients of single examples to hold at a time


@dataclass(frozen=True)
class Steps:
    """What a client does in a round: how many steps, and what each of them releases."""

    count: int
    mechanism: Mechanism
    expected_batch: float


@dataclass(frozen=True)
class ExamplePrivacy:
    """What a client needs to train with differential privacy of its examples."""

    table: ExampleTable
    rounds: int  # the most rounds that a client takes part in
    secret: bytes
    charge: Callable[[str, Mechanism, int], None] | None = None  # an agent's ledger; a simulation has one for all

    def steps(self, examples: int, training: Training) -> Steps:
        """Return the steps of a round of a client with this many training examples."""
        size = examples if training.batch_size == "full" else min(training.batch_size, examples)
        count = max(1, round(training.epochs * -(-examples // size)))
        q, table = size / examples, self.table
        z = accounting.noise_multiplier(table.epsilon, table.delta, count * self.rounds, q)
        return Steps(count, Mechanism(z, q), float(size))


class ExampleTrainer:
    """Trains one client after another, in a copy of the task's module that gives gradients of single examples."""

    def __init__(self, privacy: ExamplePrivacy) -> None:
        self.privacy = privacy

    def train(self, job: TrainingJob) -> list[ClientResult]:
        """Train all clients of a job."""
        check_loss(job.data.setup.loss_is_mean)
        module = per_example_module(job.task.module)
        some = training_rows(job.data, 0)[:MANY]
        if len(some):
            check_apart(job.task, module, *batch(job.data, some, job.task))
        with generators.lent(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Full backward hook is firing")
            return [self._train_client(job, position, module) for position in range(len(job.data))]

    def _train_client(self, job: TrainingJob, position: int, module: Any) -> ClientResult:
        task, data, training = job.task, job.data, job.training
        rows = training_rows(data, position)
        steps = self.privacy.steps(len(rows), training)
        start = tree.row(job.start, position)
        own = {group: tree.row(kept, position) for group, kept in job.own.items()}
        # a server that sends the same model with other settings or variables must not get the same noise again
        whole = job.task.whole(start)
        given = tree.sha256_of_groups({"start": whole, **{f"shared {g}": t for g, t in job.shared.items()}, **own})
        settings = noise.derive(b"", repr((training, self.privacy.table, steps))).hex()
        name = f"round {data.round}, call {data.call}, client {data.name(position)}, given {given}, settings {settings}"
        if self.privacy.charge is not None:
            self.privacy.charge(name, steps.mechanism, steps.count)
        key = noise.derive(self.privacy.secret, "examples", name)
        held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        held = {path.removeprefix("_module."): leaf for path, leaf in held.items()}
        load(held, {**task.given, **start})
        leaves = {path: held[path] for path in task.trainable}
        before = {path: leaf.detach().clone() for path, leaf in leaves.items()}
        state = optimizers.initial_state(training, before, task.trainable)
        for slot, leaf in state.items():
            if job.optimizer:
                leaf.copy_(job.optimizer[slot][position])
        rates = [training.lr_at(data.round, number, steps.count) for number in range(steps.count)]
        for number in range(steps.count):
            data.go_on()
            # the seed and the client's number, which a server chooses, must not change an answer under the same noise
            generators.seed(int.from_bytes(noise.derive(key, "draws", number)[:8], "big"), data.setup.device)
            drawn = torch.from_numpy(noise.uniform(noise.derive(key, "batch", number), len(rows)))
            total = self._clipped_sum(job, module, leaves, rows[drawn < steps.mechanism.q])
            deviation = steps.mechanism.noise_multiplier * self.privacy.table.max_grad_norm
            added = noise.noise_like({"": total}, deviation, noise.derive(key, "noise", number))[""]
            gradient = {
                path: ((total[path] + added[path].to(total[path].device)) / steps.expected_batch).to(leaf.dtype)
                for path, leaf in leaves.items()
            }
            with torch.no_grad():
                if job.correct is not None:
                    params = {path: leaf.detach() for path, leaf in leaves.items()}
                    step = Step(gradient, params, before, _no_second_look)
                    gradient = called(job.correct, step, job.shared, own)
                if training.clip is not None:
                    gradient = clip(gradient, training.clip)
                rate = torch.tensor(rates[number] / training.lr, dtype=torch.float64) if training.changes_rate else None
                optimizers.update(training, list(leaves), list(leaves.values()), list(gradient.values()), state, rate)
        for path, trained in job.trained.items():
            trained[position].copy_(held[path].detach())
        lr_sum = math.fsum(rates) if training.changes_rate else steps.count * training.lr
        return ClientResult(tree.clone(state), steps.count, (), lr_sum)

    def _clipped_sum(self, job: TrainingJob, module: Any, leaves: Mapping[str, Any], rows: Tensor) -> Tree:
        """Return the sum of the examples' gradients, each with a norm of at most `max_grad_norm`."""
        total = {
            path: torch.zeros(leaf.shape, dtype=torch.float64, device=leaf.device) for path, leaf in leaves.items()
        }
        for part in passes(rows, ROWS) if len(rows) else ():
            for leaf in leaves.values():
                leaf.grad = leaf.grad_sample = None
            x, y = batch(job.data, part, job.task)
            module.train()
            with torch.enable_grad():
                loss = job.task.batch_loss(module(x), y) * len(part)
                loss.backward()  # type: ignore[no-untyped-call]
            found = {path: leaf.grad_sample for path, leaf in leaves.items() if leaf.grad_sample is not None}
            clipped, _ = clipping.clip_jointly({"": found}, self.privacy.table.max_grad_norm)
            for path, each in clipped[""].items():
                total[path] += each.to(torch.float64).sum(0)
        for leaf in leaves.values():
            leaf.grad = leaf.grad_sample = None
        return total


def _no_second_look(_: Tree) -> Tree:
    raise TrainingError("[privacy] example_dp allows one look at a batch, and this algorithm takes its gradient again.")


def per_example_module(module: torch.nn.Module) -> Any:
    """Return a copy of a module that gives gradients of single examples, or say why there is none."""
    opacus = optional("opacus", "Differential privacy of examples needs opacus", "privacy")
    validators = optional("opacus.validators", "Differential privacy of examples needs opacus", "privacy")
    for name, layer in module.named_modules():
        if isinstance(layer, _BatchNorm):
            raise InputError(
                f"[privacy] example_dp cannot train this model: its layer {name or 'itself'} ({type(layer).__name__}) "
                "mixes the examples of a batch, so that the gradient of a single one is not defined. Use "
                "torch.nn.GroupNorm or LayerNorm instead."
            )
    problems = validators.ModuleValidator.validate(module, strict=False)
    if problems:
        raise InputError(f"[privacy] example_dp cannot train this model: {str(problems[0]).rstrip('.')}.")
    try:
        return opacus.GradSampleModule(copy.deepcopy(module), loss_reduction="sum")
    except NotImplementedError as error:
        raise InputError(f"[privacy] example_dp cannot train this model: {error}") from None


def check_loss(is_mean: bool) -> None:
    """Raise `InputError` if the loss of a batch is not the mean of its examples' losses."""
    if not is_mean:
        raise InputError(
            "[privacy] example_dp needs a loss that is the mean of its examples' losses, such as cross_entropy, "
            "because it scales down the gradient of each."
        )


def check_algorithm(algorithm: Algorithm, label: str = "") -> None:
    """Raise `InputError` if clients look at their examples in other ways than by training on them once."""
    who = words.called(algorithm, label)
    if algorithm.pooled:
        raise InputError(words.one_place("example_dp", who))
    if not algorithm.trains_once:
        raise InputError(
            "[privacy] example_dp adds noise to the steps of one local training, and the clients of "
            f"{who} also use their examples in another way, such as to score models. Use an algorithm whose clients "
            f"only train, such as fedavg, or move {who} into a file of its own without example_dp."
        )
    if algorithm.train.clients is not None:
        raise InputError(
            "[privacy] example_dp counts the same steps for all clients, so [train] clients cannot be used: leave it "
            f"out. Found in {who}."
        )
    if algorithm.train.patience is not None:
        raise InputError(
            "[privacy] example_dp cannot be used with patience, which looks at the validation split without noise: "
            f"leave it out. Found in {who}."
        )
