"""Writes the reference of the experiment file: every key of every table."""

from __future__ import annotations

from _generate.fields import table
from fedloom.compression.methods import METHODS
from fedloom.data.partition import PARTITIONS
from fedloom.data.sources import SOURCES
from fedloom.experiment.file_keys import TOP, tables
from fedloom.field_words import summary


def compression() -> str:
    """Write a section for each compression method."""
    lines = []
    for name, method in METHODS.items():
        lines += [f"### {name}", "", summary(method), "", table(method) if method.model_fields else "No keys.", ""]
    return "\n".join(lines)


def keys() -> str:
    """Write a section for each table."""
    lines = []
    for name, model in tables().items():
        lines += [f"## {name}", "", summary(model) if name != TOP else "", "", table(model), ""]
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
