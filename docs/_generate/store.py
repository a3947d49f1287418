"""Writes the reference of the store: the tables and columns of a run's `run.db`."""

from __future__ import annotations

import sqlite3
import tempfile
from pathlib import Path

from fedloom.experiment.store import Store

CELL, ROUND = "the cell's `id`", "the round, counted from 1"
CLIENT, SPLIT = "the client's number, see `clients`", '`"train"`, `"validation"` or `"test"`'
VALUE = "the number; NULL where it is not defined, such as the AUROC of a single class"
EXAMPLES = "how many examples it was measured on"
PHASE = '`"pre_fit"` before local training, `"post_fit"` after it, `"final"` and `"universal"` at the end'
UP = "bytes of weights and numbers that clients sent"
DOWN = "bytes of weights and numbers that clients received; frozen parameters count in the first round of each site"
VIRTUAL = "virtual seconds since the cell began"
MEANINGS: dict[str, tuple[str, dict[str, str]]] = {
    "cells": (
        "One row for each cell: one algorithm label with one seed.",
        {
            "id": "the cell's number in this database",
            "label": "the algorithm's label in the experiment file",
            "seed": "the seed",
            "status": '`"waiting"`, `"running"`, `"done"`, `"stopped"` or `"failed"`',
            "rounds_done": "how many rounds are complete",
            "weights_sha256": "SHA-256 of the final weights",
            "error": "why the cell failed",
            "started": "when it started, in UTC",
            "finished": "when it ended, in UTC",
        },
    ),
    "rounds": (
        "One row for each round of each cell.",
        {
            "cell": CELL,
            "round": ROUND,
            "seconds": "how long the round took",
            "participants": "how many clients took part; 0 in a round that counts if Poisson sampling drew nobody",
            "complete": "1 if the round counts, 0 if it was abandoned and the model stayed as it was",
            "bytes_up": UP,
            "bytes_down": DOWN,
        },
    ),
    "participants": (
        "One row for each client that took part in a round.",
        {"cell": CELL, "round": ROUND, "client": CLIENT, "bytes_up": UP, "bytes_down": DOWN},
    ),
    "client_metrics": (
        "What was measured at each client.",
        {
            "cell": CELL,
            "round": ROUND,
            "client": CLIENT,
            "phase": PHASE,
            "split": SPLIT,
            "metric": "the metric's name, or `loss`",
            "value": VALUE,
            "examples": EXAMPLES,
        },
    ),
    "pooled_metrics": (
        "Every client's model on its own split, over the examples of all measured clients together, each counted once. "
        "If clients share one model, this is that model on all their examples. AUROC ranks all scores together.",
        {
            "cell": CELL,
            "round": ROUND,
            "phase": PHASE,
            "split": SPLIT,
            "metric": "the metric's name, or `loss`",
            "value": VALUE,
            "examples": EXAMPLES,
        },
    ),
    "server_metrics": (
        "The global model on the server's own data, and what an algorithm notes about a round.",
        {
            "cell": CELL,
            "round": ROUND,
            "split": f'{SPLIT}; `"notes"` for what the algorithm notes',
            "metric": "the metric's or note's name",
            "value": VALUE,
            "examples": EXAMPLES,
        },
    ),
    "history": (
        "The loss of every local epoch; with `epochs = true` in `[evaluate]` also the validation split.",
        {
            "cell": CELL,
            "round": ROUND,
            "client": CLIENT,
            "epoch": "the local epoch, counted from 1",
            "metric": "`loss`, or `validation_` and a metric's name",
            "value": VALUE,
        },
    ),
    "public_numbers": (
        "Numbers that clients publish as part of an algorithm, such as the scores that peers give each other.",
        {
            "cell": CELL,
            "round": ROUND,
            "client": CLIENT,
            "name": "what the number is",
            "about": "the client that it is about, or its place in a list of numbers",
            "value": VALUE,
        },
    ),
    "times": (
        "When each round began and ended in virtual time, if the experiment has [system].",
        {
            "cell": CELL,
            "round": ROUND,
            "began": VIRTUAL,
            "ended": VIRTUAL,
            "available": "how many clients were available when it drew its clients",
            "asked": "how many clients were asked",
        },
    ),
    "client_times": (
        "What each client that was asked did in virtual time.",
        {
            "cell": CELL,
            "round": ROUND,
            "client": CLIENT,
            "status": '`"counted"`, `"late"` (after the deadline), `"surplus"` (enough others were faster), '
            '`"vanished"` or `"left"` (no longer available)',
            "began": VIRTUAL,
            "ended": f"{VIRTUAL}; for one that does not count, when the server stopped waiting for it",
            "computing": "how many seconds of its time it computes, or would compute",
            "version": "the round in which it was asked",
        },
    ),
    "clients": (
        "One row for each client.",
        {
            "client": "the client's number",
            "name": "the client's name",
            "train": "how many training examples it holds",
            "validation": "how many validation examples",
            "test": "how many test examples",
        },
    ),
    "metrics": (
        "One row for each metric of the run.",
        {
            "metric": "the metric's name",
            "is_mean": "1 if the value is a mean over examples, so that it can be averaged",
            "higher_is_better": "1 for accuracy and its like, 0 for losses",
        },
    ),
    "facts": (
        "What is known about the run as a whole, one JSON value for each key: the experiment, versions, the machine.",
        {"key": "the fact's name", "value": "its value as JSON"},
    ),
}


def schema() -> dict[str, dict[str, str]]:
    """The tables of a new store, with the SQL type of each column."""
    with tempfile.TemporaryDirectory() as folder:
        with Store(folder):
            pass
        database = sqlite3.connect(Path(folder) / "run.db")
        names = database.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY rowid").fetchall()
        found = {name: {row[1]: row[2] for row in database.execute(f"PRAGMA table_info({name})")} for (name,) in names}
        database.close()
    return found


def tables() -> str:
    """Write a section for each table."""
    lines = []
    for name, columns in schema().items():
        what, meanings = MEANINGS[name]
        lines += [f"## {name}", "", what, "", "| column | type | meaning |", "| --- | --- | --- |"]
        lines += [f"| `{column}` | {kind or 'any'} | {meanings[column]} |" for column, kind in columns.items()]
        lines += [""]
    return "\n".join(lines)
