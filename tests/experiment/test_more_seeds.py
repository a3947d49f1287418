"""A run gets more seeds: new cells beside the old ones, as if it had begun with all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fedloom as fl
from fedloom.audits import audit as auditing
from fedloom.errors import InputError, StoreError
from fedloom.experiment import experiment_file
from fedloom.experiment.plan import Plan
from fedloom.experiment.progress import Progress
from fedloom.experiment.run import run_plan
from fedloom.experiment.store import Store
from fedloom.privacy.table import DpTable, PrivacyTable
from fedloom.results.result import Result
from fedloom.results.run_data import RunData
from tests.conftest import Dense
from tests.conftest import federation as small
from tests.experiment.small_run import ALGORITHMS, StopAfter, run

TWO = {label: ALGORITHMS[label] for label in ("fedavg", "local")}
DIGITS: dict[str, Any] = {
    "rounds": 1,
    "data": {"source": "digits", "seed": "run", "partition": {"name": "dirichlet", "clients": 6, "alpha": 0.3}},
    "algorithm": {"fedavg": {}, "uniform": {"name": "fedavg", "weights": "uniform"}},
    "run": {"backend": "serial"},
}


def digits(folder: Path, seeds: list[int], **tables: Any) -> Result:
    return run_plan(Plan.of(experiment_file.parse({**DIGITS, "seeds": seeds, **tables})), folder)


def cells(result: Result) -> dict[tuple[str, int], Any]:
    return {(one.algorithm, one.seed): (one.weights_sha256, one.final) for one in result.runs}


@pytest.mark.parametrize("settings", [{}, {"backend": "vector", "workers": 2, "cells": 2}], ids=["serial", "workers"])
@pytest.mark.parametrize("begun", ["finished", "interrupted", "shorter"])
def test_more_seeds_are_more_cells_with_the_bits_of_a_run_that_began_with_them(
    begun: str, settings: dict[str, Any], federation: fl.Federation, task: fl.Task, tmp_path: Path
) -> None:
    whole = run(federation, task, tmp_path / "whole", seeds=[3, 1, 2, 7], algorithms=TWO, rounds=3)
    stop = {"should_stop": StopAfter(4)} if begun == "interrupted" else {}
    first = {"seeds": [3, 1], "rounds": 1 if begun == "shorter" else 3, **stop}
    old = run(federation, task, tmp_path / "run", algorithms=TWO, **first)
    kept = {} if begun == "shorter" else {key: one for key, one in cells(old).items() if one[0] is not None}
    measured = old.rows("rounds")
    more = run(federation, task, tmp_path / "run", seeds=[3, 1, 2, 7], algorithms=TWO, rounds=3, **settings)
    assert cells(more) == cells(whole)
    assert more.weights_sha256 == whole.weights_sha256
    assert [row for row in measured if row not in more.rows("rounds")] == []  # with their seconds: not computed again
    assert kept.items() <= cells(more).items()
    assert RunData.read(tmp_path / "run").seeds == (3, 1, 2, 7)
    assert RunData.read(tmp_path / "run").description["seeds"] == [3, 1, 2, 7]
    assert RunData.read(tmp_path / "run").done


def test_what_is_recorded_about_a_run_is_that_of_one_that_began_with_all_seeds(tmp_path: Path) -> None:
    partition = {"name": "dirichlet", "clients": 40, "alpha": 0.1}  # some clients have one label only
    tables = {"data": {**DIGITS["data"], "partition": partition}, "train": {"drop_last": True, "batch_size": 1700}}
    for seeds in ([5], [5, 2]):
        digits(tmp_path / "run", seeds, **tables)
    digits(tmp_path / "whole", [5, 2], **tables)
    more, whole = (RunData.read(tmp_path / name) for name in ("run", "whole"))
    assert {**more.facts, "machine": None} == {**whole.facts, "machine": None}
    said = more.facts["cautions about algorithms"]
    assert any("training examples in seed 5" in text for text in said)
    assert any("drops nothing in seed 5" in text for text in said)
    assert more.facts["clients of seed 5"]["scarce"]["only one label"]
    assert more.facts["cautions about the data"] == []
    for file in ("preprocessing-2.json", "preprocessing-5.json"):
        assert (tmp_path / "run" / file).read_text() == (tmp_path / "whole" / file).read_text()
    assert "seeds = [\n    5,\n    2,\n]" in (tmp_path / "run" / "experiment.toml").read_text()


@pytest.mark.parametrize("seeds", [[1], [2, 1, 3], [4, 1, 2], [7]], ids=str)
def test_other_seeds_are_refused_with_what_to_do(
    seeds: list[int], federation: fl.Federation, task: fl.Task, tmp_path: Path
) -> None:
    run(federation, task, tmp_path, seeds=[1, 2], algorithms=TWO, rounds=1)
    said = r"seeds: \[1, 2\] → (.|\n)*keeps its seeds, and more can follow them: seeds = \[1, 2, …\](.|\n)*--out"
    with pytest.raises(InputError, match=said):
        run(federation, task, tmp_path, seeds=seeds, algorithms=TWO, rounds=1)
    with pytest.raises(InputError, match=r"lr: 0\.2 → 0\.3(\n .*)*\nUse --fresh"):  # nothing is wrong with these seeds
        run(federation, task, tmp_path, seeds=3, algorithms={**TWO, "fedavg": fl.FedAvg(lr=0.3)}, rounds=1)


def test_a_run_on_a_network_gets_no_more_seeds(federation: fl.Federation, task: fl.Task, tmp_path: Path) -> None:
    run(federation, task, tmp_path, algorithms=TWO, rounds=1)

    def connect(*_: object) -> Any:
        raise AssertionError("it must be refused before")

    with pytest.raises(InputError, match=r"seeds: \[1\] → \[1, 2\](.|\n)*On a network, sites have agreed to these"):
        run(federation, task, tmp_path, seeds=2, algorithms=TWO, rounds=1, connect=connect)
    with Store(tmp_path) as store:
        store.set_fact("network", True)
    with pytest.raises(InputError, match="On a network"):  # nor by a simulation in its folder
        run(federation, task, tmp_path, seeds=2, algorithms=TWO, rounds=1)


def test_refused_seeds_change_nothing(task: fl.Task, tmp_path: Path) -> None:
    def drawn(seed: int) -> fl.Federation:
        return small([9, 9, 0 if seed == 3 else 9], seed=seed + shifted)

    shifted = 0
    settings: dict[str, Any] = {"algorithms": TWO, "rounds": 1}
    done = run(drawn, fl.Task(Dense), tmp_path, seeds=2, **settings)

    def state() -> tuple[Any, ...]:
        with Store(tmp_path, read_only=True) as store:
            cells = [{**cell, "finished": None} for cell in store.cells()]
            return store.facts(), cells, store.rows("rounds"), sorted(tmp_path.rglob("*"))

    before = state()
    with pytest.raises(InputError, match=r"^In seed 3: Client 'client-2' has no training examples"):
        run(drawn, fl.Task(Dense), tmp_path, seeds=3, **settings)
    assert state() == before
    shifted, described = 100, RunData.read(tmp_path).description
    with pytest.raises(StoreError, match="data has changed"):
        run(drawn, fl.Task(Dense), tmp_path, seeds=[1, 2, 4], description={**described, "seeds": [1, 2, 4]}, **settings)
    assert state() == before
    assert fl.load(tmp_path).status == "done"
    assert fl.load(tmp_path).weights_sha256 == done.weights_sha256


def test_the_epsilon_of_more_seeds_adds_up(federation: fl.Federation, task: fl.Task, tmp_path: Path) -> None:
    private = PrivacyTable(dp=DpTable(epsilon=3.0, clip=1.0))
    for seeds in (1, 3):
        result = run(
            federation,
            task,
            tmp_path,
            seeds=seeds,
            rounds=2,
            algorithms={"fedavg": fl.FedAvg(weights="uniform")},
            cohort=fl.Sampling(sampling="poisson", fraction=0.9),
            privacy=private,
        )
    page = result.report().read_text()
    assert "fedavg (3 seeds: 1, 2, 3) has spent ε = " in page
    assert "These 3 trained on the same data: a person who sees all of them learns as much as ε = 9" in page


def test_findings_of_an_audit_stay_because_they_are_about_the_first_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auditing, "_reconstruction", lambda *given: {"labels": {}})
    digits(tmp_path, [1])
    auditing.audit(experiment_file.parse({**DIGITS, "seeds": [1]}), tmp_path, ["reconstruction"], Progress())
    digits(tmp_path, [1, 2])
    assert RunData.read(tmp_path).audit["reconstruction"] == {"labels": {}}
    digits(tmp_path / "other", [2, 1])
    (tmp_path / "audit.json").rename(tmp_path / "other" / "audit.json")
    assert RunData.read(tmp_path / "other").audit == {}


def test_data_of_any_seed_that_has_changed_is_refused_before_another_seed_trains(task: fl.Task, tmp_path: Path) -> None:
    shifted = 0

    def drawn(seed: int) -> fl.Federation:
        return small([9, 9, 9], seed=seed + shifted * (seed == 2))

    done = run(drawn, fl.Task(Dense), tmp_path, seeds=[1, 2, 3], rounds=1, algorithms={"fedavg": TWO["fedavg"]})
    shifted = 100
    with pytest.raises(StoreError, match=r"data has changed since this run began, in seed 2\. Restore it to continue"):
        run(drawn, fl.Task(Dense), tmp_path, seeds=[1, 2, 3], rounds=2, algorithms={"fedavg": TWO["fedavg"]})
    again = fl.load(tmp_path)
    assert (again.status, again.weights_sha256) == ("done", done.weights_sha256)
