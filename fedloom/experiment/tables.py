"""The tables of an experiment file that belong to no other room: their keys, and the defaults."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le
from pydantic import Field, Strict, field_validator, model_validator

from fedloom.data.normalize import check_normalize
from fedloom.data.split import Split
from fedloom.errors import InputError
from fedloom.federation.engine import Evaluation
from fedloom.metrics import usual
from fedloom.record import Count, Positive, Record, Whole

Seed = Whole | Literal["run"]  # a number, or the seed of each run


class DataTable(Record):
    """[data]: the examples and how they are divided. The source has further keys."""

    source: str = "digits"
    """Where the examples come from: a source's name, or `my_file.py:loader`."""
    partition: dict[str, Any] | str | None = None
    """How examples are divided among clients: a table with a `name` and its keys, or `natural` to use the data's own
    clients.
    """
    normalize: Literal["none", "client", "federated"] | dict[str, tuple[float, float]] = "none"
    """Scale features to mean 0 and standard deviation 1, with the statistics of each client's training split, or of
    all of them together. Bounds that you know, such as `{ age = [0, 100] }`, are scaled to −1 and 1, and no data
    decides that. With `preprocessing`, the default is `federated`: by what the sites agreed on.
    """
    split: tuple[float, float, float] | Split = (0.6, 0.2, 0.2)
    """The shares of train, validation and test of each client: three numbers, or a table that also has `shuffle`."""
    scale_target: bool | None = None
    """Scale the labels of a regression to mean 0 and standard deviation 1, with the statistics of all training splits
    together. Metrics and predictions are in the labels' own units.
    """
    preprocessing: Path | None = None
    """A file of `fedloom data agree`: the categories, classes and statistics that several sites use together."""
    server: str | int | float | dict[str, Any] = "none"
    """What the server itself holds: nothing, the official `test` set, a share or number of the examples, or a table of
    splits. In `fedloom serve`, 1.0 means all examples, because the clients have theirs elsewhere.
    """
    seed: Seed = 0
    """The seed of partition and splits. `run` draws new ones for every seed of the experiment."""

    @model_validator(mode="before")
    @classmethod
    def _as_agreed(cls, given: Any) -> Any:
        """Scale as the agreed file says. A table with this file alone has no data: the sites bring it."""
        if not isinstance(given, Mapping) or given.get("preprocessing") is None or len(given) == 1:
            return given
        if given.get("normalize", "none") not in ("none", "federated"):
            own = 'normalize = "client" scales features by this data alone'
            own = own if given["normalize"] == "client" else "normalize has bounds"
            raise InputError(
                f"[data] {own}, and preprocessing = "
                f'"{given["preprocessing"]}" has the means and deviations that all sites use. Leave normalize out.'
            )
        return {"normalize": "federated", **given}

    @field_validator("normalize", mode="before")
    @classmethod
    def _bounds(cls, value: Any) -> Any:
        check_normalize(value)
        return value

    @field_validator("split", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        if isinstance(value, (list, tuple)) and len(value) != 3:
            raise InputError(f"[data] split must be three shares: train, validation, test. Got {list(value)} instead.")
        return value


class TaskTable(Record):
    """[task]: the model, its loss and its metrics."""

    model: str = "digits_mlp"
    """A shipped model, or `my_file.py:Net`. For `source = "csv"`, the default is `mlp`."""
    args: dict[str, Any] = Field(default_factory=dict)
    """The arguments the model is built with. For a table, `mlp` and `logistic` have an output for each class, or for
    each number to predict, if `classes` is not among them.
    """
    loss: str = "cross_entropy"
    """A shipped loss, or `my_file.py:my_loss`."""
    metrics: tuple[str, ...] | None = ("accuracy",)
    """What is measured besides the loss: metrics, or your own as `my_file.py:my_metric`. The first one is what results
    are compared by. With a loss for numbers (`mse`, `mae`), or your own loss for labels that are numbers, the default
    is `["mae"]`.
    """
    init: str = "torch"
    """The initial weights: torch's own, `glorot`, or a safetensors file."""
    dtype: Literal["float32", "float64"] = "float32"
    """The precision of the weights."""
    seed: Seed = 0
    """The seed of the initial weights. `run` draws new ones for every seed of the experiment."""

    @model_validator(mode="before")
    @classmethod
    def _usual_metrics(cls, given: Any) -> Any:
        return {"metrics": usual(given["loss"]), **given} if isinstance(given, Mapping) and "loss" in given else given


class EvaluateTable(Evaluation):
    """[evaluate]: what is measured, which numbers count, and when to stop."""

    headline: str = "final"
    """Which rounds the reported numbers are about: the `final` one, the `best` one, or the mean of the last k
    (`last:k`).
    """
    target: dict[str, Positive] = Field(default_factory=dict)
    """A metric and the value it should reach, such as `{ accuracy = 0.97 }`."""
    stop: Literal["never", "target"] = "never"
    """Stop a cell when it reaches the target."""

    @field_validator("headline")
    @classmethod
    def _headline(cls, value: str) -> str:
        if value in ("final", "best") or re.fullmatch(r"last:[1-9][0-9]*", value):
            return value
        raise InputError(
            f"[evaluate] headline must be 'final', 'best' or 'last:k', such as 'last:10'. Got '{value}' instead."
        )

    @model_validator(mode="after")
    def _stop(self) -> EvaluateTable:
        if self.stop == "target" and not self.target:
            raise InputError('[evaluate] stop = "target" needs a target, such as target = { accuracy = 0.97 }.')
        if len(self.target) > 1:
            raise InputError(f"[evaluate] target must name one metric. Got {', '.join(self.target)}.")
        return self


class RunTable(Record):
    """[run]: how the experiment is computed. These keys never change what it is."""

    backend: Literal["vector", "serial", "ray"] = "vector"
    """What computes: `vector` uses worker processes, `serial` this process, and `ray` a cluster."""
    workers: Annotated[int, Strict(), Ge(1), Le(1024)] | Literal["auto"] = "auto"
    """The number of worker processes. On Ray, the most on each node."""
    address: str = "local"
    """The address of a Ray cluster: `auto` or `HOST:PORT`. `local` starts one on this machine."""
    nodes: Count | Literal["auto"] = "auto"
    """How many nodes of a Ray cluster to wait for before the first round."""
    device: str = "auto"
    """The device that computes: `cpu`, `cuda`, `mps` or `auto`."""
    group: Count | Literal["auto"] = "auto"
    """How many clients each worker trains side by side."""
    replay: bool = True
    """Record training steps and replay them, where that gives the same results."""
    cells: Count | Literal["auto"] = "auto"
    """How many cells (algorithm × seed) run at the same time, each with its share of the workers."""
    checkpoint_every: Count = 1
    """Write a checkpoint in every round that is a multiple of this."""
    keep_checkpoints: Count = 2
    """How many checkpoints of each cell to keep. `fedloom rollback` returns to any of them."""
    keep_models: bool = False
    """Keep the global model of every round in a file."""

    @model_validator(mode="before")
    @classmethod
    def _has_no_removed_key(cls, given: Any) -> Any:
        if isinstance(given, dict) and "compile" in given:
            raise InputError(
                f"[run] compile was removed: it never paid. Got {given['compile']!r} for it. Delete the key: recorded "
                "steps (replay = true, the default) were faster wherever they were measured."
            )
        return given

    @model_validator(mode="after")
    def _fits(self) -> RunTable:
        if self.backend != "ray":
            for key in ("address", "nodes"):
                if getattr(self, key) != type(self).model_fields[key].default:
                    raise InputError(f'[run] {key} is for backend = "ray". Got backend = "{self.backend}".')
        elif self.address == "local" and self.nodes not in ("auto", 1):
            raise InputError(
                f'[run] nodes = {self.nodes} needs the address of a cluster: address = "local" is one node.'
            )
        elif self.device not in ("auto", "cpu"):
            raise InputError(f'[run] backend = "ray" computes on processors. Got device = "{self.device}".')
        return self
