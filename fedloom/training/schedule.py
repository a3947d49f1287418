"""What a client does in a round: the settings of local training, its batches and epochs, and when it stops.

Nothing here computes weights. `local.py` has the loop and the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import (
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)
from torch import Tensor

from fedloom import keys
from fedloom.errors import InputError, ParameterError, TrainingError, nearest
from fedloom.record import Count, Decay, NonNegative, Positive, Record
from fedloom.task import Task
from fedloom.training.clients import Clients
from fedloom.training.evaluation import evaluate
from fedloom.training.rate_schedule import RateSchedule
from fedloom.tree import Groups, Tree, clone

if TYPE_CHECKING:
    from fedloom.training.batch_view import Batch


class ClientTraining(Record):
    """What one client does in another way than the others."""

    name: str
    """The client's name."""
    lr: Positive | None = None
    """Its learning rate."""
    epochs: Positive | None = None
    """Its passes over its training split in a round."""
    batch_size: Count | Literal["full"] | None = None
    """The examples in one of its steps."""


class Training(Record):
    """How a client trains: the optimiser, its steps and when to stop."""

    optimizer: Literal["sgd", "nesterov", "adam", "adamw", "rmsprop", "adagrad", "adadelta"] = "sgd"
    """The local optimiser. `nesterov` is `sgd` with Nesterov's momentum."""
    lr: Positive = 0.1
    """The learning rate."""
    epochs: Positive = 1.0
    """Passes over a client's training split in a round. Fractions are allowed."""
    batch_size: Count | Literal["full"] = 32
    """Examples in a step, or `full` for all examples of the client."""
    drop_last: bool = False
    """Leave out the smaller batch at the end of an epoch. A client's only batch is always used."""
    optimizer_state: Literal["reset", "keep"] = "reset"
    """Start every round with a new optimiser, or let each client keep its own between rounds."""
    momentum: Decay = 0.0
    """The momentum of `sgd`, `nesterov` and `rmsprop`."""
    weight_decay: NonNegative = 0.0
    """L2 penalty: this times the weights is added to the gradient. `adamw` shrinks the weights by lr times this
    instead.
    """
    clip: Positive | None = None
    """Scale down gradients whose norm is larger than this."""
    patience: Count | None = None
    """Stop local training after this many epochs without a better loss on the validation split, and return the best
    weights.
    """
    beta1: Decay = 0.9
    """Decay of the mean gradient of `adam` and `adamw`."""
    beta2: Decay = 0.999
    """Decay of the mean squared gradient of `adam` and `adamw`."""
    rho: Decay = 0.9
    """Decay of the running means of `adadelta` and `rmsprop`. (torch's RMSprop calls it alpha, and its
    default is 0.99.)
    """
    epsilon: Positive | None = None
    """Added to the denominators of all optimisers but `sgd` and `nesterov`. By default, as in torch."""
    centered: bool | None = None
    """Let `rmsprop` divide by the standard deviation of the gradient, instead of its mean square."""
    schedule: RateSchedule | None = None
    """How the learning rate changes from round to round, such as `{ name = "cosine", over = 100 }`."""
    local_schedule: RateSchedule | None = None
    """How the learning rate changes from step to step. It starts again in every round."""
    clients: tuple[ClientTraining, ...] | None = None
    """Clients with their own `lr`, `epochs` or `batch_size`, such as `[{ name = "north", epochs = 2 }]`. Only in a
    simulation.
    """

    @field_validator("schedule", "local_schedule", "clients", mode="before")
    @classmethod
    def _named_tables(cls, value: Any, info: ValidationInfo) -> Any:
        def read(kind: type[Record], given: Any) -> Any:
            try:
                return kind(**given) if isinstance(given, Mapping) else given
            except ParameterError as error:
                raise InputError(error.at(f"train.{info.field_name}")) from None

        if info.field_name != "clients":
            return read(RateSchedule, value)
        return tuple(read(ClientTraining, one) for one in value) if isinstance(value, (list, tuple)) else value

    @model_validator(mode="after")
    def _fits_optimizer(self) -> Training:
        for name, optimizers in _MEANT_FOR.items():
            if self.optimizer not in optimizers and getattr(self, name) != type(self).model_fields[name].default:
                known = " or ".join(f'"{one}"' for one in optimizers)
                raise InputError(f"'{name}' is for optimizer = {known}, not for \"{self.optimizer}\".")
        if self.optimizer == "nesterov" and not self.momentum:
            raise InputError('optimizer = "nesterov" needs a momentum, such as momentum = 0.9.')
        if self.schedule is not None and self.schedule.name == "cosine" and self.schedule.over is None:
            raise InputError("[train.schedule] over is needed for a cosine: after how many rounds it ends.")
        names = [one.name for one in self.clients or ()]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise InputError(f"[train] clients names '{twice}' twice.")
        return self

    @model_serializer(mode="wrap")
    def _without_later_keys(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # runs of versions without these keys have the same identity
        return {name: value for name, value in write(self).items() if name not in _LATER or value is not None}

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        # the noise of example-level privacy depends on this text
        return ((name, value) for name, value in super().__repr_args__() if name not in _LATER or value is not None)

    @property
    def changes_rate(self) -> bool:
        """Whether the learning rate depends on the round, the step or the client."""
        return self.schedule is not None or self.has_uneven_rates

    @property
    def has_uneven_rates(self) -> bool:
        """Whether clients or steps of one round have different learning rates."""
        return self.local_schedule is not None or any(one.lr is not None for one in self.clients or ())

    @property
    def batch_sizes(self) -> set[int | str]:
        """The batch sizes of all clients."""
        return {self.batch_size, *(one.batch_size for one in self.clients or () if one.batch_size is not None)}

    def of(self, client: str) -> Training:
        """Return how one client trains."""
        found = next((one for one in self.clients or () if one.name == client), None)
        if found is None:
            return self
        own = {key: getattr(found, key) for key in ("lr", "epochs", "batch_size")}
        return self.model_copy(update={key: value for key, value in own.items() if value is not None})

    def with_epochs(self, epochs: float) -> Training:
        """Return the same with this many epochs for every client."""
        clients = self.clients and tuple(one.replace(epochs=None) for one in self.clients)
        changed: Training = self.replace(epochs=epochs, clients=clients)
        return changed

    def lr_at(self, round: int, step: int = 0, total: int | None = None) -> float:
        """Return the learning rate in a step (the first is 0) of a round (the first is 1)."""
        over_rounds = 1.0 if self.schedule is None else self.schedule.at(round - 1)
        over_steps = 1.0 if self.local_schedule is None else self.local_schedule.at(step, total)
        return self.lr * over_rounds * over_steps

    def check_clients(self, known: Callable[[], Collection[str]]) -> None:
        """Raise if a name in `clients` is not that of a client."""
        names = known() if self.clients else ()
        for one in self.clients or ():
            if one.name not in names:
                raise InputError(f"[train] clients: there is no client '{one.name}'.{nearest(one.name, names)}")


_MEANT_FOR = {
    "momentum": ("sgd", "nesterov", "rmsprop"),
    "beta1": ("adam", "adamw"),
    "beta2": ("adam", "adamw"),
    "rho": ("adadelta", "rmsprop"),
    "epsilon": ("adam", "adamw", "rmsprop", "adagrad", "adadelta"),
    "centered": ("rmsprop",),
}
_LATER = ("centered", "schedule", "local_schedule", "clients")


@dataclass(frozen=True)
class Step:
    """What an algorithm's `correct` hook sees of one local step. All tensors belong to one client."""

    grad: Tree
    params: Tree
    start: Tree  # the weights that this client began the round with
    grad_at: Callable[[Tree], Tree]  # returns the gradient of the same batch at other weights
    seen: Batch | None = None

    @property
    def batch(self) -> Batch:
        """The batch, and what the model makes of it at any weights; for algorithms that declare `reads_batch`."""
        if self.seen is None:
            raise InputError(
                "`step.batch` is only for algorithms with `reads_batch = True`, whose clients are trained one by one. "
                "With differential privacy of examples, there is no such look at a batch."
            )
        return self.seen


Correct = Callable[[Step, Groups, Groups], Tree]


def reads_batch(correct: Correct | None) -> bool:
    """Whether the algorithm of a `correct` hook declares that the hook looks at the batch itself."""
    return bool(getattr(getattr(correct, "__self__", None), "reads_batch", False))


@dataclass(frozen=True)
class TrainingJob:
    """One call of `local.train`: several clients, each with its row in the stacked trees."""

    task: Task
    data: Clients
    start: Tree
    training: Training
    correct: Correct | None
    shared: Groups
    own: Groups
    optimizer: Tree | None  # the optimisers' states, where clients keep them between rounds
    trained: Tree  # each client's trained weights are written to its row


@dataclass(frozen=True)
class ClientResult:
    """What local training of one client gives beside the weights."""

    optimizer: Tree
    steps: int
    history: tuple[dict[str, float], ...]  # losses and metrics of every epoch
    lr_sum: float  # the sum of the steps' learning rates


class ClientSchedule:
    """The batches of one client: which rows come next, when an epoch ends, and when training stops."""

    def __init__(self, job: TrainingJob, position: int) -> None:
        self.job, self.position = job, position
        self.training = training = job.training.of(job.data.name(position))
        size = training.batch_size
        self.rows = training_rows(job.data, position, None if size == "full" else size, training.drop_last)
        self.batch_size = len(self.rows) if size == "full" else size
        self.per_epoch = -(-len(self.rows) // self.batch_size)
        if training.drop_last:
            self.per_epoch = max(len(self.rows) // self.batch_size, 1)
        self.total = max(1, round(training.epochs * self.per_epoch))
        self.steps = 0
        self.history: list[dict[str, float]] = []
        self.best: tuple[float, Tree, Tree, int] | None = None  # loss, weights, optimiser, and the steps so far
        self.epochs_without_gain = 0
        self._shuffle()

    def _shuffle(self) -> None:
        self.seen = 0  # examples since the epoch began
        self.order = self.rows
        if self.training.batch_size != "full":  # the order within a full batch means nothing
            epoch = self.steps // self.per_epoch
            order = keys.permutation(self.job.data.key(self.position, "batches", epoch), len(self.rows))
            self.order = self.rows[torch.from_numpy(order)]

    def next_rows(self, most: int = 1) -> Tensor:
        """Return the rows of up to `most` equal batches. A short last batch is returned alone."""
        step = self.steps % self.per_epoch
        count = max(min(most, len(self.order) // self.batch_size - step, self.total - self.steps), 1)
        rows = self.order[step * self.batch_size : (step + count) * self.batch_size]
        self.seen += len(rows)
        return rows

    def dropout_key(self, ahead: int = 0) -> Tensor:
        """Return the key of dropout in the next step, or in the step that is `ahead` steps later."""
        return self.job.data.dropout_key(self.position, self.steps + ahead)

    def rate(self, ahead: int = 0) -> float:
        """Return the learning rate of the next step, or of the step that is `ahead` steps later, as a share of `lr`."""
        return self._lr_at(self.steps + ahead) / self.job.training.lr

    def _lr_at(self, step: int) -> float:
        return self.training.lr_at(self.job.data.round, step, self.total)

    def advance(self, loss_sum: Callable[[], float], state: Callable[[], tuple[Tree, Tree]], steps: int = 1) -> bool:
        """Count steps. At the end of an epoch, keep its loss and decide whether to stop. Return True when done.

        `loss_sum` returns the sum of the examples' losses in this epoch and resets it; `state` returns the weights and
        the optimiser's state.
        """
        self.job.data.go_on()
        self.steps += steps
        done = self.steps == self.total
        if self.steps % self.per_epoch and not done:
            return False
        loss = loss_sum() / self.seen
        check_finite(loss)
        self.history.append({"loss": loss})
        if self.job.data.watch_epochs or self.job.training.patience:
            done = self._validate(*state()) or done
        if not done:
            self._shuffle()
        return done

    def _validate(self, weights: Tree, optimizer: Tree) -> bool:
        """Evaluate the validation split. Return True when patience is used up."""
        job = self.job
        measured = evaluate(job.task, weights, job.data, self.position, "validation").values(job.task)
        job.task.module.train()
        self.history[-1].update({f"validation_{name}": value for name, value in measured.items()})
        if job.training.patience is None:
            return False
        if not measured:
            raise needs_validation(job.data.name(self.position))
        if self.best is None or measured["loss"] < self.best[0] or math.isnan(self.best[0]):
            self.best, self.epochs_without_gain = (measured["loss"], clone(weights), clone(optimizer), self.steps), 0
        else:
            self.epochs_without_gain += 1
        return self.epochs_without_gain >= job.training.patience

    def finish(self, weights: Tree, optimizer: Tree) -> ClientResult:
        """Write the client's weights to its row: with patience those of the best epoch, else these."""
        steps = self.steps
        if self.best is not None:
            _, weights, optimizer, steps = self.best  # count only the steps that led to these weights
        for name, leaf in weights.items():
            self.job.trained[name][self.position].copy_(leaf)
        changes = self.job.training.changes_rate
        lr_sum = math.fsum(map(self._lr_at, range(steps))) if changes else steps * self.training.lr
        return ClientResult(clone(optimizer), steps, tuple(self.history), lr_sum)


def training_rows(data: Clients, position: int, batch_size: int | None = None, drop_last: bool = False) -> Tensor:
    """Return one client's training rows. Raise if there are none, or if batch normalisation would see one alone."""
    rows = data.rows(position, "train")
    check_size(data.name(position), len(rows), data.setup.normalises_features, batch_size, drop_last)
    return rows


def check_size(name: str, count: int, normalises: bool, batch_size: int | None, drop_last: bool) -> None:
    """Raise if a client with `count` training examples cannot train, or if batch normalisation would see one alone."""
    if count == 0:
        raise InputError(
            f"Client '{name}' has no training examples, so it cannot train. Change data.split or the partition."
        )
    if normalises and min(count, batch_size or count) == 1:
        what = "has one training example" if count == 1 else "trains on batches of one example"
        raise InputError(
            f"Client '{name}' {what}, but the model's batch normalisation needs at least two in a batch. "
            "Leave such clients out, use a larger batch_size, or normalise with nn.LayerNorm or nn.GroupNorm."
        )
    if normalises and batch_size and not drop_last and count % batch_size == 1:
        raise InputError(
            f"Client '{name}' has {count} training examples, so with batch_size = {batch_size} its last batch has "
            "one, and the model's batch normalisation needs at least two. Use drop_last = true, another batch_size, or "
            "normalise with nn.LayerNorm or nn.GroupNorm."
        )


def needs_validation(name: str) -> InputError:
    """Return the error for a client that stops early and has nothing to decide by."""
    return InputError(
        f"Client '{name}' has no validation examples, which patience (early stopping) needs. Change data.split, or "
        "leave patience out."
    )


def check_finite(loss: float) -> None:
    """Raise if the loss is NaN or infinite."""
    if loss - loss != 0:
        raise TrainingError(f"the loss is {loss}. A smaller lr or a clip may help.")
