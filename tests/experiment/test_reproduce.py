"""Reproductions: what was published, what comes out here, and the difference."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedloom.errors import InputError
from fedloom.experiment import reproduce
from fedloom.experiment.view import View

SMALL = """
title = "Digits, rounds until half are right"
sources = { paper = "nobody", other = "nobody else" }
[measure]
kind = "rounds_to"
metric = "accuracy"
target = 0.5
[quick]
rows = ["fast"]
rounds = 3
[experiment]
rounds = 9
seeds = [1, 2]
[experiment.data]
source = "digits"
partition = { name = "iid", clients = 3 }
server = 0.2
[experiment.train]
batch_size = 16
[experiment.evaluate]
splits = []
target = { accuracy = 0.5 }
stop = "target"
[experiment.algorithm]
fedavg = {}
[experiment.run]
backend = "serial"
[[row]]
name = "fast"
published = { paper = 4, other = 2 }
set = { "train.lr" = 0.3 }
[[row]]
name = "slow"
published = { paper = 7 }
set = { "train.lr" = 0.00001, "rounds" = 2 }
"""


def test_every_shipped_file_is_sound() -> None:
    assert "mnist-2nn" in reproduce.names()
    for name in reproduce.names():
        found = reproduce.load(name)
        names = [row.name for row in found.row]
        assert len(set(names)) == len(names)
        assert set(found.quick.rows) <= set(names)
        assert all(set(row.published) <= set(found.sources) for row in found.row)


def test_the_2nn_rows_are_those_of_the_table() -> None:
    rows = {row.name: row for row in reproduce.load("mnist-2nn").row}
    assert len(rows) == 16  # twenty, without the four that were not reached
    assert rows["iid, B 10, C 0.1"].published == {"paper": 87, "slides": 53}
    assert rows["non-iid, B ∞, C 0"].published == {"paper": 4278, "slides": 2620}
    assert rows["non-iid, B 10, C 1"].set["cohort.fraction"] == 1.0
    assert rows["non-iid, B 10, C 1"].set["data.partition"] == {"name": "shards", "clients": 100}


def test_ours_and_theirs_are_side_by_side(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(SMALL)
    found = reproduce.load(str(tmp_path / "small.toml"))
    planned = reproduce.plan(found)
    assert all(one.seconds > 0 for one in planned)
    table = reproduce.reproduce(found, planned, tmp_path / "out")
    assert table is not None
    fast, slow = table.rows
    curves = [View.read(tmp_path / "out" / "rows" / "fast").server("fedavg", seed, "accuracy") for seed in (1, 2)]
    first = [int(rounds[values >= 0.5][0]) for rounds, values in curves]
    assert fast[:5] == ("fast", sum(first) / 2, 4, sum(first) / 2 - 4, pytest.approx(sum(first) / 8))
    assert fast[5] == 2
    assert slow == ("slow", "> 2", 7, None, None, None)
    assert "QUICK" not in table.note
    assert (tmp_path / "out" / "reproduction.md").is_file()


def test_the_quick_version_is_labelled_and_shorter(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(SMALL)
    found = reproduce.load(str(tmp_path / "small.toml"))
    planned = reproduce.plan(found, quick=True)
    assert [(one.row.name, one.experiment.rounds) for one in planned] == [("fast", 3)]
    table = reproduce.table(found, planned, quick=True)
    assert table.title.endswith("(quick)")
    assert table.note.startswith("QUICK: 1 of 2 rows, at most 3 rounds.")
    assert [one.row.name for one in reproduce.plan(found, only=["s*"])] == ["slow"]
    with pytest.raises(InputError, match=r"No row is called x\. Known: fast; slow"):
        reproduce.plan(found, only=["x"])


def test_an_unknown_name_says_what_is_known() -> None:
    with pytest.raises(InputError, match="Did you mean 'mnist-2nn'"):
        reproduce.load("mnist-2n")
