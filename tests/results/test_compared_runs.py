"""Several runs as one: their numbers, and what is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedloom as fl
from fedloom.errors import InputError, StoreError
from fedloom.experiment.store import Store
from fedloom.results import figures, tables
from fedloom.results.compared_runs import ComparedRuns, cautions, combine, what_differs
from fedloom.results.comparisons import Comparison
from fedloom.results.report import _against_others, result_in_words
from fedloom.results.run_data import RunData
from fedloom.results.run_values import MetricInfo
from tests.conftest import Dense, federation

Change = Callable[[Store], None]


@pytest.fixture
def copy(comparison: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(comparison, tmp_path / "other"))


@pytest.fixture
def other(copy: Path) -> Path:
    """The same numbers, from other weights."""
    with Store(copy) as store:
        sql("UPDATE cells SET weights_sha256 = 'other ' || weights_sha256")(store)
    return copy


def change(folder: Path, fact: str, **values: Any) -> None:
    with Store(folder) as store:
        store.set_fact(fact, {**store.fact(fact), **values})


def test_every_algorithm_keeps_the_numbers_of_its_run(comparison: Path, other: Path) -> None:
    alone, both = RunData.read(comparison), combine([comparison, other])
    assert both.labels == tuple(f"{label} ({run})" for run in ("small", "other") for label in alone.labels)
    assert both.name == "small and other"
    (wanted, *_), (found, *_) = tables.comparison(alone), tables.comparison(both)
    for row in wanted.rows:
        for run in ("small", "other"):
            (same,) = [each for each in found.rows if each[:2] == (row[0], f"{row[1]} ({run})")]
            assert same[2:] == row[2:]
    assert both.is_pooled("pooled (other)")
    assert both.costs("local (small)", 2).rounds.tolist() == alone.costs("local", 2).rounds.tolist()
    (differences,) = [table for table in tables.paired_differences(both) if table.name == "differences"]
    same = dict(zip(differences.columns, differences.rows[1], strict=False))
    assert (same["pair"], same["difference"]) == ("fedavg (small) − fedavg (other)", 0.0)
    assert "fedavg (small) − fedavg (other), " in differences.note  # no interval: see the sentence about these pairs
    assert {figure.name for figure in figures.draw_comparison(both)} == {
        *("headline", "comparison", "global_model", "bytes")
    }


def test_values_of_clients_are_read_from_the_run_of_an_algorithm(comparison: Path, other: Path) -> None:
    both = combine([comparison, other])
    with Store(other) as store:
        sql("UPDATE client_metrics SET value = value + 7")(store)
    here, there = (both._stored_values(f"local ({run})", 1, "post_fit", "loss", "test") for run in ("small", "other"))
    assert there.values == pytest.approx(here.values + 7)


def test_the_same_result_in_two_runs_counts_once(comparison: Path, copy: Path) -> None:
    with Store(copy) as store:
        sql("UPDATE cells SET weights_sha256 = 'other' WHERE label = 'fedavg' AND seed = 2")(store)
    both = combine([comparison, copy])
    assert both.labels == ("fedavg (small)", "local", "pooled", "fedavg (other)")
    (differences,) = [table for table in tables.paired_differences(both) if table.name == "differences"]
    assert len(differences.rows) == 3  # pairs of fedavg, fedavg and pooled; the server measures no local models
    assert what_differs(both)[0] == (
        f"local is the same in {comparison} and {copy}, with the same weights: it counts once."
    )


def test_of_two_equal_results_the_one_with_more_seeds_is_kept(comparison: Path, copy: Path) -> None:
    with Store(copy) as store:
        sql("UPDATE cells SET status = 'stopped' WHERE label = 'fedavg' AND seed = 2")(store)
    for folders in ([comparison, copy], [copy, comparison]):
        both = combine(folders)
        assert [cell.seed for cell in both.result.runs if cell.algorithm == "fedavg" and cell.status == "done"] == [
            1,
            2,
        ]


def test_equal_weights_that_were_measured_in_another_way_stay_two_results(comparison: Path, copy: Path) -> None:
    with Store(copy) as store:
        sql("UPDATE client_metrics SET value = value / 2 WHERE phase = 'post_fit'")(store)
    assert "fedavg (other)" in combine([comparison, copy]).labels


def test_an_algorithm_that_only_one_run_has_keeps_its_name(comparison: Path, other: Path) -> None:
    with Store(other) as store:
        store._database.execute("UPDATE cells SET label = 'scaffold' WHERE label = 'local'")
    found = combine([comparison, other]).labels
    assert found == ("fedavg (small)", "local", "pooled (small)", "fedavg (other)", "scaffold", "pooled (other)")


def test_runs_with_the_same_name_are_told_apart_by_their_folders(comparison: Path, tmp_path: Path) -> None:
    folders = [Path(shutil.copytree(comparison, tmp_path / place / "small")) for place in ("monday", "tuesday")]
    with Store(folders[1]) as store:
        sql("UPDATE cells SET weights_sha256 = 'other'")(store)
    assert combine(folders).labels[::3] == ("fedavg (monday/small)", "fedavg (tuesday/small)")


def data_of(seed: int) -> Change:
    return lambda store: store.set_fact(f"data of seed {seed}", "other data")


def without_end(store: Store) -> None:
    for cell in store.cells():
        store.set_status(cell["id"], "stopped")


def sql(statement: str) -> Change:
    return lambda store: store._database.execute(statement) and None


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (data_of(2), r"examples, partitions or splits differ.*or see both with `fedloom watch .*other`\."),
        (without_end, "other has no finished cell: it is stopped"),
        (sql("UPDATE cells SET seed = seed + 10"), "no finished seed in common: 1, 2 and 11, 12"),
        (sql("UPDATE metrics SET metric = metric || '2'"), "no metric in common: accuracy, loss and accuracy2, loss2"),
    ],
)
def test_what_is_not_comparable_is_refused_with_the_reason(
    comparison: Path, other: Path, changed: Change, reason: str
) -> None:
    with Store(other) as store:
        changed(store)
    with pytest.raises(InputError, match=reason):
        combine([comparison, other])


def test_runs_on_the_same_data_keep_the_numbers_of_clients(comparison: Path, other: Path) -> None:
    both = combine([comparison, other])
    assert not both.other_clients
    assert not any("own tests are left out" in text for text in cautions(both))


def with_other_clients(folder: Path, *, test: str) -> None:
    """A run on other data of clients, whose global models have these test examples."""
    with Store(folder) as store:
        for seed in (1, 2):
            store.set_fact(f"data of seed {seed}", f"clients of {folder.name}")
            store.set_fact(f"test of seed {seed}", test)


def test_runs_with_other_clients_are_compared_by_global_models_on_the_same_test(
    comparison: Path, other: Path, tmp_path: Path
) -> None:
    even = Path(shutil.copytree(comparison, tmp_path / "even"))
    with_other_clients(even, test="the same")
    with_other_clients(other, test="the same")
    both = combine([even, other])
    (overview,) = (table for table in tables.overview(both) if table.name == "overview_accuracy")
    assert overview.columns == ("algorithm", "global model, all clients' tests")
    assert [row[0] for row in overview.rows] == ["fedavg (even)", "pooled (even)", "fedavg (other)", "pooled (other)"]
    assert "own tests are left out" in next(cautions(both))
    assert not len(both.client_values("fedavg (even)", 1, "final", "accuracy"))
    assert not len(both.pooled_values("fedavg (even)", 1, "final", "accuracy")[0])
    assert {figure.name for figure in figures.draw_comparison(both)} == {
        "headline",
        "comparison",
        "global_model",
        "bytes",
    }


@pytest.mark.parametrize(("measured", "test"), [(True, "another"), (False, "the same")])
def test_runs_with_other_clients_and_no_common_test_are_refused(
    comparison: Path, other: Path, tmp_path: Path, measured: bool, test: str
) -> None:
    even = Path(shutil.copytree(comparison, tmp_path / "even"))
    with_other_clients(even, test="the same")
    with_other_clients(other, test=test)
    with Store(other) as store:
        sql("DELETE FROM server_metrics" if not measured else "SELECT 1")(store)
    with pytest.raises(InputError, match="global models are not tested on the same examples"):
        combine([even, other])


@pytest.mark.parametrize(("key", "value"), [("headline", "best"), ("clients", "cohort")])
def test_numbers_about_other_rounds_or_clients_are_not_compared(
    comparison: Path, other: Path, key: str, value: str
) -> None:
    with Store(other) as store:
        described = store.fact("description")
        store.set_fact("description", {**described, "evaluate": {**described["evaluate"], key: value}})
    with pytest.raises(InputError, match=rf"evaluate.{key} is \w+ and {value}"):
        combine([comparison, other])


def test_a_seed_that_has_not_finished_does_not_count_as_other_data(comparison: Path, other: Path) -> None:
    with Store(other) as store:
        data_of(2)(store)
        for cell in (cell for cell in store.cells() if cell["seed"] == 2):
            store.set_status(cell["id"], "stopped")
    assert len(combine([comparison, other]).labels) == 6


def test_a_run_is_named_once_to_compare_its_own_algorithms(comparison: Path, tmp_path: Path) -> None:
    alone = combine([comparison])
    assert alone.labels == RunData.read(comparison).labels
    by_loss = next(tables.paired_differences(alone.only("loss")))
    assert "loss" in by_loss.title
    assert by_loss.rows != next(tables.paired_differences(alone)).rows
    assert what_differs(alone) == []
    with pytest.raises(InputError, match="named twice"):
        combine([comparison, comparison.parent / "." / comparison.name])
    with pytest.raises(StoreError, match="not a run folder"):
        combine([comparison, tmp_path])


def test_last_rounds_of_runs_that_are_measured_in_other_rounds_are_not_compared(
    comparison: Path, other: Path, tmp_path: Path
) -> None:
    change(other, "description", evaluate={"every": 3})
    combine([comparison, other])  # the final rounds are the same
    often = shutil.copytree(comparison, tmp_path / "often")
    for folder, every in ((often, 1), (other, 3)):
        change(folder, "description", evaluate={"every": every, "headline": "last:2"})
    with pytest.raises(InputError, match=r"last:2, is about different rounds: evaluate\.every is 1 and 3"):
        combine([often, other])


def test_what_differs_is_listed(comparison: Path, other: Path) -> None:
    assert what_differs(combine([comparison, other])) == []
    change(other, "description", cohort={"count": 4})
    found = what_differs(combine([comparison, other]))
    assert any("cohort.count: 3 → 4" in line for line in found)
    assert "after local training are about the clients that each run drew" in found[-1]


def test_files_that_an_earlier_version_did_not_record_are_no_difference(
    comparison: Path, other: Path, tmp_path: Path
) -> None:
    change(other, "description", files={"note.txt": "a1" * 32})
    assert what_differs(combine([comparison, other])) == []  # the first has no table of files
    first = Path(shutil.copytree(comparison, tmp_path / "first"))
    change(first, "description", files={})
    assert what_differs(combine([first, other])) == [f"{first} → {other}: the file note.txt is new, or newly named"]


def test_one_metric_can_be_chosen(comparison: Path, other: Path) -> None:
    both = combine([comparison, other])
    assert list(both.only("loss").metrics) == ["loss"]
    assert isinstance(both.only("loss"), ComparedRuns)
    with pytest.raises(InputError, match="Did you mean 'accuracy'"):
        both.only("acuracy")


def test_a_ranking_of_runs_with_other_rounds_and_few_seeds_is_cautioned(comparison: Path, other: Path) -> None:
    run = combine([comparison, other])
    same = list(cautions(run))
    assert same[0].startswith("2 seeds: intervals rest on few numbers")
    with Store(other) as store, store._transaction() as database:
        database.execute("UPDATE cells SET rounds_done = 7")
    longer = list(cautions(combine([comparison, other])))
    assert longer[1:] == same
    assert "also shows which trained longer: 5 rounds: " in longer[0]
    assert "; 7 rounds: " in longer[0]


def test_rows_say_over_how_many_seeds_they_are_if_runs_differ_in_that(comparison: Path, other: Path) -> None:
    with Store(other) as store:
        sql("UPDATE cells SET status = 'stopped' WHERE seed = 2")(store)
    run = combine([comparison, other]).choose(["fedavg"])
    shown = next(tables.overview(run))
    numbers = shown.for_programs
    for table in (shown, numbers):
        assert (table.columns[1], [row[:2] for row in table.rows]) == (
            "seeds",
            [("fedavg (small)", 2), ("fedavg (other)", 1)],
        )
        assert table.note.startswith("Mean over the seeds of each row ±")
    assert len(numbers.columns) == len(numbers.kinds) == len(numbers.rows[0])
    assert "over the seeds of each row" in next(tables.comparison(run)).note
    first = next(result_in_words(run.only("loss")))
    assert ", 2 seeds)" in first or ", 1 seed)" in first
    assert "differences over the seeds that both have" in first
    assert next(cautions(run)).startswith("Few seeds: fedavg (small) (2 seeds), fedavg (other) (1 seed).")
    (sent,) = (figure for figure in figures.draw_comparison(run) if figure.name == "bytes")
    assert sent.caption.endswith("Mean over the seeds of each.")


def test_a_mean_that_is_best_over_other_seeds_is_not_called_above_one_that_wins_in_common_seeds() -> None:
    share = MetricInfo("accuracy", True, True)
    many = {1: 0.30, 2: 0.31, 3: 0.32, 4: 0.99, 5: 0.99, 6: 0.99}
    one = Comparison("test", share, {"a": many, "b": {1: 0.40, 2: 0.411, 3: 0.421}})
    assert list(_against_others("a", ["b"], one)) == ["It is below b (the 95 % interval excludes zero)."]


def test_cautions_about_the_numbers_of_compared_algorithms_are_repeated(comparison: Path, other: Path) -> None:
    with Store(other) as store:
        sql("UPDATE server_metrics SET value = 9 WHERE metric = 'loss' AND round = 5")(store)
        sql("UPDATE server_metrics SET value = 3 WHERE metric = 'loss' AND round < 5")(store)
    run = combine([comparison, other])
    (diverged,) = (text for text in cautions(run) if "may diverge or overfit" in text)
    assert diverged.startswith(
        "fedavg (other), pooled (other) may diverge or overfit: the test loss of the global model ended 3.0 (seed 1), "
    )
    (few,) = (text for text in cautions(run.choose(["fedavg"])) if "may diverge or overfit" in text)
    assert few.startswith("fedavg (other) may")  # the others are not compared


def test_every_caution_about_numbers_names_the_run_of_each_algorithm(
    comparison: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedloom.results.badly_served.MOST_ALGORITHMS", 0)
    monkeypatch.setattr("fedloom.results.badly_served.badly_served", lambda run: {label: [] for label in run.labels})
    found = [text for text in cautions(combine([comparison, other])) if "badly, too" in text]
    assert found == [
        f"fedavg ({name}), local ({name}), pooled ({name}) serve some clients badly, too: see the table of clients."
        for name in ("small", "other")
    ]


def test_few_seeds_in_common_are_cautioned(comparison: Path, other: Path) -> None:
    for folder, seed in ((comparison, 1), (other, 2)):
        copied = Path(shutil.copytree(folder, other.parent / f"without-{seed}"))
        with Store(copied) as store:
            sql(f"UPDATE cells SET status = 'stopped' WHERE label = 'fedavg' AND seed = {seed}")(store)
    run = combine([other.parent / "without-1", other.parent / "without-2"]).choose(["fedavg"])
    assert any("in common: 0 for fedavg (without-1) and fedavg (without-2)" in text for text in cautions(run))


def test_numbers_that_are_equal_in_all_seeds_have_no_interval(comparison: Path, other: Path) -> None:
    with Store(other) as store, store._transaction() as database:
        database.execute("UPDATE server_metrics SET value = 0.99 WHERE metric = 'accuracy'")
    run = combine([comparison, other])
    first = next(result_in_words(run))
    assert ", the same in all 2 seeds)" in first
    (alike,) = (text for text in cautions(run) if text.startswith("The same accuracy in every seed: "))
    assert "fedavg (other), pooled (other)" in alike
    overview = next(tables.overview(run))
    assert {row[0]: row[1] for row in overview.rows}["fedavg (other)"] == "99.00 %"
    assert "Where several seeds have the same number, there is no ±." in overview.note
    assert {row[0]: row[1:3] for row in overview.for_programs.rows}["fedavg (other)"] == (0.99, None)
    full = next(tables.comparison(run))
    (row,) = (
        dict(zip(full.columns, row, strict=True)) for row in full.rows if row[1] == "fedavg (other)" and row[3] == 0
    )
    assert (row["std over seeds"], row["95 % low"], row["95 % high"]) == (0.0, None, None)
    assert "If all seeds have the same number, there is no interval" in full.note


def test_a_metric_that_is_not_the_first_is_cautioned_too_if_it_is_the_same_in_all_seeds(
    comparison: Path, other: Path
) -> None:
    with Store(other) as store, store._transaction() as database:
        database.execute("UPDATE server_metrics SET value = 0.5 WHERE metric = 'loss'")
    said = cautions(combine([comparison, other]))
    (found,) = (text for text in said if text.startswith("The same ") and "fedavg (other)" in text)
    assert "loss in every seed" in found


def test_other_names_of_classes_are_the_reason_that_is_told(comparison: Path, other: Path) -> None:
    with Store(other) as store:
        data_of(2)(store)
        names = store.fact("labels")["classes"]
        store.set_fact("labels", {**store.fact("labels"), "classes": [f"{name}!" for name in names]})
    with pytest.raises(InputError, match=r"differ \(their classes are called a, b, c and a!, b!, c!\)"):
        combine([comparison, other])


def settings_differ(comparison: Path, other: Path, *described: dict[str, Any]) -> list[str]:
    """What differs between two runs with these tables, without the runs' names."""
    first = Path(shutil.copytree(comparison, other.parent / "first", dirs_exist_ok=True))
    for folder, given in zip((first, other), described, strict=True):
        change(folder, "description", **given)
    return [line.partition(": ")[2] for line in what_differs(combine([first, other]))]


def test_what_differs_in_an_algorithms_own_settings_is_listed(comparison: Path, other: Path) -> None:
    names = {"fedavg": {"name": "fedavg"}, "local": {"name": "local"}}
    before = {"train": {"lr": 0.05}, "algorithm": names}
    after = {"train": {"lr": 0.02}, "algorithm": {**names, "local": {"name": "local", "lr": 0.1}, "pooled": {}}}
    assert settings_differ(comparison, other, before, after) == [
        "train.lr: 0.05 → 0.02",
        "algorithm.local.lr: 0.05 → 0.1",
    ]
    # local has its own lr in both runs, so it does not follow [train]
    assert settings_differ(comparison, other, {**after, "train": {"lr": 0.05}}, after) == [
        "train.lr: 0.05 → 0.02",
        "algorithm.local.lr: 0.1 in both",
    ]


SAID = ["fedavg: it shares.", "local: it shares nothing.", "Algorithms weigh clients in different ways, all of them."]


def test_cautions_are_about_the_algorithms_that_are_compared(comparison: Path, other: Path) -> None:
    first = Path(shutil.copytree(comparison, other.parent / "first"))
    for folder in (first, other):
        with Store(folder) as store:
            store.set_fact("cautions about algorithms", SAID)
            store.set_fact("weights of algorithms", {"fedavg": "examples", "local": "uniform"})
    chosen = list(cautions(combine([first, other]).choose(["fedavg"])))
    assert "fedavg: it shares." in chosen
    assert not any("local" in text or "weigh clients" in text for text in chosen)
    (weighed,) = (text for text in cautions(combine([first, other])) if "weigh clients" in text)
    assert '"examples" for fedavg (first), fedavg (other) and "uniform" for local (first), local (other)' in weighed


def test_runs_that_weigh_clients_differently_are_cautioned(comparison: Path, other: Path) -> None:
    first = Path(shutil.copytree(comparison, other.parent / "first"))
    for folder, way in ((first, "examples"), (other, "uniform")):
        with Store(folder) as store:
            store.set_fact("weights of algorithms", {"fedavg": way})
    (weighed,) = (text for text in cautions(combine([first, other])) if "weigh clients" in text)
    assert '"examples" for fedavg (first) and "uniform" for fedavg (other)' in weighed


def test_rounds_that_differ_are_those_of_the_compared_algorithms(comparison: Path, other: Path) -> None:
    with Store(other) as store:
        sql("UPDATE cells SET rounds_done = 99 WHERE label = 'local'")(store)
    run = combine([comparison, other])
    assert any("rounds: " in line for line in what_differs(run))
    assert not any("rounds: " in line for line in what_differs(run.choose(["fedavg"])))


def test_runs_share_one_split_only_if_all_their_seeds_do(comparison: Path, other: Path) -> None:
    assert combine([comparison, other]).has_one_split
    first = Path(shutil.copytree(comparison, other.parent / "first"))
    with Store(first) as store:
        sql("UPDATE cells SET status = 'stopped' WHERE seed = 2")(store)
    with Store(other) as store:  # it has one seed more than the first run, with data of its own
        store.set_fact("data of seed 2", "other data")
    assert not combine([first, other]).has_one_split


def test_settings_of_python_programs_are_compared_too(comparison: Path, other: Path) -> None:
    def described(lr: float) -> dict[str, Any]:
        return {"algorithm": {"fedavg": {"name": "FedAvg", "rule": None, "train": {"lr": lr, "clip": None}}}}

    assert settings_differ(comparison, other, described(0.05), described(0.02)) == ["algorithm.fedavg.lr: 0.05 → 0.02"]
    in_a_file = {"train": {"lr": 0.05}, "algorithm": {"fedavg": {"name": "fedavg"}}}
    assert settings_differ(comparison, other, described(0.02), in_a_file)[1:] == ["algorithm.fedavg.lr: 0.02 → 0.05"]


def test_differences_to_a_baseline_are_corrected_for_fewer_pairs(comparison: Path, other: Path) -> None:
    run = combine([comparison, other])
    every, few = (next(tables.paired_differences(run, base)) for base in (None, "fedavg (small)"))
    assert len(every.rows) == 6
    assert [row[0] for row in few.rows] == [
        f"{label} − fedavg (small)" for label in ("pooled (small)", "fedavg (other)", "pooled (other)")
    ]
    assert "Of 6 pairs" in every.note
    assert "Of 3 pairs" in few.note


def test_algorithms_and_a_baseline_are_chosen_by_name(comparison: Path, other: Path) -> None:
    run = combine([comparison, other])
    assert run.choose(["fedavg"]).labels == ("fedavg (small)", "fedavg (other)")
    assert run.choose(["*(other)", "pooled (small)"]).labels[0] == "pooled (small)"
    assert {cell.algorithm for cell in run.choose(["pooled"]).result.runs} == {"pooled (small)", "pooled (other)"}
    assert run.baseline("pooled (other)") == "pooled (other)"
    with pytest.raises(InputError, match=r"No run has an algorithm 'fedavgg'. Known: fedavg \(small\), "):
        run.choose(["fedavgg"])
    with pytest.raises(InputError, match=r"several algorithms. Choose one .*: fedavg \(small\), fedavg \(other\)"):
        run.baseline("fedavg")
    with pytest.raises(InputError, match=r"local \(small\) has no number for 'accuracy, global model"):
        run.baseline("local (small)")


def test_copies_of_algorithms_that_are_not_chosen_are_not_mentioned(comparison: Path, copy: Path) -> None:
    run = combine([comparison, copy]).choose(["local"])
    assert [line.partition(" is ")[0] for line in what_differs(run)] == ["local"]


def test_programs_with_other_first_seeds_are_not_said_to_have_other_data_or_models(tmp_path: Path) -> None:
    def data(seed: int) -> fl.Federation:
        return federation([20] * 3, seed=seed)

    def task(seed: int) -> fl.Task:
        return fl.Task(Dense, seed=seed)

    for name, seeds, lr in (("three", [1, 2, 3], 0.1), ("two", [2, 3], 0.2)):
        fl.run(data, task, fl.FedAvg(lr=lr), 1, seeds=seeds, backend="serial", out=tmp_path / name)
    lines = what_differs(combine([tmp_path / "three", tmp_path / "two"]))
    assert sum("they begin with seeds 1 and 2, so whether initial weights" in line for line in lines) == 1
    assert not any("has changed" in line for line in lines)
