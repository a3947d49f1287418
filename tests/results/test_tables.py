"""Tables that compare algorithms."""

from __future__ import annotations

import csv
import io
import shutil
import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedloom.experiment.store import Store
from fedloom.results import curve_numbers, headline
from fedloom.results.comparisons import Comparison
from fedloom.results.run_data import RunData
from fedloom.results.run_values import MetricInfo
from fedloom.results.statistics import differences, spread
from fedloom.results.table import Table
from fedloom.results.tables import (
    _overview_note,
    _paired_differences,
    _shown,
    all_tables,
    fairness,
    how_to_read,
    paired_differences,
    target_costs,
    verdict,
)
from tests.results.helpers import named

ACCURACY = MetricInfo("accuracy", True, True)


def pairs(comparison: Comparison) -> Table:
    return _paired_differences("differences", comparison, differences(comparison.values))


def test_the_overview_has_the_mean_and_half_of_the_interval(run: RunData) -> None:
    table = named(run, "overview_accuracy")
    (row,) = (row for row in table.rows if row[0] == "local")
    values = [cell.final["universal_accuracy"] for cell in run.result.runs if cell.algorithm == "local"]
    half = 12.706204736 * statistics.stdev(values) / 2**0.5  # t with one degree of freedom
    shown = f"{100 * statistics.fmean(values):.2f} % ± {100 * half:.2f}"
    assert row[table.columns.index("after local training, universal test (drawn clients)")] == shown
    assert row[1] == "–"  # no global model
    (row,) = (row for row in csv.DictReader(io.StringIO(table.csv())) if row["algorithm"] == "local")
    universal = "after local training, universal test (drawn clients)"
    assert (float(row[universal]), float(row[f"{universal}, ±"])) == pytest.approx((statistics.fmean(values), half))


def test_the_overview_has_the_epsilon_that_each_algorithm_has_spent(comparison: Path, tmp_path: Path) -> None:
    assert not any("ε" in column for column in named(RunData.read(comparison), "overview_accuracy").columns)
    private = Path(shutil.copytree(comparison, tmp_path / "private"))
    with Store(private) as store, store._transaction() as database:
        cells = database.execute("SELECT id FROM cells WHERE label = 'fedavg' ORDER BY seed").fetchall()
        for (cell,), spent in zip(cells, (3.5, 4.25), strict=True):
            rows = [(cell, round, "notes", "epsilon", spent * round, 1) for round in (1, 2)]
            database.executemany("INSERT INTO server_metrics VALUES (?, ?, ?, ?, ?, ?)", rows)
    table = named(RunData.read(private), "overview_accuracy")
    assert table.columns[1] == "ε (± 1 client)"
    assert {row[0]: row[1] for row in table.rows} == {"fedavg": 8.5, "local": None, "pooled": None}
    assert "ε is the most that a seed has spent" in table.note
    (row,) = (row for row in csv.DictReader(io.StringIO(table.csv())) if row["algorithm"] == "fedavg")
    assert float(row["ε (± 1 client)"]) == 8.5


def test_notes_explain_the_universal_test_only_if_there_is_one(comparison: Path, tmp_path: Path) -> None:
    assert "universal test" in named(RunData.read(comparison), "overview_accuracy").note
    without = Path(shutil.copytree(comparison, tmp_path / "without"))
    with Store(without) as store, store._transaction() as database:
        database.execute("DELETE FROM client_metrics WHERE phase = 'universal'")
    assert not any("universal" in table.note for table in all_tables(RunData.read(without)))


def test_notes_say_what_a_rank_test_needs_and_what_a_pair_shows() -> None:
    better = {seed: 0.9 + 0.001 * seed for seed in range(1, 7)}
    found = differences({"a": better, "b": dict.fromkeys(range(1, 7), 0.5)})
    (sentence,) = verdict(found, ACCURACY)
    assert sentence.startswith("a is clearly better than b: its accuracy is 40.3 points higher")
    assert [text[:20] for text in how_to_read(found, False)] == [
        *("The interval is a pa", "The rank test is Wil", "The effect size is t")
    ]
    few = differences({"a": {1: 0.9, 2: 0.3}, "b": {1: 0.1, 2: 0.1}})
    (sentence,) = verdict(few, ACCURACY)
    assert sentence.startswith("No clear difference between a and b was found")
    assert [*how_to_read(few, True)][1:] == [
        "All seeds share one split: the intervals are about chance in training, not about other examples.",
        "A rank test, which assumes less, needs 6 seeds for one pair.",
        "Effect sizes need 3 seeds or more.",
    ]
    one = differences({"a": {1: 0.9}, "b": {1: 0.1}})
    assert list(verdict(one, ACCURACY)) == ["One seed: differences are shown, but nothing can be said about chance."]
    assert list(how_to_read(one, True)) == []


@pytest.mark.parametrize(
    ("means", "said"),
    [
        ((0.1, 0.1, 0.1, 0.1), "Of 6 pairs, none differs clearly: every interval includes zero."),
        ((0.1, 0.1, 0.5), "Of 3 pairs, 2 differ clearly: 2 is better than 0, 2 than 1."),
        ((0.1, 0.5, 0.9), "All 3 pairs differ clearly: 1 is better than 0, 2 than 0, 2 than 1."),
        ((0.1, 0.3, 0.5, 0.7, 0.9), "All 10 pairs differ clearly: their intervals exclude zero."),
    ],
)
def test_the_verdict_says_which_pairs_differ(means: tuple[float, ...], said: str) -> None:
    noise = np.random.default_rng(1).normal(0, 0.01, (len(means), 6))
    values = {f"{place}": dict(enumerate(mean + noise[place])) for place, mean in enumerate(means)}
    assert list(verdict(differences(values), ACCURACY)) == [said]


def test_the_verdict_of_some_pairs_has_the_right_grammar() -> None:
    values = {"a": {1: 0.1, 2: 0.11, 3: 0.14}, "b": {1: 0.9, 2: 0.92, 3: 0.9}, "c": {1: 0.1, 2: 0.9, 3: 0.5}}
    assert list(verdict(differences(values), ACCURACY)) == ["Of 3 pairs, 1 differs clearly: b is better than a."]
    with_baseline = differences({"a": values["a"], "b": values["b"], "d": {1: 0.8, 2: 0.79, 3: 0.8}}, baseline="a")
    assert list(verdict(with_baseline, ACCURACY)) == ["Both pairs differ clearly: b is better than a, d than a."]
    losses = MetricInfo("loss", is_mean=True, higher_is_better=False)
    assert list(verdict(with_baseline, losses)) == ["Both pairs differ clearly: a is better than b, a than d."]


def test_pairs_that_differ_by_the_same_amount_in_all_seeds_have_no_interval() -> None:
    values = {"a": {1: 0.5, 2: 0.6, 3: 0.9}, "b": {1: 0.4, 2: 0.5, 3: 0.8}, "c": {1: 0.1, 2: 0.9, 3: 0.5}}
    table = pairs(Comparison("test", ACCURACY, values))
    assert table.shown(table.rows[0])[1:] == ["+10.00", "–", "–", "–", "3 of 3", "–"]
    assert "–" not in table.shown(table.rows[1])
    assert table.csv().splitlines()[1].endswith(",,,,3 of 3,")
    assert table.note.startswith(
        "Of 3 pairs, none differs clearly: no interval excludes zero. In a − b, all seeds differ by the same amount"
    )


def test_pairs_with_the_same_numbers_are_not_said_to_differ() -> None:
    values = {"a": {1: 0.5, 2: 0.6, 3: 0.9}, "b": {1: 0.5, 2: 0.6, 3: 0.9}, "c": {1: 0.1, 2: 0.9, 3: 0.5}}
    note = pairs(Comparison("test", ACCURACY, values)).note
    assert "In a − b, both have the same number in every seed" in note
    assert "vary nothing" not in note
    assert "by the same amount" not in note


def test_a_note_does_not_name_many_pairs_that_are_alike() -> None:
    values = {label: {1: 0.1 * place, 2: 0.1 * place} for place, label in enumerate("abcde")}
    (said,) = verdict(differences(values), ACCURACY)  # "none differs clearly" would read as "they are alike"
    assert said.startswith("In 10 pairs, all seeds differ by the same amount")


def test_what_is_common_to_tables_of_differences_is_said_once(run: RunData) -> None:
    first, after, universal = paired_differences(run)
    assert "one split" in first.note
    assert "Bonferroni" in after.note  # it has three pairs, and the first table one
    assert not any(text in universal.note for text in ("one split", "Bonferroni", "rank test", "Effect sizes"))
    short = next(paired_differences(run, explain=False))
    assert first.note.startswith(f"{short.note} The interval is a paired t interval")


def test_if_all_seeds_share_one_split_every_claim_is_about_these_test_examples() -> None:
    values = {"a": {1: 0.90, 2: 0.91, 3: 0.93}, "b": {1: 0.5, 2: 0.5, 3: 0.51}}
    note = pairs(Comparison("test", ACCURACY, values, one_split=True)).note
    assert note.startswith("On these test examples, a is better than b: its accuracy is 41 points higher")
    assert "clearly better" not in note
    other = pairs(Comparison("test", ACCURACY, values)).note
    assert "a is clearly better than b" in other
    assert "test examples" not in other
    several = differences({**values, "c": {1: 0.5, 2: 0.52, 3: 0.5}})
    assert next(verdict(several, ACCURACY, one_split=True)).startswith(
        "Of 3 pairs, 2 differ clearly on these test examples: a is better than b"
    )


@pytest.mark.parametrize(
    ("metric", "algorithms", "note"),
    [
        ("accuracy", "abc", "accuracy in percentage points@95\\,\\% paired t, corrected for 3 pairs (Bonferroni)."),
        ("loss", "ab", "loss@95\\,\\% paired t."),
    ],
)
def test_differences_have_a_short_note_in_a_paper(metric: str, algorithms: str, note: str) -> None:
    values = {label: {1: 0.9, 2: 0.1 * number} for number, label in enumerate(algorithms)}
    table = pairs(Comparison("test", MetricInfo(metric, True, True), values))
    sentences = "Differences of " + note.replace("@", " over the same seeds. Intervals: ")
    assert f"\\footnotesize {sentences}}}" in table.latex()
    assert table.note in table.markdown()
    one_seed = pairs(Comparison("test", ACCURACY, {"a": {1: 0.9}, "b": {1: 0.1}}))
    assert one_seed.note in one_seed.latex()


@pytest.mark.parametrize(("metric", "high"), [("accuracy", "+431.19 points"), ("auroc", "+4.312"), ("loss", "+4.312")])
def test_an_interval_is_never_cut_and_a_note_says_where_it_is_beyond_what_is_possible(metric: str, high: str) -> None:
    info = MetricInfo(metric, True, metric != "loss")
    values = {"a": {1: 0.9, 2: 0.3}, "b": {1: 0.1, 2: 0.1}}  # 0.5 ± 12.7 · 0.3
    table = pairs(Comparison("test", info, values))
    (row,) = table.rows
    assert row[2:4] == pytest.approx((-3.312, 4.312), abs=1e-3)
    assert ("it is not cut" in table.note) == info.share
    assert f" to {high}, 2 seeds" in " ".join(verdict(differences(values), info))


def test_a_mean_and_its_half_have_the_same_decimals() -> None:
    shown = _shown(spread([0.4018, 0.4022]), MetricInfo("auroc", False, True))
    assert shown == "0.4020 ± 0.0025"
    assert _shown(spread([0.40, 0.41]), ACCURACY) == "40.50 % ± 6.35"


def test_other_metrics_have_differences_too_in_one_table_each(run: RunData) -> None:
    with_another = replace(run, metrics={**run.metrics, "f1": MetricInfo("f1", False, True)})
    both = {table.name for table in paired_differences(with_another)}
    assert both == {table.name for table in paired_differences(run)}  # it was never measured
    second = MetricInfo("loss", True, False)
    swapped = replace(run, metrics={"loss": second, "accuracy": run.metrics["accuracy"]})
    found = {table.name: table for table in paired_differences(swapped)}
    assert "loss" in found["differences"].title
    assert "accuracy" in found["differences_accuracy"].title
    assert "differences_loss" not in {table.name for table in paired_differences(run)}


def test_what_a_target_costs_is_counted_until_the_round_that_reaches_it(run: RunData) -> None:
    first = target_costs(run, "fedavg", "accuracy", target=0.0)[0]
    costs = run.costs("fedavg", 1)
    assert first == (1, 1.0, costs.bytes_so_far[0], costs.seconds[0])
    assert target_costs(run, "fedavg", "accuracy", target=2.0) == [None, None]
    assert target_costs(run, "local", "accuracy", target=0.0) == []  # it has no curve


def test_the_pooled_baseline_sends_nothing(run: RunData) -> None:
    rows = {row[0]: row for row in named(run, "traffic").rows}
    assert rows["pooled"][2:4] == (None, None)
    sent = [float(run.costs("fedavg", seed).bytes_up.sum()) for seed in (1, 2)]
    assert rows["fedavg"][1:3] == (5.0, statistics.fmean(sent))


def test_bytes_are_called_compressed_if_they_are(run: RunData, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "numbers, uncompressed." in named(run, "traffic").note
    monkeypatch.setitem(run.facts, "description", {**run.description, "compress": {"up": {"name": "topk"}}})
    assert "numbers, as [compress] makes them smaller." in named(run, "traffic").note


def test_the_comparison_is_over_seeds_and_pairs_share_them(run: RunData) -> None:
    measured = ("after local training, universal test (drawn clients)", "local")
    (row,) = (row for row in named(run, "comparison_accuracy").rows if row[:2] == measured)
    values = [cell.final["universal_accuracy"] for cell in run.result.runs if cell.algorithm == "local"]
    assert row[2:4] == (pytest.approx(statistics.fmean(values)), pytest.approx(statistics.stdev(values)))
    assert row[6] == 2
    pairs = named(run, "differences")
    assert [row[0] for row in pairs.rows] == ["fedavg − pooled"]  # what has no global model is not on the server
    assert pairs.columns[-1] == "corrected p"  # two seeds: no rank test
    assert "interval" in pairs.note


def test_targets_are_about_the_monotone_curve(run: RunData) -> None:
    table = named(run, "target_accuracy")
    for row in table.rows:
        reached = [
            curve_numbers.reached(*headline.curve(run, str(row[0]), seed, "accuracy"), target=0.5) for seed in (1, 2)
        ]
        if None not in reached:
            assert row[2] == pytest.approx(statistics.fmean(r.round for r in reached if r))
            assert row[3] <= row[2]  # type: ignore[operator]


def test_the_note_of_an_overview_is_about_the_columns_that_it_has() -> None:

    def note(**ways: list[float]) -> str:
        values = {key: {"fedavg": dict(enumerate(seeds))} for key, seeds in ways.items()}
        return _overview_note([Comparison(key, ACCURACY, one) for key, one in values.items()])

    on_server = note(server_test=[0.5, 0.6, 0.7])
    assert "Mean over 3 seeds ± half the width" in on_server
    assert not any(word in on_server for word in ("Own test", "After local training", "reach beyond"))
    at_clients = note(test=[0.5, 0.6, 0.7], post_fit_test=[0.5, 0.6, 0.7])
    assert "“Own test” is the mean over clients" in at_clients
    assert "“After local training” is measured before" in at_clients
    assert "After local training" not in note(test=[0.5, 0.6, 0.7])
    assert "An interval may reach beyond the smallest or largest" in note(test=[0.9, 0.97, 1.0])


def test_a_speed_up_in_rounds_is_not_taken_for_one_in_time(run: RunData) -> None:
    table = named(run, "target_accuracy")
    columns = list(zip(*table.rows, strict=True))
    first, ratios = (columns[table.columns.index(name)] for name in ("first round", "speed-up in rounds"))
    most = max(rounds for rounds in first if rounds)  # type: ignore[type-var]
    assert ratios == tuple(rounds and most / rounds for rounds in first)  # type: ignore[operator]
    assert "about rounds, not about time" in table.note


def test_the_table_names_the_rounds_that_it_averages(run: RunData) -> None:
    (table,) = fairness(run)
    curves = [curve for label in run.labels for curve in headline.curves(run, label, run.main_metric).values()]
    measured = max(len(values) for _, values in curves)
    assert 1 < measured < 10
    assert f"last {measured} rounds" in table.columns
    assert f"the last {measured} rounds that were measured" in table.note
