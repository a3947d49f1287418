"""Every client's gain or loss against learning alone, in numbers that are computed here once more."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedloom.results import report
from fedloom.results.against_alone import Gain, against_alone, gains, learning_alone
from fedloom.results.badly_served import badly_served
from fedloom.results.run_data import RunData
from fedloom.results.table import Table
from tests.results.conftest import TESTED, Made
from tests.results.test_client_tables import with_data_of_every_seed


def only(run: RunData) -> Table:
    (found,) = against_alone(run)
    return found


FAR = statistics.NormalDist().inv_cdf(0.995)  # one of five clients by chance in 5 of 100 comparisons
ALONE = [(0.9, 0.9), (1.0, 1.0), (0.8, 0.8), (0.5, 0.5), (0.95, 0.95)]
SHARED = [(0.99, 0.97), (0.0, 0.0), (0.9, 0.7), (0.5, 0.5), (0.2, 0.3)]


def test_each_difference_and_its_chance_are_those_computed_by_hand(made: Made) -> None:
    run = made(fedavg=SHARED, alone=ALONE)
    assert learning_alone(run) == ["alone"]
    found = gains(run, "fedavg", "alone", "accuracy")
    right = {0: 0.94, 1: 0.5, 2: 0.8, 4: 0.6}  # of both models, the mean over seeds
    by_seed = {0: (0.09, 0.07), 1: (-1.0, -1.0), 2: (0.1, -0.1), 4: (-0.75, -0.65)}
    assert found.keys() == right.keys()
    for client, gain in found.items():
        tested = [*TESTED.values()][client]
        assert gain.mean == pytest.approx(statistics.fmean(by_seed[client]))
        examples = 2 * right[client] * (1 - right[client]) / tested
        assert gain.chance == pytest.approx(FAR * math.sqrt(examples + statistics.stdev(by_seed[client]) ** 2 / 2))
    assert [client for client, gain in found.items() if gain.told_apart] == [1, 4]


def test_the_table_has_every_client_and_a_sentence_counts_them(made: Made) -> None:
    run = made(fedavg=SHARED, alone=ALONE)
    table = only(run)
    assert table.title == "Against learning alone: accuracy, final model (percentage points)"
    assert table.columns == ("client", "test examples", "fedavg", "told apart")
    assert [table.shown(row) for row in table.rows] == [
        ["anna", "100", "+8.00", ""],
        ["ben", "9", "−100.00", "fedavg (worse)"],
        ["chloe", "100", "+0.00", ""],
        ["dora", "0", "–", ""],
        ["eve", "40", "−70.00", "fedavg (worse)"],
    ]
    said = (
        "fedavg: better than alone for 0 of 5 clients, worse for 2 (ben, eve), not told apart for 3 (with 0 to 100 "
        "test examples, it takes a difference of about 9 to 30 points to tell one apart)."
    )
    assert table.findings == (said,)
    assert table.note.startswith("The table has differences from alone, of the final model")
    assert "more than 2.6 standard deviations of what other test examples and other seeds would" in table.note
    assert "the mean over seeds" in table.note
    page = report.html(run, [], [table])
    assert page.count(f"<li>{said}</li>") == 1
    assert f"- {said}\n" in table.markdown()
    assert "worse for 2 (ben, eve)" in table.latex()
    assert "tables/against_alone.csv" in page


def test_the_sentence_says_what_difference_the_rule_could_find(made: Made) -> None:
    """All gain 10 to 20 points and none is told apart: with 5 to 12 test examples, that would take far more."""
    run = made(fedavg=[(0.7, 0.7)] * 5, alone=[(0.6, 0.6), (0.5, 0.5), (0.6, 0.6), (0, 0), (0.55, 0.55)])
    sizes = [12, 5, 10, 0, 12]
    run = replace(run, clients=tuple({**one, "test": size} for one, size in zip(run.clients, sizes, strict=True)))
    chances = [gain.chance for gain in gains(run, "fedavg", "alone", "accuracy").values()]
    assert min(map(float, filter(None, chances))) == pytest.approx(FAR * math.sqrt(2 * 0.65 * 0.35 / 12))
    (said, *_) = only(run).findings
    assert said == (
        "fedavg: better than alone for 0 of 5 clients, worse for 0, not told apart for 5 (with 0 to 12 test examples, "
        "it takes a difference of about 50 to 80 points to tell one apart)."
    )


def test_no_difference_is_asked_for_that_cannot_be(made: Made) -> None:
    run = made(fedavg=[(0.6, 0.6)] * 5, alone=[(0.5, 0.5)] * 5)
    for sizes, said in (([1] * 5, "a larger difference than is possible"), ([100, 1, 1, 1, 1], "18 points or more")):
        tested = tuple({**one, "test": size} for one, size in zip(run.clients, sizes, strict=True))
        assert f"{said} to tell one apart)." in only(replace(run, clients=tested)).findings[0]


def test_those_who_lose_are_named_the_worst_first(made: Made) -> None:
    shared = [(0.3, 0.3), (0.9, 0.9), (0.2, 0.2), (0, 0), (0.9, 0.9)]
    alone = [(0.9, 0.9), (0.9, 0.9), (0.9, 0.9), (0, 0), (0.2, 0.2)]
    (said,) = only(made(fedavg=shared, alone=alone)).findings
    assert "better than alone for 1 of 5 clients, worse for 2 (chloe, anna), not told apart for 2 (with 0 to 9 " in said


def test_of_a_metric_where_lower_is_better_less_is_a_gain_that_nothing_tells_apart(made: Made) -> None:
    table = only(made("rmse", fedavg=[(1.0, 2.0)] * 5, alone=[(3.5, 3.5)] * 5))
    assert [row[2] for row in table.rows] == [2.0, 2.0, 2.0, None, 2.0]
    assert table.title == "Against learning alone: rmse, final model"
    assert "not told apart for 5 (with 0 to 100 test examples)." in table.findings[0]
    assert "it is not known how much few test examples change a client's rmse" in table.note


def test_absolute_errors_are_told_apart_by_their_own_size(made: Made) -> None:
    run = made("mae", fedavg=[(1.0, 1.0), (1.0, 1.0), (2.0, 2.0), (1.0, 1.0), (9.0, 9.0)], alone=[(2.0, 2.0)] * 5)
    found = gains(run, "fedavg", "alone", "mae")
    sizes = {0: (1, 100), 1: (1, 9), 2: (2, 100), 4: (9, 40)}  # of fedavg's errors, and how many there are
    assert {client: gain.mean for client, gain in found.items()} == {0: 1.0, 1: 1.0, 2: 0.0, 4: -7.0}
    for client, (size, tested) in sizes.items():
        assert found[client].chance == pytest.approx(FAR * math.sqrt((size**2 + 2**2) / tested))
    assert [client for client, gain in found.items() if gain.told_apart] == [0, 4]
    assert "by sizes that vary as much as their mean" in only(run).note
    assert [one.client for one in badly_served(run)["fedavg"]] == [4]


def test_precision_and_recall_over_thresholds_rest_on_the_rarer_class(made: Made) -> None:
    run = made("auprc", fedavg=[(0.2, 0.2)] * 5, alone=[(0.8, 0.8)] * 5)
    found = gains(replace(run, facts={**run.facts, "labels": None}), "fedavg", "alone", "auprc")
    assert found[0].chance == pytest.approx(FAR * math.sqrt(2 * 0.25 / 20))  # a fifth of 100 test examples


def test_two_aurocs_vary_more_than_one(made: Made) -> None:
    run = made("auroc", fedavg=[(0.2, 0.2)] * 5, alone=[(0.8, 0.8)] * 5)
    counts: Mapping[str, Any] = {"classes": ["a", "b"], "counts": [[50, 50]] * 4 + [[20, 20]]}
    run = RunData(run.folder, run.cells, run.metrics, run.clients, {**run.facts, "labels": counts})
    found = gains(run, "fedavg", "alone", "auroc")
    assert found[4].chance == pytest.approx(FAR * math.sqrt(2 * 41 / (12 * 20 * 20)))  # Mann and Whitney's U, twice
    assert [client for client, gain in found.items() if gain.told_apart] == [0, 2, 4]
    assert "would change of two auroc values" in only(run).note


def test_harm_that_only_another_metric_shows_is_said_too(comparison: Path) -> None:
    run = RunData.read(comparison)
    by_name = {"accuracy": {0: Gain(-0.1, 0.2)}, "auroc": {0: Gain(-0.5, 0.2), 1: Gain(0.5, 0.2)}}
    run = replace(run, metrics={name: replace(run.metrics["accuracy"], name=name) for name in by_name})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedloom.results.against_alone.gains", lambda run, label, alone, metric: by_name[metric])
        (table,) = against_alone(run)
    assert "worse for 0, not told apart for 4" in table.findings[0]
    assert f"By auroc, fedavg is also worse than alone for {run.client_name(0)}." in table.findings


def test_seeds_that_disagree_tell_nothing_apart(made: Made) -> None:
    shared = [(0.6, 0.9), *SHARED[1:]]
    assert not gains(made(fedavg=shared, alone=[(1.0, 1.0), *ALONE[1:]]), "fedavg", "alone", "accuracy")[0].told_apart


def test_among_many_clients_more_is_needed(made: Made) -> None:
    run = made(fedavg=SHARED, alone=ALONE)
    many = RunData(run.folder, run.cells, run.metrics, run.clients * 20, run.facts)
    few, more = (gains(one, "fedavg", "alone", "accuracy")[4].chance for one in (run, many))
    assert few is not None
    assert more == pytest.approx(few / FAR * statistics.NormalDist().inv_cdf(1 - 0.025 / 100))


@pytest.mark.parametrize(("of_nine", "named"), [(0.0, [4, 1]), (0.6, [4])])
def test_a_client_is_called_badly_served_for_its_own_model_only_if_it_is_told_apart(
    made: Made, of_nine: float, named: list[int]
) -> None:
    run = made(fedavg=[SHARED[0], (of_nine, of_nine), *SHARED[2:]], alone=ALONE)
    run = RunData(run.folder, run.cells, run.metrics, run.clients, {**run.facts, "labels": None})  # no guess is known
    assert [one.client for one in badly_served(run)["fedavg"]] == named


def test_clients_of_other_seeds_are_not_averaged(comparison: Path, tmp_path: Path) -> None:
    run = with_data_of_every_seed(comparison, tmp_path / "run", {"partition": {"name": "iid"}, "clients": 4})
    table = only(run)
    one, own = (run.client_values(label, 1, "final", "accuracy").values for label in ("fedavg", "local"))
    assert [row[2] for row in table.rows] == pytest.approx((one - own).tolist())
    assert "fedavg in seed 1: better than alone for" in table.findings[0]
    assert "single clients are those of seed 1" in table.note
    assert "the mean over seeds" not in table.note
    assert "of what other test examples would change" in table.note  # one seed says nothing about others


def test_only_a_run_in_which_somebody_learns_alone_has_the_table(made: Made, drawn: Path) -> None:
    run = made(fedavg=SHARED, alone=ALONE)
    assert not [*against_alone(RunData.read(drawn))]
    assert not [*against_alone(run.of_algorithms(["alone"]))]
    running = {cell: {**row, "status": "running"} for cell, row in run.cells.items() if cell[1] == 2}
    first = RunData(run.folder, {**run.cells, **running}, run.metrics, run.clients, run.facts)
    assert [row[2] for row in only(first).rows] == pytest.approx([0.09, -1.0, 0.1, None, -0.75])
    untrained = RunData(run.folder, run.cells, run.metrics, run.clients, {**run.facts, "rounds": 0})
    assert not [*against_alone(untrained)]


def test_a_large_loss_that_few_test_examples_cannot_settle_is_named(made: Made) -> None:
    """Ben has 4 of 9 right where alone he has 8: two standard errors of the difference, which is 22 points."""
    own, shared = [(0.9, 0.9)] * 5, [(0.9, 0.9), (4 / 9, 4 / 9), (0.9, 0.9), (0.9, 0.9), (0.85, 0.85)]
    own[1] = (8 / 9, 8 / 9)
    counted, unsettled = only(made(fedavg=shared, alone=own)).findings
    assert "worse for 0, not told apart for 5" in counted
    assert unsettled == (
        "Large, but too few test examples to be sure: fedavg is worse for ben (44.44 %, alone 88.89 %, 9 test "
        "examples)."
    )
