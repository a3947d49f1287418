"""A run's folder: for one process, and for one experiment."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import fedloom as fl
from fedloom.errors import InputError, StoreError
from fedloom.experiment import checkpoint, experiment_file
from fedloom.experiment.plan import Plan
from fedloom.experiment.progress import Progress
from fedloom.experiment.run import run_plan
from fedloom.experiment.run_folder import irreplaceable, locked, remove, roll_back
from fedloom.experiment.store import Store
from fedloom.experiment.tables import EvaluateTable
from fedloom.privacy.dp.ledger import LEDGER
from fedloom.results.result import Result
from fedloom.user_code import fingerprint
from tests.experiment.small_run import StopAfter, run


def test_another_experiment_is_refused_with_the_difference(
    federation: fl.Federation, task: fl.Task, tmp_path: Path
) -> None:
    run(federation, task, tmp_path / "r", algorithms={"fedavg": fl.FedAvg(lr=0.2)})
    with pytest.raises(InputError, match=r"algorithm.fedavg.train.lr: 0.2 → 0.3") as refused:
        run(federation, task, tmp_path / "r", algorithms={"fedavg": fl.FedAvg(lr=0.3)})
    assert "Use --fresh (in Python: fresh=True) to start over" in str(refused.value)
    assert "--out (in Python: out=…)" in str(refused.value)
    with pytest.raises(InputError, match=r"more than the 2 asked for now. Use --fresh \(in Python: fresh=True\)"):
        run(federation, task, tmp_path / "r", rounds=2, algorithms={"fedavg": fl.FedAvg(lr=0.2)})
    changed = run(federation, task, tmp_path / "r", algorithms={"fedavg": fl.FedAvg(lr=0.3)}, fresh=True)
    assert changed.status == "done"
    assert len(list(tmp_path.iterdir())) == 2  # the old results are beside the new ones


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"cohort": fl.Sampling(count=9)}, "only 3 clients"),
        ({"evaluate": EvaluateTable(target={"f1": 0.9})}, "target must be about one of"),
        ({"backend": "vector", "workers": 100_000, "seeds": 2}, "100000"),
    ],
)
@pytest.mark.parametrize("fresh", [False, True])
def test_a_mistake_is_named_before_the_experiment_that_is_there_and_nothing_is_moved(
    settings: dict[str, Any], said: str, fresh: bool, federation: fl.Federation, task: fl.Task, tmp_path: Path
) -> None:
    run(federation, task, tmp_path / "r", rounds=1)
    with pytest.raises(InputError, match=said):
        run(federation, task, tmp_path / "r", rounds=1, fresh=fresh, **settings)
    assert [path.name for path in tmp_path.iterdir()] == ["r"]


def test_comments_and_docstrings_in_your_files_do_not_make_another_experiment(tmp_path: Path) -> None:
    """Nor do the hashes of whole files that earlier versions recorded."""
    mine, folder = tmp_path / "mine.py", tmp_path / "r"
    text = "from fedloom.algorithms import FedAvg\n\n\nclass Mine(FedAvg):\n    _half = 0.5\n"
    values = {"data": {"source": "digits", "partition": {"name": "iid", "clients": 3}}, "run": {"backend": "serial"}}

    def train(text: str, rounds: int) -> str:
        mine.write_text(text)
        file = {**values, "algorithm": {"mine": {"name": "mine.py:Mine"}}, "rounds": rounds}
        return run_plan(Plan.of(experiment_file.parse(file, tmp_path)), folder).status

    assert train(text, 1) == "done"
    commented = text.replace(":\n", ':\n    """Mine."""\n', 1).replace("0.5", "(0.5)  # half")
    assert train(commented, 2) == "done"
    with pytest.raises(InputError, match=r"the file mine.py has changed"):
        train(text.replace("0.5", "0.6"), 3)
    with Store(folder) as store:
        store.set_fact("description", {**store.fact("description"), "code": {"mine.py:Mine": fingerprint(mine)}})
    with pytest.raises(InputError, match=r"the file mine.py has changed"):
        train(commented, 3)
    assert train(text.replace("0.5", "0.6"), 3) == "done"


def test_a_run_of_the_version_with_score_weights_in_fedavg_goes_on(
    federation: fl.Federation, task: fl.Task, tmp_path: Path
) -> None:
    def store_former_keys(**keys: str) -> None:
        with Store(tmp_path) as store:
            described = store.fact("description")
            described["algorithm"]["fedavg"].update(keys)
            store.set_fact("description", described)

    fedavg = {"fedavg": fl.FedAvg(lr=0.2)}
    run(federation, task, tmp_path, rounds=2, algorithms=fedavg)
    store_former_keys(metric="accuracy", scores="post", share="weights")
    assert run(federation, task, tmp_path, rounds=3, algorithms=fedavg).runs[0].rounds == 3
    store_former_keys(metric="accuracy", scores="post", share="deltas")  # clients of that run sent something else
    with pytest.raises(InputError, match=r"What differs:\n  algorithm.fedavg.share: removed \"deltas\"\nUse"):
        run(federation, task, tmp_path, rounds=4, algorithms=fedavg)


def test_one_folder_is_for_one_process(federation: fl.Federation, task: fl.Task, tmp_path: Path) -> None:
    def nested() -> bool:
        with pytest.raises(StoreError, match="Another process"):
            run(federation, task, tmp_path)
        return True

    assert run(federation, task, tmp_path, should_stop=nested).status == "stopped"


@pytest.mark.parametrize("vanishes", ["before", "during", "with an error"])
def test_a_folder_that_is_deleted_during_a_run_is_named(
    federation: fl.Federation, task: fl.Task, tmp_path: Path, vanishes: str
) -> None:
    steps: list[int] = []

    class Deleting(Progress):
        def expect(self, cells: int, rounds: int) -> None:
            if vanishes == "before":
                shutil.rmtree(tmp_path / "r")

        def step(self, cell: str, round: int, values: dict[str, float], seconds: float) -> None:
            steps.append(round)
            if vanishes != "before" and (tmp_path / "r" / "run.db").exists():
                shutil.rmtree(tmp_path / "r")
                if vanishes == "with an error":
                    raise InputError("such as of a file that is missing")

    with pytest.raises(StoreError, match=r"The run's folder .*r was deleted or moved while the run used it\."):
        run(federation, task, tmp_path / "r", algorithms=fl.FedAvg(), progress=Deleting())
    assert len(steps) <= 1  # no round is computed for nothing
    assert vanishes == "before" or not (tmp_path / "r").exists()


def test_checkpoints_without_a_database_are_not_mistaken_for_this_run(
    federation: fl.Federation, task: fl.Task, tmp_path: Path
) -> None:
    run(federation, task, tmp_path)
    for file in tmp_path.glob("run.db*"):
        file.unlink()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(StoreError, match=r"has checkpoints, but no run.db that says of which experiment"):
        run(federation, task, tmp_path)
    assert sorted(tmp_path.rglob("*")) == before  # no empty database, either
    Store(tmp_path).close()
    with pytest.raises(StoreError, match=r"run\.db does not say of which experiment"):
        run(federation, task, tmp_path)


def test_a_refused_extension_changes_nothing(federation: fl.Federation, task: fl.Task, tmp_path: Path) -> None:
    described = {"data": "by name only"}
    run(federation, task, tmp_path, rounds=2, description=described)

    def state() -> tuple[Any, ...]:
        with Store(tmp_path, read_only=True) as store:
            return store.facts(), store.cells(), store.rows("rounds"), sorted(tmp_path.rglob("*"))

    before = state()
    other = fl.Federation.from_arrays(federation.x + 1, federation.y, clients=3)
    with pytest.raises(StoreError, match="data has changed"):
        run(other, task, tmp_path, rounds=4, description=described)
    assert state() == before
    with pytest.raises(InputError, match="only 3 clients"):
        run(federation, task, tmp_path, rounds=4, description=described, cohort=fl.Sampling(count=9))
    assert state() == before
    assert Result.read(tmp_path).status == "done"
    assert run(federation, task, tmp_path, rounds=4, description=described).runs[0].rounds == 4


def test_an_attempt_that_never_trained_does_not_claim_the_folder(
    federation: fl.Federation, task: fl.Task, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="only 3 clients"):
        run(federation, task, tmp_path, cohort=fl.Sampling(count=9))
    assert run(federation, task, tmp_path, cohort=fl.Sampling(count=2)).status == "done"


def test_starting_again_does_not_take_the_folder_from_a_running_process(
    federation: fl.Federation, task: fl.Task, tmp_path: Path
) -> None:
    def nested() -> bool:
        with pytest.raises(StoreError, match="Another process"):
            run(federation, task, tmp_path / "r", fresh=True)
        return True

    assert run(federation, task, tmp_path / "r", should_stop=nested).status == "stopped"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.slow
def test_only_what_fedloom_wrote_is_removed(comparison: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(comparison, tmp_path / "run")
    result = Result.read(folder)
    result.plot("loss")
    result.report()
    assert remove(folder) == []
    assert not folder.exists()
    folder = shutil.copytree(comparison, tmp_path / "run")
    (folder / "notes.txt").write_text("mine")
    assert remove(folder) == [folder / "notes.txt"]
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


def test_a_run_that_a_process_holds_is_not_removed(comparison: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(comparison, tmp_path / "run")
    before = sorted(folder.rglob("*"))
    with locked(folder), pytest.raises(StoreError, match="Another process is running"):
        remove(folder)
    (folder / "network").mkdir()
    with locked(folder / "network"), pytest.raises(StoreError, match="Another process is running"):
        remove(folder)
    assert {*before} <= {*folder.rglob("*")}


def test_what_cannot_be_made_again_is_named(tmp_path: Path) -> None:
    assert not any(irreplaceable(tmp_path).values())
    (tmp_path / "network").mkdir()
    (tmp_path / "cells" / "fedavg-1").mkdir(parents=True)
    (tmp_path / "cells" / "fedavg-1" / LEDGER).touch()
    assert all(irreplaceable(tmp_path).values())


def kept(folder: Path, cell: str) -> list[int]:
    return checkpoint.whole_rounds(folder / "cells" / cell)


def test_a_run_that_returned_to_an_earlier_round_ends_with_the_same_bits(
    federation: fl.Federation, task: fl.Task, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"algorithms": fl.Scaffold(lr=0.1), "keep_checkpoints": 3, "keep_models": True}
    whole = run(federation, task, tmp_path, rounds=5, **settings)
    assert kept(tmp_path, "scaffold-1") == [3, 4, 5]
    assert roll_back(tmp_path, 3) == {"scaffold-1": 5}
    before = Result.read(tmp_path)
    assert (before.status, before.runs[0].rounds, before.weights_sha256) == ("stopped", 3, None)
    assert {row["round"] for row in before.rows("clients")} == {1, 2, 3}
    assert kept(tmp_path, "scaffold-1") == [3]
    assert len(list((tmp_path / "cells" / "scaffold-1" / "models").iterdir())) == 3
    again = run(federation, task, tmp_path, rounds=5, **settings)
    assert again.weights_sha256 == whole.weights_sha256
    assert again.runs[0].final == whole.runs[0].final


def test_what_cannot_be_rolled_back_is_refused_and_nothing_changes(
    federation: fl.Federation, task: fl.Task, tmp_path: Path
) -> None:
    algorithms = {"a": fl.FedAvg(lr=0.1), "b": fl.FedAvg(lr=0.2)}
    run(federation, task, tmp_path, rounds=6, algorithms=algorithms, should_stop=StopAfter(8))
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "cells").rglob("*")}
    with pytest.raises(InputError, match=r"a-1 has no checkpoint of round 2. Kept: 5, 6. Set \[run\] keep_checkpoints"):
        roll_back(tmp_path, 2)
    with pytest.raises(InputError, match=r"There is no cell 'c-1'. Known: a-1, b-1"):
        roll_back(tmp_path, 2, "c-1")
    with pytest.raises(InputError, match=r"Nothing came after round 6: a-1 has 6, b-1 has 3 rounds"):
        roll_back(tmp_path, 6)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cells").rglob("*")} == files
    assert roll_back(tmp_path, 2, "b-1") == {"b-1": 3}
    assert (kept(tmp_path, "a-1"), kept(tmp_path, "b-1")) == ([5, 6], [2])
