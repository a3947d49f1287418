"""The settings of local training: `[train]`, and what single clients do in another way."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Literal

from pydantic import SerializerFunctionWrapHandler, ValidationInfo, field_validator, model_serializer, model_validator

from fedloom.errors import InputError, ParameterError, nearest
from fedloom.record import Count, Decay, NonNegative, Positive, Record
from fedloom.training.rate_schedule import RateSchedule


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
    """The local optimiser. `nesterov` is `sgd` with Nesterov's momentum, and `adamw` without weight decay is `adam`."""
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
    instead. (torch's AdamW has 0.01 by default.)
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

    def refuse_uneven_rates(self, algorithm: str) -> None:
        """Raise if an algorithm whose formula has one learning rate gets others for some steps or clients."""
        if self.has_uneven_rates:
            raise InputError(
                f"{algorithm}'s formula has one learning rate for all steps and clients of a round: use 'schedule', "
                "not 'local_schedule' or the 'lr' of single clients."
            )

    def refuse_zero_rates(self, algorithm: str, rounds: int) -> None:
        """Raise if a schedule lowers the learning rate to 0 within these rounds; for formulas that divide by it."""
        zero = next((round for round in range(1, rounds + 1) if self.schedule and not self.lr_at(round)), None)
        if zero is not None:
            raise InputError(
                f"{algorithm} divides by the learning rate, which [train] schedule lowers to 0 in round {zero}. "
                "Give a cosine an 'end' above 0, or a larger 'over'."
            )

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


def only_plain_sgd(why: str) -> dict[str, str]:
    """Return what an algorithm refuses (`Algorithm.refuses`) if its formula holds only for plain gradient steps."""
    return dict.fromkeys(("optimizer", "momentum"), f'{why}: use optimizer = "sgd" without momentum.')


_MEANT_FOR = {
    "momentum": ("sgd", "nesterov", "rmsprop"),
    "beta1": ("adam", "adamw"),
    "beta2": ("adam", "adamw"),
    "rho": ("adadelta", "rmsprop"),
    "epsilon": ("adam", "adamw", "rmsprop", "adagrad", "adadelta"),
    "centered": ("rmsprop",),
}
_LATER = ("centered", "schedule", "local_schedule", "clients")
