"""Sweeps: every setting is tried, ranked by validation, and never measured on a test split."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedloom.errors import InputError
from fedloom.experiment.progress import Silent
from fedloom.experiment.store import Store
from fedloom.results.result import Result
from fedloom.results.run_data import RunData
from fedloom.results.run_values import MetricInfo
from fedloom.tuning.search_space import parse_over
from fedloom.tuning.sweep import SweepResult, Trial, sweep

EXPERIMENT = """
rounds = 2
seeds = [1, 2]
[data]
source = "digits"
partition = { name = "iid", clients = 3 }
[train]
batch_size = 64
[evaluate]
splits = ["test"]
universal = true
[algorithm]
fedavg = {}
local = {}
[run]
backend = "serial"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "small.toml").write_text(EXPERIMENT)
    return tmp_path / "small.toml"


def test_a_finished_sweep_says_nothing_of_its_settings_and_keeps_its_dates(file: Path, tmp_path: Path) -> None:
    over, said = parse_over(["train.lr=0.1,0.3"]), list[str]()
    sweep(file, over, out=tmp_path / "s")
    written = tmp_path / "s" / "sweep.json"
    earlier = {**json.loads(written.read_text()), "started": "2026-11-18T01:00:00+00:00"}
    written.write_text(json.dumps(earlier))
    progress = Silent()
    progress.note = said.append  # type: ignore[method-assign]
    assert sweep(file, over, out=tmp_path / "s", progress=progress) is not None
    assert said == []
    assert json.loads(written.read_text()) == earlier


@pytest.mark.slow
def test_pruning_ends_the_worse_half_early_and_says_so(file: Path, tmp_path: Path) -> None:
    file.write_text(EXPERIMENT.replace("rounds = 2", "rounds = 6").replace("local = {}\n", ""))
    over = parse_over(["train.lr=0.0001,0.001,0.1,0.3"])
    calls = iter(range(1000))
    assert sweep(file, over, out=tmp_path / "s", prune=True, should_stop=lambda: next(calls) == 12) is None
    found = sweep(file, over, out=tmp_path / "s", prune=True)
    assert found is not None
    done = {one.setting["train.lr"]: [run.rounds for run in one.result.runs] for one in found.trials if one.result}
    assert done == {0.3: [6, 6], 0.1: [6, 6], 0.001: [2, 2], 0.0001: [2, 2]}
    assert [one.pruned for one in found.trials] == [False, False, True, True]
    rows = found.table().rows
    assert [row[0] for row in rows] == [1, 2, None, None]  # what was measured earlier has no rank
    assert rows[2][-1] == "behind after 2 rounds: not run to the end"
    again = sweep(file, over, out=tmp_path / "s", prune=True)
    assert again is not None
    assert again.json() == found.json()
    whole = sweep(file, over, out=tmp_path / "s")  # and without pruning, the others go on
    assert whole is not None
    assert all(run.rounds == 6 for one in whole.trials if one.result for run in one.result.runs)
    late = sweep(file, over, out=tmp_path / "t")
    assert late is not None
    assert {one.setting["train.lr"]: one.values for one in late.trials} == {
        one.setting["train.lr"]: one.values for one in whole.trials
    }
    assert sweep(file, over, out=tmp_path / "t", prune=True) is not None  # nothing is left to be pruned


def test_a_sweep_ranks_by_validation_lists_all_and_goes_on(file: Path, tmp_path: Path) -> None:
    over = parse_over(["train.lr=0.001,0.3", "train.epochs=1,2"])
    rounds = iter(range(1000))
    assert sweep(file, over, out=tmp_path / "s", should_stop=lambda: next(rounds) == 3) is None
    found = sweep(file, over, out=tmp_path / "s")
    assert found is not None
    assert len(found.trials) == 2 * 2 * 2
    means = [sum(one.values.values()) / 2 for one in found.trials]
    assert means == sorted(means, reverse=True)
    best = found.best()
    assert best is not None
    assert best.setting["train.lr"] == 0.3
    assert "clients' own validation splits" in found.measured  # local has no global model
    folders = sorted((tmp_path / "s" / "settings").glob("*/*"))
    assert len(folders) == 8
    for folder in folders:
        with Store(folder, read_only=True) as store:  # nobody has looked at a test split
            assert {row["split"] for row in store.rows("client_metrics")} == {"validation"}
            assert {row["split"] for row in store.rows("server_metrics")} <= {"validation"}
    value = Result.read(folders[0]).runs[0].final["validation_accuracy"]
    assert any(value in one.values.values() for one in found.trials)
    assert {path.name for path in (tmp_path / "s").iterdir()} >= {"sweep.csv", "sweep.md", "sweep.tex", "sweep.png",
                                                                   "sweep.svg", "sweep.json"}  # fmt: skip
    before = [(path, path.stat().st_mtime_ns) for path in (tmp_path / "s").rglob("state-*")]
    assert sweep(file, over, out=tmp_path / "s") is not None
    assert before == [(path, path.stat().st_mtime_ns) for path, _ in before]  # nothing was run again


def test_a_setting_that_diverges_is_listed_with_its_reason(file: Path, tmp_path: Path) -> None:
    changes = {"seeds": [1], "algorithm": {"fedavg": {}}}
    found = sweep(file, parse_over(["train.lr=1e30,0.1"]), changes=changes, out=tmp_path / "s")
    assert found is not None
    assert [one.setting["train.lr"] for one in found.trials] == [0.1, 1e30]
    assert "loss is" in found.trials[1].error
    assert "One seed" in found.table().note


def test_without_validation_data_nothing_is_ranked(file: Path) -> None:
    with pytest.raises(InputError, match=r"validation .* such as split = \[0\.6, 0\.2, 0\.2\]\.$"):
        sweep(file, {"train.lr": [0.1, 0.2]}, changes={"data.split": [0.8, 0.0, 0.2]})
    with pytest.raises(InputError, match="validation"):
        sweep(file, {"train.lr": [0.1, 0.2]}, changes={"data.split": [0.8, 0.0, 0.2], "data.server": 0.1})
    with pytest.raises(InputError, match="no key 'lrr'"):
        sweep(file, {"train.lrr": [0.1]})


def test_an_algorithm_is_tried_only_with_the_keys_that_change_it(file: Path, tmp_path: Path) -> None:
    file.write_text(EXPERIMENT.replace("local = {}", "fedprox = {}\nlocal = { lr = 0.1 }").replace("[1, 2]", "[1]"))
    over = parse_over(["train.lr=0.1,0.3", "algorithm.fedprox.mu=0.0,0.1"])
    found = sweep(file, over, out=tmp_path / "s")
    assert found is not None
    assert found.unchanged == ("local",)
    tried = sorted((trial.label, str(trial.setting)) for trial in found.trials)
    assert tried == [
        ("fedavg", "{'train.lr': 0.1}"),
        ("fedavg", "{'train.lr': 0.3}"),
        *(
            ("fedprox", str({"train.lr": lr, "algorithm.fedprox.mu": mu}))
            for lr, mu in ((0.1, 0.0), (0.1, 0.1), (0.3, 0.0), (0.3, 0.1))
        ),
    ]
    table = found.table()
    places = [table.columns.index(name) for name in ("rank", "algorithm", "algorithm.fedprox.mu")]
    ranks = {(row[places[1]], row[1 + places[1]], row[places[2]]): row[places[0]] for row in table.rows}
    assert ranks["fedprox", "0.1", "0.0"] == ranks["fedavg", "0.1", None]  # the same algorithm
    assert {*ranks.values()} <= {1, 2, 3, 4, 5, 6}
    assert {row[places[2]] for row in table.rows if row[places[1]] == "fedavg"} == {None}
    assert "do not change it: local" in table.note
    drawn = found.figure()
    assert drawn is not None
    left, right = ([text.get_text() for text in axes.texts] for axes in drawn.figure.axes[:2])
    assert left[0] != left[1]
    assert [len(left), len(right)] == [2, 4]  # FedAvg has no values of mu
    assert [axes.get_xlabel() for axes in drawn.figure.axes[:2]] == ["", "algorithm.fedprox.mu"]


def test_keys_that_matter_only_together_are_kept(file: Path, tmp_path: Path) -> None:
    """beta1 alone is refused with sgd, so it must stay where the optimiser is adam."""
    file.write_text(EXPERIMENT.replace("local = {}\n", "").replace("[1, 2]", "[1]"))
    found = sweep(file, parse_over(["train.optimizer=adam", "train.beta1=0.8,0.9"]), out=tmp_path / "s")
    assert found is not None
    assert [sorted(trial.setting) for trial in found.trials] == [["train.beta1", "train.optimizer"]] * 2


def test_settings_that_change_nothing_are_all_tried(file: Path, tmp_path: Path) -> None:
    file.write_text(EXPERIMENT.replace("local = {}\n", "").replace("[1, 2]", "[1]"))
    found = sweep(file, parse_over(["run.workers=1,2"]), out=tmp_path / "s")
    assert found is not None
    assert len(found.trials) == 2


def personal(file: Path, *, table: str = "") -> None:
    """Ditto, whose global model does not depend on lam; its clients' own models do."""
    text = EXPERIMENT.replace("fedavg = {}\nlocal = {}", "ditto = {}").replace("[1, 2]", "[1]")
    text = text.replace('{ name = "iid", clients = 3 }', '{ name = "affinity", clients = 3, probability = 0.9 }')
    file.write_text(text.replace("[train]", f"{table}\n[train]"))


@pytest.mark.parametrize("table", ["", "server = { test = 0.1, validation = 0.1 }"])
def test_personal_models_are_ranked_by_what_clients_end_with(file: Path, tmp_path: Path, table: str) -> None:
    personal(file, table=table)
    found = sweep(file, parse_over(["algorithm.ditto.lam=100.0,0.001"]), out=tmp_path / "s")
    assert found is not None
    assert found.measured == "the final model on the clients' own validation splits"
    for trial in found.trials:
        assert trial.result is not None
        (cell,) = trial.result.runs
        assert trial.values == {1: cell.final["validation_accuracy"]}
    at_server = {one.result.runs[0].final["server_validation_accuracy"] for one in found.trials if one.result}
    assert len(at_server) == 1
    assert found.trials[0].values != found.trials[1].values


def test_the_headline_of_a_run_is_what_settings_are_ranked_by(file: Path, tmp_path: Path) -> None:
    over = parse_over(["train.lr=0.1,0.3"])
    once = {"seeds": [1], "algorithm": {"fedavg": {}}}
    at_clients = sweep(file, over, changes=once, out=tmp_path / "a")
    at_server = sweep(file, over, changes={**once, "evaluate.server": ["test"]}, out=tmp_path / "b")
    assert at_clients is not None
    assert at_server is not None
    assert "clients' own validation splits" in at_clients.measured
    assert at_server.measured == "the global model on validation data"
    for found, key in ((at_clients, "validation_accuracy"), (at_server, "server_validation_accuracy")):
        assert [one.values for one in found.trials] == [
            {1: one.result.runs[0].final[key]} for one in found.trials if one.result
        ]


def test_pruning_uses_the_same_model_and_keeps_ties(file: Path, tmp_path: Path) -> None:
    personal(file)
    over = parse_over(["algorithm.ditto.lam=100.0,0.001"])
    found = sweep(file, over, changes={"rounds": 3}, out=tmp_path / "s", prune=True)
    assert found is not None
    assert [(one.setting["algorithm.ditto.lam"], one.pruned) for one in found.trials] == [(0.001, False), (100.0, True)]
    tie = sweep(file, parse_over(["run.workers=1,2"]), changes={"rounds": 3}, out=tmp_path / "t", prune=True)
    assert tie is not None
    assert not any(one.pruned for one in tie.trials)


def test_settings_with_the_same_mean_share_a_rank() -> None:
    values: tuple[dict[int, float], ...] = ({1: 0.3, 2: 0.1}, {1: 0.2, 2: 0.2}, {1: 0.1, 2: 0.1}, {})
    tried = tuple(Trial({"x": x}, "a", one) for x, one in enumerate(values))
    found = SweepResult(Path(), MetricInfo("accuracy", True, True), "validation", tried)
    assert [found.rank(one) for one in tried] == [1, 1, 3, None]
    assert found.ties(tried[0]) == [*tried[:2]]
    assert "they share a rank" in found.table().note
    apart = SweepResult(Path(), MetricInfo("accuracy", True, True), "validation", tried[1:])
    assert "share a rank" not in apart.table().note


def test_seeds_that_agree_have_no_interval_without_a_width() -> None:
    tried = (Trial({"x": 1}, "a", {1: 0.5, 2: 0.5}), Trial({"x": 2}, "a", {1: 0.4, 2: 0.5}))
    table = SweepResult(Path(), MetricInfo("accuracy", True, True), "validation", tried).table()
    agree, differ = (dict(zip(table.columns, row, strict=True)) for row in table.rows)
    assert (agree["95 % low"], agree["95 % high"]) == (None, None)
    assert (differ["95 % low"], differ["95 % high"]) == pytest.approx((-0.1853, 1.0853), abs=1e-4)  # it is not cut
    assert "it is not cut" in table.note


@pytest.mark.parametrize(("seeds", "said"), [(1, "One seed: "), (2, "2 seeds: "), (5, "5 seeds: "), (6, "")])
def test_a_ranking_over_few_seeds_has_a_caution(seeds: int, said: str) -> None:
    tried = tuple(Trial({"x": x}, "a", {seed: x / seed for seed in range(1, seeds + 1)}) for x in (2, 1))
    found = SweepResult(Path(), MetricInfo("accuracy", True, True), "validation", tried)
    assert " ".join(found.cautions()).startswith(said)
    assert bool(said) == bool([*found.cautions()]) == ("by chance alone" in found.table().note)
    assert found.json()["cautions"] == [*found.cautions()]


def test_a_metric_where_lower_is_better_is_ranked_so(file: Path, tmp_path: Path) -> None:
    changes = {"seeds": [1], "algorithm": {"fedavg": {}}, "task.metrics": ["perplexity"]}
    found = sweep(file, parse_over(["train.lr=0.0001,0.3"]), changes=changes, out=tmp_path / "s")
    assert found is not None
    assert found.metric.name == "perplexity"
    assert [one.setting["train.lr"] for one in found.trials] == [0.3, 0.0001]


def test_a_key_of_an_algorithm_that_is_not_in_the_file_adds_it(file: Path, tmp_path: Path) -> None:
    over = parse_over(["algorithm.fedprox.mu=0.1,0.2"])
    found = sweep(file, over, changes={"seeds": [1], "rounds": 1}, out=tmp_path / "s")
    assert found is not None
    assert sorted((one.label, one.setting["algorithm.fedprox.mu"]) for one in found.trials) == [
        ("fedprox", 0.1),
        ("fedprox", 0.2),
    ]
    assert found.unchanged == ("fedavg", "local")


def test_a_key_that_one_algorithm_needs_changes_no_other(file: Path, tmp_path: Path) -> None:
    changes = {"seeds": [1], "rounds": 1, "algorithm.mine.weights": "uniform"}
    found = sweep(file, parse_over(["algorithm.mine.name=fedavg,fedprox"]), changes=changes, out=tmp_path / "s")
    assert found is not None
    assert {trial.label for trial in found.trials} == {"mine"}
    assert found.unchanged == ("fedavg", "local")


def test_settings_with_other_algorithms_are_refused(file: Path) -> None:
    with pytest.raises(InputError, match="the same algorithms in all settings"):
        sweep(file, parse_over(["algorithm={fedavg={}},{fedprox={}}"]))


def test_a_sweep_knows_whether_its_settings_spend(file: Path, tmp_path: Path) -> None:
    once: dict[str, Any] = {"rounds": 1, "algorithm": {"fedavg": {"weights": "uniform"}}}
    for privacy, spends in ({}, False), ({"dp": {"noise_multiplier": 1.0, "clip": 1.0}}, True):
        given = {**once, "privacy": privacy}
        found = sweep(file, parse_over(["train.lr=0.1,0.2"]), changes=given, out=tmp_path / str(spends))
        assert found is not None
        assert found.spends == spends


def test_settings_are_ranked_at_the_clients_where_all_have_a_value(file: Path, tmp_path: Path) -> None:
    """A metric of your own may return NaN for some predictions: here, as if at one client of one setting."""
    (tmp_path / "mine.py").write_text(
        "def sure(outputs, labels):\n    return float((outputs.argmax(1) == labels).mean())\n\n\n"
        "sure.higher_is_better = True\n"
    )
    file.write_text(EXPERIMENT.replace("[train]", '[task]\nmetrics = ["mine.py:sure"]\n[train]'))
    over = parse_over(["train.lr=0.3,0.03"])
    found = sweep(file, over, out=tmp_path / "s")
    assert not found.common
    folder = next(trial.result.folder for trial in found.trials if trial.result is not None)
    with Store(folder) as store, store._transaction() as database:
        row = "phase = 'final' AND split = 'validation' AND metric = 'sure' AND client = 1"
        database.execute(f"UPDATE client_metrics SET value = NULL WHERE {row} AND cell = 1")
    found = sweep(file, over, out=tmp_path / "s")
    assert set(found.common.values()) == {2}
    for trial in found.trials:
        assert trial.result is not None
        for seed in found.common:
            known = RunData.read(trial.result.folder).client_values(trial.label, seed, "final", "sure", "validation")
            values = [value for client, value in zip(known.clients, known.values, strict=True) if client != 1]
            assert trial.values[seed] == pytest.approx(sum(values) / 2)
    assert "Settings are ranked by means over the clients at which all have a value: 2 (seed 1)" in found.table().note


def test_settings_without_common_clients_keep_their_own_means(file: Path, tmp_path: Path) -> None:
    """Other partitions have other clients: which of them lack a value is no reason to lose the ranking."""
    file.write_text(EXPERIMENT.replace("[train]", '[task]\nmetrics = ["auroc"]\n[train]').replace("local = {}\n", ""))
    skewed = {"data.partition": {"name": "dirichlet", "clients": 10}, "seeds": [1]}
    found = sweep(file, parse_over(["data.partition.alpha=0.05,0.3,100.0"]), changes=skewed, out=tmp_path / "s")
    assert found is not None
    assert found.common == {1: 0}
    for trial in found.trials:
        assert trial.result is not None
        assert trial.values == {1: trial.result.runs[0].final["validation_auroc"]}
    assert "the mean of each setting is over its own clients with a value" in found.table().note


@pytest.mark.parametrize("key", ["data.normalize=none,federated", "train.lr=0.3,0.03"])
def test_settings_with_few_clients_in_common_keep_their_own_means(key: str, file: Path, tmp_path: Path) -> None:
    file.write_text(EXPERIMENT.replace("[train]", '[task]\nmetrics = ["auroc"]\n[train]').replace("local = {}\n", ""))
    changes, out = {"seeds": [1]}, tmp_path / "s"
    found = sweep(file, parse_over([key]), changes=changes, out=out)
    for place, lacking in enumerate(("client = 0", "client = 1")):
        result = found.trials[place].result if found is not None else None
        assert result is not None
        with Store(result.folder) as store, store._transaction() as database:
            row = f"phase = 'final' AND split = 'validation' AND metric = 'auroc' AND {lacking}"
            database.execute(f"UPDATE client_metrics SET value = NULL WHERE {row}")
    found = sweep(file, parse_over([key]), changes=changes, out=out)
    assert found is not None
    assert found.common == {1: 0}  # one of three
    assert all(1 in trial.values for trial in found.trials)
