"""Writes the reference of the algorithms and of the robust rules."""

from __future__ import annotations

from _generate.fields import table
from fedloom import catalogue
from fedloom.aggregation.robust import RULES
from fedloom.algorithms import ALGORITHMS
from fedloom.field_words import summary


def overview() -> str:
    """Write one line for each algorithm."""
    lines = ["| name | what it does | secure aggregation |", "| --- | --- | --- |"]
    for entry in catalogue.entries():
        lines.append(f"| [`{entry.name}`](#{entry.name}) | {entry.summary} | {entry.secure.split(':')[0]} |")
    return "\n".join(lines)


def algorithms() -> str:
    """Write a section for each algorithm."""
    lines = []
    for entry in catalogue.entries():
        keys = {name for name in ALGORITHMS[entry.name].model_fields if name != "train"}
        lines += [f"## {entry.name}", "", entry.summary, "", entry.details, ""]
        lines += [table(ALGORITHMS[entry.name], without=["train"]), ""] if keys else []
        lines += [f"Secure aggregation: {entry.secure}. On a network: {entry.network}.", ""]
        lines += [f"Reference: {entry.reference}.", ""] if entry.reference else []
    return "\n".join(lines)


def rules() -> str:
    """Write a section for each robust rule."""
    lines = []
    for name, rule in RULES.items():
        lines += [f"### {name}", "", summary(rule), "", table(rule) if rule.model_fields else "No keys.", ""]
    return "\n".join(lines)
