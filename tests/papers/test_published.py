"""Files of published results: the shipped ones are sound, and others are checked when they are loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedloom.errors import InputError
from fedloom.models import MODELS
from fedloom.papers import published
from fedloom.papers.published import Measure, named, over_clients
from fedloom.papers.reproduce import Rerun
from fedloom.results.run_data import RunData
from tests.papers.files import SEVERAL, SMALL


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
        experiment = Rerun(found).experiment(row)
        assert row.label is None or row.label in experiment.algorithm
        assert Rerun(found, quick=True).experiment(row).rounds <= min(found.quick.rounds, experiment.rounds)
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
    assert len(published.load("mcmahan-figure2").row) == 16
    skewed = {row.name: row.published.get("thesis") for row in published.load("images-skewed").row}
    assert skewed["peer-to-peer, selective"]["before: lowest"] == 70.09
    assert skewed["central, selective"]["before: lowest"] == 50.0
    assert skewed["not federated"] == {"everybody's tests: average": 87.21}


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


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match=r"bytes\.toml is not a text in UTF-8"):
        published.load(str(tmp_path / "bytes.toml"))


def test_measures_must_be_told_apart(tmp_path: Path) -> None:
    (tmp_path / "several.toml").write_text(SEVERAL.replace('"peak round"', '"lowest before"'))
    with pytest.raises(InputError, match="each need their own name"):
        published.load(str(tmp_path / "several.toml"))


@pytest.fixture
def run(comparison: Path) -> RunData:
    return RunData.read(comparison)


def value(run: RunData, **measure: Any) -> float | None:
    return Measure(**measure).value(run, "fedavg", 2)


def test_a_measure_takes_its_number_from_the_servers_curve(run: RunData) -> None:
    rounds, values = run.server_values("fedavg", 2, "loss")
    curve = {"of": "server", "metric": "loss"}
    assert value(run, kind="last", rounds=2, **curve) == pytest.approx(values[-2:].mean())
    assert value(run, kind="peak", **curve) == values.min()  # the lower the loss, the better
    assert value(run, kind="trough", **curve) == values.max()
    assert value(run, kind="peak_round", **curve) == rounds[values.argmin()]
    assert value(run, kind="rounds_to", target=float(values[2]), **curve) == rounds[np.argmax(values <= values[2])]
    assert value(run, kind="rounds_to", target=-1.0, **curve) is None
    assert value(run, kind="last", of="server", split="validation") is None


@pytest.mark.parametrize("statistic", ["mean", "std", "lowest", "highest"])
def test_of_each_round_one_number_is_taken_over_clients(run: RunData, statistic: Any) -> None:
    series = run.client_values("fedavg", 2, "post_fit", "accuracy")
    stats = series.by_round()
    expected = {"mean": stats.mean, "std": stats.std, "lowest": stats.low, "highest": stats.high}[statistic]
    rounds, values = over_clients(series, statistic)
    assert (rounds.tolist(), values.tolist()) == (stats.index.tolist(), expected.tolist())
    assert value(run, kind="last", of="post_fit", clients=statistic) == values[-1]


def test_numbers_at_the_end_have_names_and_percentages_are_shown_as_such(run: RunData) -> None:
    (cell,) = (one for one in run.result.runs if (one.algorithm, one.seed) == ("fedavg", 2))
    expected = cell.final["server_test_accuracy"]
    assert value(run, kind="final", key="server_test_accuracy") == expected
    assert value(run, kind="final", key="server_test_accuracy", percent=True) == 100 * expected
    assert value(run, kind="final", key="unknown") is None
    at = value(run, kind="peak_round", of="server")
    assert value(run, kind="peak_round", of="server", percent=True) == at  # a count of rounds is not a share


def test_a_measure_that_lacks_what_its_kind_needs_is_refused() -> None:
    with pytest.raises(InputError, match="kind 'crossing' needs a 'target'"):
        Measure(kind="crossing")
    with pytest.raises(InputError, match="kind 'final' needs a 'key'"):
        Measure(kind="final")


def test_several_measures_each_need_their_own_name() -> None:
    one, two = Measure(kind="last"), Measure(kind="peak", name="best")
    assert named((one,)) == (one,)
    for wrong in ((one, two), (two, two)):
        with pytest.raises(InputError, match="each need their own name"):
            named(wrong)
