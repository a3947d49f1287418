"""Reproductions: what was published, what comes out here, and the difference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fedloom.cli import app
from fedloom.errors import InputError
from fedloom.models import MODELS
from fedloom.papers import comparison, published, reproduce
from fedloom.papers.curve_figure import Curves, draw
from fedloom.results.result import Result
from fedloom.results.run_data import RunData

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


@pytest.mark.parametrize("name", published.names())
def test_every_shipped_file_is_sound(name: str) -> None:
    found = published.load(name)
    names = [row.name for row in found.row]
    assert len(set(names)) == len(names)
    assert set(found.quick.rows) <= set(names)
    measures = {measure.name for measure in found.measure}
    for row in found.row:
        assert set(row.published) <= set(found.sources)
        assert all(set(told) <= measures for told in row.published.values() if isinstance(told, dict))
        experiment = reproduce.experiment_of(found, row)
        assert row.label is None or row.label in experiment.algorithm
        assert reproduce.experiment_of(found, row, quick=True).rounds <= min(found.quick.rounds, experiment.rounds)
        assert experiment.task.model in MODELS


def test_the_2nn_rows_are_those_of_the_table() -> None:
    rows = {row.name: row for row in published.load("mcmahan-table1-2nn").row}
    assert len(rows) == 20
    assert rows["iid, B ∞, C 1"].published == {"paper": "-", "slides": "-"}  # not reached
    assert rows["iid, B 10, C 0.1"].published == {"paper": 87, "slides": 53}
    assert rows["non-iid, B ∞, C 0"].published == {"paper": 4278, "slides": 2620}
    assert rows["non-iid, B 10, C 1"].set["cohort.fraction"] == 1.0
    assert rows["non-iid, B 10, C 1"].set["data.partition"] == {"name": "shards", "clients": 100}


def test_the_other_tables_have_the_published_rows() -> None:
    cnn = {row.name: row.published for row in published.load("mcmahan-table1-cnn").row}
    assert len(cnn) == 20
    assert cnn["iid, B 10, C 0.1"] == {"paper": 18, "slides": 26}
    assert cnn["non-iid, B 10, C 1"] == {"paper": 97, "slides": "724 (98.89 %)"}
    second = {row.name: row for row in published.load("mcmahan-table2").row}
    assert len(second) == 18
    assert second["non-iid, E 20, B 10"].published == {"paper": 173, "slides": 632}
    assert second["iid, E 5, B 10"].published == {"paper": 20}
    assert len(published.load("mcmahan-figure2").row) == 12
    skewed = {row.name: row.published.get("thesis") for row in published.load("images-skewed").row}
    assert skewed["peer-to-peer, selective"]["before: lowest"] == 70.09
    assert skewed["central, selective"]["before: lowest"] == 50.0
    assert skewed["not federated"] == {"everybody's tests: average": 87.21}


def test_ours_and_theirs_are_side_by_side(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(SMALL)
    found = published.load(str(tmp_path / "small.toml"))
    planned = reproduce.plan(found)
    assert all(one.seconds > 0 for one in planned)
    table = reproduce.reproduce(found, planned, tmp_path / "out")
    assert table is not None
    fast, slow = table.rows
    curves = [
        RunData.read(tmp_path / "out" / "rows" / "fast").server_values("fedavg", seed, "accuracy") for seed in (1, 2)
    ]
    first = [int(rounds[values >= 0.5][0]) for rounds, values in curves]
    assert fast[:2] == ("fast", sum(first) / 2)
    assert fast[2] == f"{min(first)} – {max(first)}"
    assert fast[3:] == (4, sum(first) / 2 - 4, pytest.approx(sum(first) / 8), 2)
    assert slow == ("slow", "> 2", None, 7, None, None, None)
    record = json.loads((tmp_path / "out" / "reproduction.json").read_text())
    assert [one["ours"][""] for one in record] == [first, [None, None]]
    assert all(len(one["weights_sha256"]) == 64 for one in record)
    assert "QUICK" not in table.note
    assert (tmp_path / "out" / "reproduction.md").is_file()


def test_rows_that_were_run_before_stay_in_the_table(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(SMALL)
    found, out = published.load(str(tmp_path / "small.toml")), tmp_path / "out"

    def rows(only: str, changes: dict[str, object] | None = None) -> list[str]:
        planned = reproduce.plan(found, only=[only], changes=changes)
        table = reproduce.reproduce(found, planned, out, changes=changes)
        assert table is not None
        return [str(row[0]) for row in table.rows]

    assert rows("slow") == ["slow"]
    assert rows("fast", {"run.workers": 1}) == ["fast", "slow"]  # with how many workers is no other setting
    assert "CHANGED" not in (out / "reproduction.md").read_text()
    assert [one["row"] for one in json.loads((out / "reproduction.json").read_text())] == ["fast", "slow"]
    # what was run with other settings is no row of this table
    assert rows("fast", {"rounds": 3}) == ["fast"]
    assert "CHANGED: rounds = 3. " in (out / "reproduction.md").read_text()


SEVERAL = """
title = "Digits, clients before and after training"
sources = { paper = "nobody" }
[[measure]]
name = "lowest before"
kind = "last"
of = "pre_fit"
clients = "lowest"
percent = true
[[measure]]
name = "spread after, last 2"
kind = "last"
of = "post_fit"
clients = "std"
rounds = 2
[[measure]]
name = "peak round"
kind = "peak_round"
of = "post_fit"
[[measure]]
name = "least"
kind = "trough"
of = "post_fit"
clients = "highest"
[[measure]]
name = "crossing"
kind = "crossing"
of = "pre_fit"
target = 0.5
[[measure]]
name = "everybody's tests"
kind = "last"
of = "universal"
[[measure]]
name = "never measured"
kind = "last"
of = "server"
split = "validation"
[quick]
rounds = 2
set = { seeds = [1] }
[experiment]
rounds = 3
seeds = [1, 2]
[experiment.data]
source = "digits"
partition = { name = "affinity", clients = 3, probability = 0.6 }
[experiment.train]
lr = 0.2
[experiment.evaluate]
universal = true
[experiment.algorithm]
local = {}
central = { name = "fedavg" }
pooled = {}
[experiment.run]
backend = "serial"
[[row]]
name = "no sharing"
run = "all"
label = "local"
published = { paper = { "lowest before" = 20.0, "crossing" = "-" } }
[[row]]
name = "averaging"
run = "all"
label = "central"
[[row]]
name = "one place"
run = "all"
label = "pooled"
"""


def test_a_row_may_state_several_numbers_of_one_algorithm_among_others(tmp_path: Path) -> None:
    (tmp_path / "several.toml").write_text(SEVERAL)
    found = published.load(str(tmp_path / "several.toml"))
    planned = reproduce.plan(found)
    assert [one.seconds > 0 for one in planned] == [True, False, False]  # the run is one and the same
    table = reproduce.reproduce(found, planned, tmp_path / "out")
    assert table is not None
    assert [path.name for path in (tmp_path / "out" / "rows").iterdir()] == ["all"]
    assert [row[:2] for row in table.rows if row[1] != "over seeds"] == [
        ("no sharing", "ours"),
        ("", "paper"),
        ("averaging", "ours"),
        ("one place", "ours"),
    ]
    ours = {(row[0], name): value for row in table.rows for name, value in zip(table.columns, row, strict=True)}
    clients = Result.read(tmp_path / "out" / "rows" / "all").frame("clients")
    accuracy = clients[(clients.metric == "accuracy") & (clients.split == "test")]

    def curves(label: str, phase: str, statistic: str) -> list[Any]:
        rows = accuracy[(accuracy.phase == phase) & (accuracy.algorithm == label)]
        return [rows[rows.seed == seed].groupby("round").value.agg(statistic) for seed in (1, 2)]

    lowest = np.mean([100 * curve.loc[3] for curve in curves("local", "pre_fit", "min")])
    assert ours["no sharing", "lowest before"] == pytest.approx(lowest)
    paper = dict(zip(table.columns, table.rows[2], strict=True))
    assert {name: value for name, value in paper.items() if value} == {
        "whose": "paper",
        "lowest before": 20.0,
        "crossing": "-",
    }
    after = [curve.loc[2:].mean() for curve in curves("central", "post_fit", "std")]  # of samples: n − 1
    assert ours["averaging", "spread after, last 2"] == pytest.approx(np.mean(after) * np.sqrt(2 / 3))
    assert ours["averaging", "peak round"] == np.mean([c.idxmax() for c in curves("central", "post_fit", "mean")])
    assert ours["averaging", "least"] == np.mean([c.min() for c in curves("central", "post_fit", "max")])
    universal = [curve.loc[3] for curve in curves("pooled", "universal", "mean")]
    assert ours["one place", "everybody's tests"] == pytest.approx(np.mean(universal))
    assert ours["averaging", "never measured"] is None


def test_further_measures_stand_beside_what_is_compared_and_curves_are_drawn(tmp_path: Path) -> None:
    both = SMALL.replace("[measure]", '[[measure]]\nname = "rounds"').replace(
        "[quick]", '[[measure]]\nname = "crossing"\nkind = "crossing"\ntarget = 0.5\n[curves]\nbest = true\n[quick]'
    )
    (tmp_path / "both.toml").write_text(both.replace('"fast"', '"a, fast"').replace('"slow"', '"a, slow"'))
    found = published.load(str(tmp_path / "both.toml"))
    table = reproduce.reproduce(found, reproduce.plan(found), tmp_path / "out")
    assert table is not None
    fast = dict(zip(table.columns, table.rows[0], strict=True))
    assert fast["ours"] - 1 < fast["our crossing"] <= fast["ours"]
    assert fast["paper"] == 4
    assert table.rows[1][-1] == "> 2"
    rows = {name: RunData.read(tmp_path / "out" / "rows" / name) for name in ("a__fast", "a__slow")}
    panels = Curves().panels({"a, fast": rows["a__fast"], "a, slow": rows["a__slow"], "other": rows["a__slow"]})
    assert {panel: list(lines) for panel, lines in panels.items()} == {"a": ["fast", "slow"], "": ["other"]}
    splits = Curves(splits=("train", "test")).panels({"a, fast": rows["a__fast"]})
    assert {panel: list(lines) for panel, lines in splits.items()} == {"a, fast": ["train", "test"]}
    (axes,) = draw(Curves(best=True), {"a, fast": rows["a__fast"]}, "").figure.axes
    drawn = axes.lines[0].get_ydata()
    assert list(drawn) == list(np.maximum.accumulate(rows["a__fast"].server_values("fedavg", 1, "accuracy")[1]))
    assert (tmp_path / "out" / "curves.png").is_file()


def test_the_quick_version_may_change_settings_too(tmp_path: Path) -> None:
    (tmp_path / "several.toml").write_text(SEVERAL)
    planned = reproduce.plan(published.load(str(tmp_path / "several.toml")), quick=True)
    assert [(one.row.name, one.experiment.rounds, one.experiment.seeds) for one in planned] == [
        ("no sharing", 2, (1,)),
        ("averaging", 2, (1,)),
        ("one place", 2, (1,)),
    ]


def test_measures_must_be_told_apart(tmp_path: Path) -> None:
    (tmp_path / "several.toml").write_text(SEVERAL.replace('"peak round"', '"lowest before"'))
    with pytest.raises(InputError, match="each need their own name"):
        published.load(str(tmp_path / "several.toml"))


def test_the_quick_version_is_labelled_and_shorter(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(SMALL)
    found = published.load(str(tmp_path / "small.toml"))
    planned = reproduce.plan(found, quick=True)
    assert [(one.row.name, one.experiment.rounds) for one in planned] == [("fast", 3)]
    table = comparison.table(found, planned, quick=True)
    assert table.title.endswith("(quick)")
    assert table.note.startswith("QUICK: 1 of 2 rows, at most 3 rounds")
    assert [one.row.name for one in reproduce.plan(found, only=["s*"])] == ["slow"]
    with pytest.raises(InputError, match=r"No row is called x\. Known: fast; slow"):
        reproduce.plan(found, only=["x"])


def test_an_unknown_name_says_what_is_known() -> None:
    with pytest.raises(InputError, match="Did you mean 'mcmahan-table1-2nn'"):
        published.load("mcmahan-table1-2n")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "paper = 4",
            "papr = 4",
            r"row 'fast' has published numbers for an unknown source 'papr'.*Did you mean 'paper'",
        ),
        ("paper = 4", 'paper = { "rounds" = 4 }', "published numbers for an unknown measure 'rounds'"),
        ('name = "slow"', 'name = "fast"', "row 'fast' needs another name"),
        ('name = "slow"', 'name = "fa st"\n[[row]]\nname = "fa_st"', "row 'fa_st' needs another name"),
        ('name = "slow"', 'name = ".."', r"row '\.\.' needs another name"),
        ('name = "slow"', 'name = ""', "row '' needs another name"),
        ("target = 0.5\n[quick]", "[quick]", "kind 'rounds_to' needs a 'target'"),
        ('"rounds_to"', '"final"', "kind 'final' needs a 'key'"),
        ('{ paper = "nobody", other = "nobody else" }', "{}", "at least one 'sources'"),
        ("rounds = 3", "rounds = 0", r"'rounds' .* must be at least 1"),
    ],
)
def test_what_a_table_would_leave_out_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in SMALL
    (tmp_path / "small.toml").write_text(SMALL.replace(old, new, 1))
    with pytest.raises(InputError, match=message):
        published.load(str(tmp_path / "small.toml"))


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match=r"bytes\.toml is not a valid TOML file"):
        published.load(str(tmp_path / "bytes.toml"))


def test_every_row_that_is_asked_for_must_be_there(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(SMALL)
    found = published.load(str(tmp_path / "small.toml"))
    with pytest.raises(InputError, match=r"No row is called fats\. Known: fast; slow"):
        reproduce.plan(found, only=["slow", "fats"])


def test_quick_is_never_longer_and_settings_do_not_stick(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(SMALL.replace("rounds = 9", "rounds = 1"))
    found = published.load(str(tmp_path / "small.toml"))
    row = found.row[0].replace(set={"data.partition": {"name": "iid", "clients": 4}})
    assert reproduce.experiment_of(found, row, quick=True).rounds == 1
    with pytest.raises(InputError, match="rounds must be"):
        reproduce.experiment_of(found, row, quick=True, changes={"rounds": "many"})
    changed = reproduce.experiment_of(found, row, changes={"data.partition.clients": 5})
    assert changed.data.partition == {"name": "iid", "clients": 5}
    assert reproduce.experiment_of(found, row).data.partition == {"name": "iid", "clients": 4}


def test_paths_in_a_file_of_ones_own_are_relative_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    rows = [f"{label},{row},{row % 3}\n" for row in range(30) for label in (row % 2,)]
    (tmp_path / "mine" / "cells.csv").write_text("label,a,b\n" + "".join(rows))
    own = SMALL.replace('source = "digits"', 'source = "csv"\npath = "cells.csv"\nlabel = "label"')
    model = '[experiment.task]\nmodel = "logistic"\nargs = { features = 2 }\n[experiment.train]'
    (tmp_path / "mine" / "own.toml").write_text(own.replace("[experiment.train]", model))
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["reproduce", "mine/own.toml", "--quick", "--estimate"])
    assert (done.exit_code, done.stdout.split()[0]) == (0, "fast")
