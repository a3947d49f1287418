"""Writes the reference of the experiment file: every key of every table."""

from __future__ import annotations

import inspect
from typing import Any

from pydantic import BaseModel, create_model

from _generate.fields import table
from fedloom.clock.system import Availability, Spread
from fedloom.compression.methods import METHODS
from fedloom.data.partition import PARTITIONS
from fedloom.data.sources import SOURCES
from fedloom.data.split import Split
from fedloom.experiment.experiment_file import TABLES, Experiment
from fedloom.privacy.table import DpTable, ExampleTable, SecureTable
from fedloom.training.rate_schedule import RateSchedule
from fedloom.training.settings import ClientTraining

TOP = ("format", "name", "rounds", "seeds")


def models() -> dict[str, type[BaseModel]]:
    """Every model whose fields are keys of an experiment file, by the name of its section."""
    top: dict[str, Any] = {
        name: (Experiment.model_fields[name].annotation, Experiment.model_fields[name]) for name in TOP
    }
    return {
        "Top level": create_model("Top", **top),
        **{f"[{name}]": model for name, model in TABLES.items()},
        "A split as a table": Split,
        "train.schedule and train.local_schedule": RateSchedule,
        "train.clients": ClientTraining,
        "system.speed, download, upload and latency": Spread,
        "system.availability": Availability,
        "privacy.secure_aggregation": SecureTable,
        "privacy.dp": DpTable,
        "privacy.example_dp": ExampleTable,
    }


def compression() -> str:
    """Write a section for each compression method."""
    lines = []
    for name, method in METHODS.items():
        lines += [f"### {name}", "", summary(method), "", table(method) if method.model_fields else "No keys.", ""]
    return "\n".join(lines)


def keys() -> str:
    """Write a section for each table."""
    lines = []
    for name, model in models().items():
        lines += [f"## {name}", "", summary(model) if name != "Top level" else "", "", table(model), ""]
    return "\n".join(lines)


def sources() -> str:
    """Write a section for each source of data."""
    lines = []
    for name, source in SOURCES.items():
        lines += [f"## {name}", "", summary(source), "", table(source) if source.model_fields else "No keys.", ""]
    return "\n".join(lines)


def partitions() -> str:
    """Write a section for each partition."""
    lines = []
    for name, partition in PARTITIONS.items():
        lines += [f"### {name}", "", summary(partition), "", table(partition), ""]
    return "\n".join(lines)


def summary(model: type[BaseModel]) -> str:
    """What a model says about itself, without its examples."""
    return inspect.cleandoc(model.__doc__ or "").split(">>>")[0].strip()
