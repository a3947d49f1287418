"""Tables hold what the database holds, in every format."""

from __future__ import annotations

import csv
import statistics
from pathlib import Path

import pytest

import fedloom as fl
from fedloom.results import curve_numbers, headline, tables
from fedloom.results.comparisons import at_clients, measures
from fedloom.results.result import Result
from fedloom.results.run_data import RunData
from fedloom.results.summary import table as on_screen
from fedloom.results.table import STATISTICS, Table, show, write
from tests.conftest import Logit, federation, two_classes


@pytest.fixture
def view(comparison: Path) -> RunData:
    return RunData.read(comparison)


def named(view: RunData, name: str) -> Table:
    (found,) = (table for table in tables.all_tables(view) if table.name == name)
    return found


def test_every_table_is_written_three_ways_and_the_csv_can_be_read_back(view: RunData, tmp_path: Path) -> None:
    written = write(tables.all_tables(view), tmp_path)
    names = {path.stem for path in written}
    assert {"summary_accuracy_pre_fit", "summary_loss_post_fit", "universal_test_accuracy"} <= names
    assert {"round_stats_accuracy", "user_stats_loss", "differences", "target_accuracy", "fairness"} <= names
    assert len(written) == 3 * len(names)
    for table in tables.all_tables(view):
        with open(tmp_path / f"{table.name}.csv", newline="") as file:
            head, *body = csv.reader(file)
        assert tuple(head) == table.columns
        assert len(body) == len(table.rows)
        assert all(len(row) == len(table.columns) == len(table.kinds) for row in (*body, *table.rows))
        assert table.note.endswith(".")  # a sentence under every table
        latex = (tmp_path / f"{table.name}.tex").read_text()
        assert latex.count(r"\\") == len(table.rows) + 1
        assert "_" not in latex.replace(r"\_", "")


def test_round_and_user_statistics_are_those_of_the_clients(view: RunData) -> None:
    rows = Result.read(view.folder).rows("clients")

    def values(**wanted: object) -> list[float]:
        return [row["value"] for row in rows if all(row[key] == value for key, value in wanted.items())]

    common = {"algorithm": "fedavg", "phase": "pre_fit", "split": "test", "metric": "accuracy"}
    per_seed = [values(round=3, seed=seed, **common) for seed in (1, 2)]
    expected = [
        statistics.fmean(map(statistics.fmean, per_seed)),
        statistics.fmean(map(statistics.pstdev, per_seed)),
        statistics.fmean(map(min, per_seed)),
        statistics.fmean(map(max, per_seed)),
    ]
    (row,) = (r for r in named(view, "round_stats_accuracy").rows if r[:3] == ("fedavg", "pre_fit", 3))
    assert row[3:] == pytest.approx(expected)
    per_seed = [values(client="client-2", seed=seed, **common) for seed in (1, 2)]
    (row,) = (r for r in named(view, "user_stats_accuracy").rows if r[:3] == ("fedavg", "pre_fit", "client-2"))
    assert row[3] == pytest.approx(statistics.fmean(map(statistics.fmean, per_seed)))
    assert row[6] == pytest.approx(statistics.fmean(map(max, per_seed)))


def test_the_universal_test_has_a_row_for_every_user_and_one_number_for_the_pooled_model(view: RunData) -> None:
    table = named(view, "universal_test_accuracy")
    assert table.columns == ("user", "fedavg", "local", "pooled")
    names = [row[0] for row in table.rows]
    assert names == [f"client-{n}" for n in range(4)] + list(STATISTICS)
    assert all(row[3] is None for row in table.rows if row[0] != "Average")
    (average,) = (row for row in table.rows if row[0] == "Average")
    finals = [run.final["universal_accuracy"] for run in view.result.runs if run.algorithm == "pooled"]
    assert average[3] == pytest.approx(statistics.fmean(finals))
    local = [run.final["universal_accuracy"] for run in view.result.runs if run.algorithm == "local"]
    assert average[2] == pytest.approx(statistics.fmean(local))
    alone = view.client_values("local", 1, "universal", "accuracy")
    assert len(alone) == 3  # those who took part in the last round


def test_every_client_has_a_row_with_what_it_holds_and_how_it_fares(view: RunData) -> None:
    table = named(view, "clients_accuracy")
    assert table.columns == ("client", "train", "validation", "test", "fedavg", "local", "pooled")
    assert [row[:4] for row in table.rows] == [
        ("client-0", 12, 4, 4),
        ("client-1", 9, 3, 3),
        ("client-2", 18, 6, 6),
        ("client-3", 15, 5, 5),
    ]
    finals = [view.client_values("pooled", seed, "final", "accuracy").values[2] for seed in (1, 2)]
    assert table.rows[2][6] == pytest.approx(statistics.fmean(finals))


def test_the_pooled_model_is_measured_at_clients_like_the_others(view: RunData) -> None:
    """After round r it is what clients have before round r + 1; after the last one it is the final model."""
    after = view.client_values("pooled", 1, "post_fit", "accuracy")
    before = view.client_values("pooled", 1, "pre_fit", "accuracy")
    drawn = view.client_values("fedavg", 1, "post_fit", "accuracy")
    assert (after.rounds.tolist(), after.clients.tolist()) == (drawn.rounds.tolist(), drawn.clients.tolist())
    assert len(after) < len(before), "not everybody is drawn"
    known = dict(zip(zip(before.rounds.tolist(), before.clients.tolist(), strict=True), before.values, strict=True))
    for round, client, value in zip(after.rounds.tolist(), after.clients.tolist(), after.values, strict=True):
        assert round == 5 or value == known[round + 1, client]
    final = view.client_values("pooled", 1, "final", "accuracy")
    assert after.last().values.tolist() == final.values[after.last().clients].tolist()


def test_all_columns_of_a_table_are_about_the_same_clients(view: RunData) -> None:
    """After local training: those that were drawn in the last round, the pooled model's column included."""
    expected = []
    for seed in (1, 2):
        drawn = view.client_values("fedavg", seed, "post_fit", "accuracy").last().clients
        assert drawn.tolist() == view.client_values("local", seed, "post_fit", "accuracy").last().clients.tolist()
        expected.append(view.client_values("pooled", seed, "final", "accuracy").values[drawn].mean())
    mean = statistics.fmean(expected)
    summary = named(view, "summary_accuracy_post_fit")
    assert summary.rows[0][summary.columns.index("pooled")] == pytest.approx(mean)
    rows = named(view, "comparison_accuracy").rows
    (row,) = (r for r in rows if r[:2] == ("after local training, own test", "pooled"))
    assert row[2] == pytest.approx(mean)
    screen = on_screen(view.result)
    (column,) = (column for column in screen.columns if column.header == "after training")
    assert list(column.cells)[2] == f"{100 * mean:.2f} %"


def test_where_only_the_cohort_is_measured_the_pooled_model_is_shown_for_it_too(tmp_path: Path) -> None:
    data = two_classes(federation([30, 40, 25, 35], seed=2))
    task = fl.Task(Logit, loss="bce", metrics=["accuracy", "auroc"])
    algorithms = {"fedavg": fl.FedAvg(lr=0.1), "pooled": fl.Pooled(lr=0.1)}
    cohort, evaluate = fl.Sampling(count=2), fl.Evaluation(clients="cohort")
    fl.run(data, task, algorithms, 3, cohort=cohort, evaluate=evaluate, out=tmp_path, backend="serial")
    view = RunData.read(tmp_path)
    for phase in ("pre_fit", "post_fit", "final"):
        ours, theirs = (view.client_values(label, 1, phase, "accuracy") for label in ("pooled", "fedavg"))
        assert len(ours) == len(theirs) > 0
        assert ours.clients.tolist() == theirs.clients.tolist(), phase
    # scores of the drawn clients alone are not known of the pooled model: it has no column where others are about them
    assert {m.key: set(m.values) for m in measures(view, "auroc")} == {
        "pooled_post_fit_test": {"fedavg"},
        "pooled_pre_fit_test": {"fedavg"},
    }
    for run in view.result.runs:
        assert "pooled_test_auroc" in run.final
    assert at_clients(view, "pooled", 1, "pooled_test", "auroc", "final") is None


def test_the_comparison_is_over_seeds_and_pairs_share_them(view: RunData) -> None:
    (row,) = (r for r in named(view, "comparison_accuracy").rows if r[:2] == ("universal test", "local"))
    values = [run.final["universal_accuracy"] for run in view.result.runs if run.algorithm == "local"]
    assert row[2:4] == (pytest.approx(statistics.fmean(values)), pytest.approx(statistics.stdev(values)))
    assert row[6] == 2
    pairs = named(view, "differences")
    assert [row[0] for row in pairs.rows] == ["fedavg − pooled"]  # what has no global model is not on the server
    assert pairs.columns[-1] == "seeds higher"  # two seeds: no p-values
    assert "interval" in pairs.note


def test_targets_are_about_the_monotone_curve(view: RunData) -> None:
    table = named(view, "target_accuracy")
    for row in table.rows:
        reached = [
            curve_numbers.reached(*headline.curve(view, str(row[0]), seed, "accuracy"), target=0.5) for seed in (1, 2)
        ]
        if None not in reached:
            assert row[2] == pytest.approx(statistics.fmean(r.round for r in reached if r))
            assert row[3] <= row[2]  # type: ignore[operator]


def test_milestones() -> None:
    assert curve_numbers.reached([1, 2], [0.1, 0.2], target=0.3) is None
    assert curve_numbers.reached([1, 2], [0.9, 0.2], target=0.3) == curve_numbers.Reached(1, 1.0, 0)
    assert curve_numbers.reached([0, 4], [2.0, 1.0], target=1.25, higher=False) == curve_numbers.Reached(4, 3.0, 1)
    assert curve_numbers.reached([1, 2, 3], [0.1, float("nan"), 0.5], target=0.3).round == 3  # type: ignore[union-attr]
    assert curve_numbers.last_mean([1.0, 2.0, 4.0], 2) == 3.0
    assert curve_numbers.peak([1, 2, 3], [3.0, 1.0, 1.0], higher=False) == (1.0, 2)
    fair = curve_numbers.fairness([0.5] * 19 + [0.1, 0.3])
    assert fair.worst == pytest.approx(0.2)  # two of twenty-one
    assert curve_numbers.fairness([1.0, 2.0], higher=False).worst == 2.0
    assert curve_numbers.fairness([3.0] * 5).jain == pytest.approx(1.0)


def test_values_are_shown_for_people() -> None:
    assert show(float("nan"), "percent") == "–"
    assert show(0.00004, "p") == "< 0.001"
    assert show(-0.012, "points") == "−1.20"
    assert show(12, "bytes") == "12 B"
    spread = Table("t", "T", ("", "a"), (("Average", 0.5), ("Standard deviation", 0.02)), ("text", "percent"), "N.")
    assert spread.shown(spread.rows[0])[1] == "50.00 %"
    assert spread.shown(spread.rows[1])[1] == "2.00"  # points, as the document has it
