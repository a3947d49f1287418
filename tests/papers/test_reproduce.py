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
from fedloom.papers import published
from fedloom.papers.reproduce import Rerun
from fedloom.results.result import Result
from fedloom.results.run_data import RunData
from tests.papers.files import SEVERAL, SMALL


def test_ours_and_theirs_are_side_by_side(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(SMALL)
    found = published.load(str(tmp_path / "small.toml"))
    planned = Rerun(found).plan()
    assert all(one.seconds > 0 for one in planned)
    table = Rerun(found).run(planned, tmp_path / "out")
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
    assert all(len(one["weights_sha256"]) == 64 and one["date"].startswith("20") for one in record)
    kept = [(rounds, pytest.approx(values, abs=1e-5)) for rounds, values in record[0]["curves"]]
    assert [(list(rounds), list(values)) for rounds, values in curves] == kept
    assert "QUICK" not in table.note
    assert (tmp_path / "out" / "reproduction.md").is_file()


def test_rows_that_were_run_before_stay_in_the_table(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(SMALL)
    found, out = published.load(str(tmp_path / "small.toml")), tmp_path / "out"

    def rows(only: str, changes: dict[str, object] | None = None) -> list[str]:
        rerun = Rerun(found, changes=changes or {})
        table = rerun.run(rerun.plan([only]), out)
        assert table is not None
        return [str(row[0]) for row in table.rows]

    assert rows("slow") == ["slow"]
    assert rows("fast", {"run.workers": 1}) == ["fast", "slow"]  # with how many workers is no other setting
    assert "CHANGED" not in (out / "reproduction.md").read_text()
    assert [one["row"] for one in json.loads((out / "reproduction.json").read_text())] == ["fast", "slow"]
    # what was run with other settings is no row of this table
    assert rows("fast", {"rounds": 3}) == ["fast"]
    assert "CHANGED: rounds = 3. " in (out / "reproduction.md").read_text()


def test_a_row_may_state_several_numbers_of_one_algorithm_among_others(tmp_path: Path) -> None:
    (tmp_path / "several.toml").write_text(SEVERAL)
    found = published.load(str(tmp_path / "several.toml"))
    planned = Rerun(found).plan()
    assert [one.seconds > 0 for one in planned] == [True, False, False]  # the run is one and the same
    table = Rerun(found).run(planned, tmp_path / "out")
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


def test_a_row_of_a_shared_run_can_be_run_alone_with_the_same_numbers(tmp_path: Path) -> None:
    (tmp_path / "several.toml").write_text(SEVERAL)
    found = published.load(str(tmp_path / "several.toml"))

    def ours(out: Path, *only: str) -> dict[str, Any]:
        planned = Rerun(found).plan(only, out)
        Rerun(found).run(planned, out)
        return {one.row.name: (one.ours, one.curves) for one in planned}

    alone = ours(tmp_path / "alone", "averaging")
    assert [path.name for path in (tmp_path / "alone" / "rows").iterdir()] == ["averaging"]
    assert RunData.read(tmp_path / "alone" / "rows" / "averaging").labels == ("central",)
    everything = ours(tmp_path / "all")
    assert alone["averaging"] == everything["averaging"]
    assert ours(tmp_path / "all", "averaging") == alone  # the shared run is there, and used
    assert [path.name for path in (tmp_path / "all" / "rows").iterdir()] == ["all"]


def test_further_measures_stand_beside_what_is_compared_and_curves_are_drawn(tmp_path: Path) -> None:
    both = SMALL.replace("[measure]", '[[measure]]\nname = "rounds"').replace(
        "[quick]", '[[measure]]\nname = "crossing"\nkind = "crossing"\ntarget = 0.5\n[curves]\nbest = true\n[quick]'
    )
    (tmp_path / "both.toml").write_text(both.replace('"fast"', '"a, fast"').replace('"slow"', '"a, slow"'))
    found = published.load(str(tmp_path / "both.toml"))
    table = Rerun(found).run(Rerun(found).plan(), tmp_path / "out")
    assert table is not None
    fast = dict(zip(table.columns, table.rows[0], strict=True))
    assert fast["ours"] - 1 < fast["our crossing"] <= fast["ours"]
    assert fast["paper"] == 4
    assert table.rows[1][-1] == "> 2"
    assert (tmp_path / "out" / "curves.png").is_file()


def test_the_quick_version_may_change_settings_too(tmp_path: Path) -> None:
    (tmp_path / "several.toml").write_text(SEVERAL)
    planned = Rerun(published.load(str(tmp_path / "several.toml")), quick=True).plan()
    assert [(one.row.name, one.experiment.rounds, one.experiment.seeds) for one in planned] == [
        ("no sharing", 2, (1,)),
        ("averaging", 2, (1,)),
        ("one place", 2, (1,)),
    ]


def test_every_row_that_is_asked_for_must_be_there(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(SMALL)
    found = published.load(str(tmp_path / "small.toml"))
    with pytest.raises(InputError, match=r"No row is called fats\. Known: fast; slow"):
        Rerun(found).plan(["slow", "fats"])


def test_quick_is_never_longer_and_settings_do_not_stick(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(SMALL.replace("rounds = 9", "rounds = 1"))
    found = published.load(str(tmp_path / "small.toml"))
    row = found.row[0].replace(set={"data.partition": {"name": "iid", "clients": 4}})
    assert Rerun(found, quick=True).experiment(row).rounds == 1
    with pytest.raises(InputError, match="rounds must be"):
        Rerun(found, quick=True, changes={"rounds": "many"}).experiment(row)
    changed = Rerun(found, changes={"data.partition.clients": 5}).experiment(row)
    assert changed.data.partition == {"name": "iid", "clients": 5}
    assert Rerun(found).experiment(row).data.partition == {"name": "iid", "clients": 4}


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
