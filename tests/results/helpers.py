"""Helpers of the tests in this folder."""

from __future__ import annotations

from dataclasses import replace

from fedloom.results.run_data import RunData
from fedloom.results.table import Table
from fedloom.results.tables import all_tables


def named(run: RunData, name: str) -> Table:
    """The table of a run that has this name."""
    (found,) = (table for table in all_tables(run) if table.name == name)
    return found


def with_labels(run: RunData, counts: list[list[int]]) -> RunData:
    """The run with these numbers of labels: a row for each client."""
    return replace(run, facts={**run.facts, "labels": {"classes": ["alive", "dead", "gone"], "counts": counts}})
