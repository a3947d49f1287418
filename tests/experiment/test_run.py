"""Run every algorithm with every seed, and check what comes out."""

from __future__ import annotations

import json
import linecache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedloom as fl
from fedloom import tree, user_code
from fedloom.errors import InputError
from fedloom.experiment.experiment_file import EvaluateTable
from fedloom.results.result import Result
from tests.experiment.small_run import ALGORITHMS, Net, run


class NormedNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.out = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(x))


def test_more_rounds_extend_a_run(federation: fl.Federation, task: fl.Task, tmp_path: Path) -> None:
    whole = run(federation, task, tmp_path / "whole", rounds=5, evaluate=fl.Evaluation(universal=True))
    run(federation, task, tmp_path / "short", rounds=2, evaluate=fl.Evaluation(universal=True))
    longer = run(federation, task, tmp_path / "short", rounds=5, evaluate=fl.Evaluation(universal=True))
    assert longer.weights_sha256 == whole.weights_sha256
    assert [r.final for r in longer.runs] == [r.final for r in whole.runs]
    assert {row["round"] for row in longer.rows("clients") if row["phase"] in ("final", "universal")} == {5}


def test_a_finished_run_is_not_run_again(federation: fl.Federation, task: fl.Task, tmp_path: Path) -> None:
    first = run(federation, task, tmp_path)
    before = first.rows("rounds")
    assert run(federation, task, tmp_path).rows("rounds") == before  # seconds would differ


def test_every_cell_begins_with_the_same_weights_data_and_splits(
    federation: fl.Federation, task: fl.Task, tmp_path: Path
) -> None:
    result = run(federation, task, tmp_path, rounds=1, seeds=[1, 2])
    rows = [row for row in result.rows("clients") if row["phase"] == "pre_fit"]
    per_cell: dict[tuple[str, int], list[tuple[Any, ...]]] = {}
    for row in rows:
        values = (row["client"], row["metric"], row["value"], row["examples"])
        per_cell.setdefault((row["algorithm"], row["seed"]), []).append(values)
    assert len(per_cell) == 2 * len(ALGORITHMS)
    assert all(values == next(iter(per_cell.values())) for values in per_cell.values())


@pytest.mark.parametrize(("rule", "choose"), [("best", max), ("last:2", lambda curve: sum(curve[-2:]) / 2)])
def test_the_headline_is_chosen_as_asked(federation: Any, task: Any, tmp_path: Path, rule: str, choose: Any) -> None:
    result = run(federation, task, tmp_path, algorithms=ALGORITHMS["fedavg"], evaluate=EvaluateTable(headline=rule))
    values: dict[int, list[float]] = {}
    for row in result.rows("clients"):
        if (row["phase"], row["metric"]) == ("post_fit", "accuracy"):
            values.setdefault(row["round"], []).append(row["value"])
    curve = [sum(values[r]) / len(values[r]) for r in sorted(values)]
    assert result.runs[0].headline["post_fit_test_accuracy"] == pytest.approx(choose(curve))
    assert result.json()["headline"] == rule


def test_the_result_is_a_table_a_picture_and_a_model(federation: fl.Federation, task: fl.Task, tmp_path: Path) -> None:
    result = run(federation, task, tmp_path)
    frame = result.frame("clients")
    assert list(frame.columns) == [
        "algorithm",
        "seed",
        "round",
        "client",
        "phase",
        "split",
        "metric",
        "value",
        "examples",
    ]
    assert set(frame["client"]) == {"a", "b", "c", "everyone"}
    assert result.plot("accuracy").stat().st_size > 5_000
    model = result.model("fedavg")
    weights = {name: leaf.detach() for name, leaf in model.named_parameters()}
    assert tree.sha256(weights) == next(r.weights_sha256 for r in result.runs if r.algorithm == "fedavg")
    assert not model.training
    personal = result.model("local", client=1)
    assert not torch.equal(personal.layers[0].weight, result.model("local", client=2).layers[0].weight)  # type: ignore[union-attr]
    with pytest.raises(InputError, match="no run of nothing"):
        result.model("nothing")
    with pytest.raises(InputError, match="no table 'client'"):
        result.rows("client")
    json.dumps(result.json())


def test_every_client_has_a_whole_model_whatever_the_algorithm(federation: fl.Federation, tmp_path: Path) -> None:
    steps = {"lr": 0.2, "batch_size": 5}
    algorithms = {
        "fedavg": fl.FedAvg(**steps),
        "fedbn": fl.FedBN(**steps),
        "fedrep": fl.FedRep(**steps),
        "ditto": fl.Ditto(**steps),
        "peer": fl.Peer(**steps, topology="ring"),
        "ifca": fl.IFCA(**steps),
        "local": fl.LocalOnly(**steps),
    }
    settings = {"algorithms": algorithms, "cohort": fl.Sampling(count=1, sampling="window"), "rounds": 2}
    result = run(federation, fl.Task(NormedNet), tmp_path, **settings)  # so that the last client never takes part
    final = {
        (row["algorithm"], row["client"]): row["value"]
        for row in result.rows("clients")
        if (row["phase"], row["split"], row["metric"]) == ("final", "test", "loss")
    }
    for label in algorithms:
        for number, name in enumerate(("a", "b", "c")):
            rows = federation.indices(number, "test")
            model = result.model(label, client=name)
            loss = nn.functional.cross_entropy(model(federation.x[rows]), federation.y[rows])
            assert loss.item() == pytest.approx(final[label, name], rel=1e-5), (label, name)
            assert tree.sha256(result.weights(label, client=number)[f"client-{number}"]) == tree.sha256(
                dict(model.state_dict())
            )
    assert result.personal() == ["fedbn", "fedrep", "ditto"]
    with pytest.raises(InputError, match=r"no client 'aa'. Known: a, b, c. Did you mean 'a'"):
        result.model("ditto", client="aa")
    with pytest.raises(InputError, match="was run from Python"):
        Result.read(tmp_path).model("ditto", client="a")


def test_a_run_without_a_name_has_a_folder_of_its_own(
    federation: fl.Federation, task: fl.Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    one = fl.run(federation, task, fl.FedAvg(lr=0.1), rounds=1, backend="serial")
    two = fl.run(federation, task, fl.FedAvg(lr=0.2), rounds=1, backend="serial")
    assert one.folder != two.folder
    assert one.folder.parent == Path("runs")


def test_seeds_may_redraw_data_and_weights(task: fl.Task, tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    x = random.normal(size=(60, 3)).astype("float32")

    def drawn(seed: int) -> fl.Federation:
        return fl.Federation.from_arrays(x, (x[:, 0] > 0).astype(int), clients=3, seed=seed)

    result = run(drawn, lambda seed: fl.Task(Net, seed=seed), tmp_path, rounds=1, seeds=2, algorithms=fl.FedAvg())
    values = {
        (row["seed"]): row["value"]
        for row in result.rows("clients")
        if (row["phase"], row["metric"]) == ("pre_fit", "loss")
    }
    assert values[1] != values[2]


def test_labels_must_be_able_to_name_a_folder(federation: fl.Federation, task: fl.Task, tmp_path: Path) -> None:
    for label in ("a/b", "../up", "", ".hidden"):
        with pytest.raises(InputError, match="label"):
            run(federation, task, tmp_path, algorithms={label: fl.FedAvg()})
    with pytest.raises(InputError, match="Two algorithms are called fedavg"):
        run(federation, task, tmp_path, algorithms=[fl.FedAvg(), fl.FedAvg(lr=0.2)])


def test_nothing_to_run_is_an_error(federation: fl.Federation, task: fl.Task, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="at least one algorithm"):
        run(federation, task, tmp_path, algorithms={})
    with pytest.raises(InputError, match=r"such as fedloom.FedAvg\(\)"):
        run(federation, task, tmp_path, algorithms={"fedavg": "fedavg"})
    with pytest.raises(InputError, match=r"cohort.count = 9, but there are only 3 clients"):
        run(federation, task, tmp_path, cohort=fl.Sampling(count=9))


def test_edited_code_is_another_experiment(federation: fl.Federation, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)

    def folder_of(factor: str) -> Path:
        (tmp_path / "mine.py").write_text(
            "import torch.nn.functional as F\n"
            "import fedloom as fl\n"
            "from fedloom.tree import scale\n"
            f"def loss(output, target):\n    return {factor} * F.cross_entropy(output, target, reduction='none')\n"
        )
        loss = user_code.code("mine.py:loss", tmp_path)
        linecache.checkcache()
        return fl.run(federation, fl.Task(Net, loss=loss), fl.FedAvg(), rounds=1, backend="serial").folder

    first = folder_of("1.0")
    assert folder_of("1.0") == first
    assert folder_of("2.0") != first


def test_a_metric_that_is_no_mean_is_never_averaged_over_clients(federation: fl.Federation, tmp_path: Path) -> None:
    ranking = fl.Task(Net, metrics=["auroc"])
    only = {"algorithms": ALGORITHMS["fedavg"], "evaluate": EvaluateTable(headline="best")}
    result = run(federation, ranking, tmp_path, **only)
    assert not any(name.endswith("auroc") for name in result.runs[0].headline)
    assert "pooled_test_auroc" in result.runs[0].final
    assert result.plot("auroc").is_file()


def test_numbers_and_tables_of_a_call_are_checked(federation: fl.Federation, task: fl.Task, tmp_path: Path) -> None:
    for wrong in ({"rounds": 0}, {"rounds": 2.5}, {"seeds": [1, 1]}, {"seeds": 0}, {"seeds": "12"}, {"name": "a/b"}):
        with pytest.raises(InputError):
            run(federation, task, tmp_path, **wrong)
    with pytest.raises(InputError, match=r"fedloom.Sampling"):
        run(federation, task, tmp_path, cohort={"count": 2})


def test_a_setting_that_does_not_exist_is_refused_with_the_nearest_name(
    federation: fl.Federation, task: fl.Task, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"run has no parameter 'worker'. Got 2 for it\. .*Did you mean 'workers'\?"):
        fl.run(federation, task, fl.FedAvg(), 1, out=tmp_path, worker=2)
    with pytest.raises(InputError, match="Did you mean 'seeds'"):
        fl.run(federation, task, fl.FedAvg(), 1, out=tmp_path, seed=2)
    with pytest.raises(InputError, match=r"'workers' parameter of RunTable must be at least 1"):
        fl.run(federation, task, fl.FedAvg(), 1, out=tmp_path, workers=0)
