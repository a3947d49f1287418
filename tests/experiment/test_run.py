"""Run every algorithm with every seed, and check what comes out."""

from __future__ import annotations

import linecache
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import save_file

import fedloom as fl
from fedloom import user_code
from fedloom.audits.audit import audit
from fedloom.errors import InputError, StoreError
from fedloom.experiment import experiment_file
from fedloom.experiment.plan import Plan
from fedloom.experiment.progress import Silent
from fedloom.experiment.run import run_plan
from fedloom.experiment.store import Store
from fedloom.experiment.tables import EvaluateTable
from fedloom.results.result import Result
from tests.conftest import Dense
from tests.conftest import federation as small
from tests.experiment.small_run import ALGORITHMS, Net, StopAfter, run


def test_more_rounds_extend_a_run(federation: fl.Federation, task: fl.Task, tmp_path: Path) -> None:
    whole = run(federation, task, tmp_path / "whole", rounds=5, evaluate=fl.Evaluation(universal=True))
    run(federation, task, tmp_path / "short", rounds=2, evaluate=fl.Evaluation(universal=True))
    longer = run(federation, task, tmp_path / "short", rounds=5, evaluate=fl.Evaluation(universal=True))
    assert longer.weights_sha256 == whole.weights_sha256
    assert [r.final for r in longer.runs] == [r.final for r in whole.runs]
    assert {row["round"] for row in longer.rows("clients") if row["phase"] in ("final", "universal")} == {5}


def test_cells_that_wait_for_more_rounds_are_not_done(federation: fl.Federation, task: fl.Task, tmp_path: Path) -> None:
    folder = run(federation, task, tmp_path, rounds=1).folder
    seen: list[list[str]] = []

    class Watching(Silent):
        def step(self, *values: Any) -> None:
            seen.append([cell.status for cell in Result.read(folder).runs])

    extended = run(federation, task, tmp_path, rounds=2, progress=Watching(), cells=1)
    assert seen[0].count("running") == 1
    assert "done" not in seen[0]
    assert {cell.status for cell in extended.runs} == {"done"}


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
    for wrong in ({"fedavg": "fedavg"}, "fedavg", ["fedavg", "fedprox"], fl.FedAvg, [fl.FedAvg, fl.FedProx], None):
        with pytest.raises(InputError, match=r"must be an algorithm, such as fedloom.FedAvg\(\)\. Got .*edavg|None"):
            run(federation, task, tmp_path, algorithms=wrong)
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


def test_a_metric_that_is_not_a_mean_over_examples_is_averaged_over_clients_and_pooled(
    federation: fl.Federation, tmp_path: Path
) -> None:
    ranking = fl.Task(Net, metrics=["auroc"])
    only = {"algorithms": ALGORITHMS["fedavg"], "evaluate": EvaluateTable(headline="best")}
    result = run(federation, ranking, tmp_path, **only)
    assert {"post_fit_test_auroc", "pooled_post_fit_test_auroc"} <= result.runs[0].final.keys()
    assert "post_fit_test_auroc" in result.runs[0].headline
    assert not any(name.startswith("pooled") for name in result.runs[0].headline)
    assert result.plot("auroc").is_file()


def test_numbers_and_tables_of_a_call_are_checked(federation: fl.Federation, task: fl.Task, tmp_path: Path) -> None:
    for wrong in ({"rounds": -1}, {"rounds": 2.5}, {"seeds": [1, 1]}, {"seeds": 0}, {"seeds": "12"}, {"name": "a/b"}):
        with pytest.raises(InputError):
            run(federation, task, tmp_path, **wrong)
    with pytest.raises(InputError, match=r"fedloom.Sampling"):
        run(federation, task, tmp_path, cohort={"count": 2})


def refuse(*_: object) -> None:
    raise InputError("there is no file x.csv")


def test_a_run_that_is_refused_leaves_nothing(
    federation: fl.Federation, task: fl.Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "experiment.toml").write_text("# mine")
    (tmp_path / "mine" / "figures").mkdir()
    with monkeypatch.context() as patched:
        patched.setattr("fedloom.experiment.run.open_worker_groups", refuse)
        for folder in ("runs/new", "mine"):
            with pytest.raises(InputError):
                run(federation, task, tmp_path / folder)
    kept = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*"))
    assert kept == ["mine", "mine/experiment.toml", "mine/figures"]
    with pytest.raises(InputError, match="does not take the data"):
        run(federation, fl.Task("digits_mlp"), tmp_path / "runs" / "wrong")
    assert not (tmp_path / "runs").exists()


def test_a_refusal_to_start_over_puts_the_old_folder_back(
    federation: fl.Federation, task: fl.Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    done = run(federation, task, folder, rounds=1)
    with monkeypatch.context() as patched:
        patched.setattr("fedloom.experiment.run.open_worker_groups", refuse)
        with pytest.raises(InputError):
            run(federation, task, folder, rounds=1, fresh=True)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert fl.load(folder).weights_sha256 == done.weights_sha256


def test_a_run_that_is_refused_in_a_folder_of_its_own_has_failed(
    federation: fl.Federation, task: fl.Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(federation, task, tmp_path, should_stop=lambda: True)
    with monkeypatch.context() as patched:
        patched.setattr("fedloom.experiment.run.open_worker_groups", refuse)
        with pytest.raises(InputError):
            run(federation, task, tmp_path)
    result = fl.load(tmp_path)
    assert result.status == "failed"
    assert "there is no file x.csv" in {cell.error for cell in result.runs}
    assert run(federation, task, tmp_path, rounds=2).status == "done"


def test_a_setting_that_does_not_exist_is_refused_with_the_nearest_name(
    federation: fl.Federation, task: fl.Task, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"run has no parameter 'worker'. Got 2 for it\. .*Did you mean 'workers'\?"):
        fl.run(federation, task, fl.FedAvg(), 1, out=tmp_path, worker=2)
    with pytest.raises(InputError, match="Did you mean 'seeds'"):
        fl.run(federation, task, fl.FedAvg(), 1, out=tmp_path, seed=2)
    with pytest.raises(InputError, match=r"'workers' parameter of RunTable must be at least 1"):
        fl.run(federation, task, fl.FedAvg(), 1, out=tmp_path, workers=0)


def test_schedules_and_settings_of_clients_are_exact_after_a_resume(
    federation: fl.Federation, task: fl.Task, tmp_path: Path
) -> None:
    training = {
        "lr": 0.05,
        "batch_size": 4,
        "optimizer": "adamw",
        "optimizer_state": "keep",
        "schedule": {"name": "cosine", "over": 4, "warmup": 1},
        "local_schedule": {"name": "exponential", "factor": 0.9},
        "clients": [{"name": federation.name(1), "lr": 0.01, "epochs": 2.0, "batch_size": 3}],
    }
    algorithms = {"fedavg": fl.FedAvg(**training)}
    whole = run(federation, task, tmp_path / "whole", algorithms=algorithms)
    parts = run(federation, task, tmp_path / "parts", algorithms=algorithms, should_stop=StopAfter(2))
    assert not parts.finished
    again = run(federation, task, tmp_path / "parts", algorithms=algorithms, backend="vector", workers=2)
    assert again.weights_sha256 == whole.weights_sha256
    assert whole.weights_sha256 != run(federation, task, tmp_path / "plain").weights_sha256
    other = {"fedavg": fl.FedAvg(**{**training, "schedule": {"name": "cosine", "over": 5, "warmup": 1}})}
    with pytest.raises(InputError, match=r"algorithm\.fedavg\.train\.schedule\.over: 4 → 5"):
        run(federation, task, tmp_path / "parts", algorithms=other)


def test_a_given_model_is_evaluated_without_training(federation: fl.Federation, task: fl.Task, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    trained = run(federation, task, tmp_path / "trained", rounds=2, algorithms=fl.FedAvg(lr=0.2))
    save_file(trained.weights("fedavg")["model"], tmp_path / "model.safetensors")
    given = fl.Task(Net, init=str(tmp_path / "model.safetensors"))
    for _ in range(2):  # a second time in the same folder, too
        alone = run(federation, given, tmp_path / "alone", rounds=0, algorithms=fl.FedAvg(lr=0.2))
        assert (alone.status, alone.runs[0].rounds) == ("done", 0)
        assert alone.weights_sha256 == trained.weights_sha256
        assert alone.runs[0].final["test_accuracy"] == trained.runs[0].final["test_accuracy"]
        weights = alone.weights("fedavg")["model"]  # which no checkpoint holds
        assert all(leaf.equal(weights[name]) for name, leaf in trained.weights("fedavg")["model"].items())
    save_file({name: leaf + 1 for name, leaf in weights.items()}, tmp_path / "model.safetensors")
    changed = replace(alone, plan=replace(alone.plan, task=lambda seed: fl.Task(Net, init=given.init)))
    with pytest.raises(StoreError, match=r"trained no round, so .* holds no weights, and the model that it evaluated"):
        changed.weights("fedavg")


def test_without_rounds_every_client_has_its_initial_model(
    federation: fl.Federation, task: fl.Task, tmp_path: Path
) -> None:
    result = run(federation, task, tmp_path, rounds=0, algorithms={"local": fl.LocalOnly()})
    models = result.weights("local")
    assert len(models) == federation.clients
    assert all(leaf.equal(model[name]) for model in models.values() for name, leaf in task.initial().items())


def test_a_python_program_is_told_what_the_terminal_says_below_its_table(tmp_path: Path) -> None:
    def nothing(outputs: object, labels: object) -> float:
        return float("nan")

    said: list[str] = []
    progress = Silent()
    progress.note = said.append  # type: ignore[method-assign]
    algorithms = {"one": fl.FedAvg(lr=0.1), "two": fl.FedAvg(lr=0.1)}
    task = fl.Task(Dense, metrics=[nothing, "accuracy"])
    fl.run(small((20, 30)), task, algorithms, 1, out=tmp_path, backend="serial", progress=progress)
    assert "Caution: nothing is undefined at every client: it says nothing here, and other metrics lead." in said
    assert sum("one and two ended with the same weights" in text for text in said) == 1


def test_a_finished_run_is_not_shown_for_data_that_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(first: int) -> None:
        rows = "".join(f"{number},{(number + first) % 2}\n" for number in range(40))
        (tmp_path / "table.csv").write_text(f"x,y\n{rows}")

    monkeypatch.chdir(tmp_path)
    data = {"source": "csv", "path": "table.csv", "label": "y", "partition": {"name": "iid", "clients": 2}}
    values = {"rounds": 1, "data": data, "task": {"model": "logistic"}, "algorithm": {"fedavg": {}}}
    experiment = experiment_file.parse(values, tmp_path)
    write(0)
    first = run_plan(Plan.of(experiment), "out")
    said: list[str] = []
    progress = Silent()
    progress.note = said.append  # type: ignore[method-assign]
    assert run_plan(Plan.of(experiment), "out", progress=progress).weights_sha256 == first.weights_sha256
    assert said == ["out is finished: nothing is computed. Use --fresh (in Python: fresh=True) to start over."]
    write(1)
    with pytest.raises(StoreError, match="The data has changed since this run began"):
        run_plan(Plan.of(experiment), "out")
    assert Result.read(Path("out")).status == "done"
    with pytest.raises(InputError, match="No audit of membership: The data has changed"):
        audit(experiment, Path("out"), ["membership"], Silent(), 100)
    (tmp_path / "table.csv").unlink()  # what was found is still what was found
    assert run_plan(Plan.of(experiment), "out", progress=progress).weights_sha256 == first.weights_sha256
    assert any("Whether the data is that of this run is not known" in text for text in said)


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ("task federation", "The data must be a Federation, .* Got a Task instead. They are swapped"),
        ("arrays task", "The data must be a Federation, such as .*from_arrays.* Got a tuple of 2 instead"),
        ("federation model", "What is learnt must be a Task, .* Got a Net instead"),
        ("federation none", "What is learnt must be a Task, .* Got None instead"),
    ],
)
def test_other_things_than_a_federation_and_a_task_are_refused(
    federation: fl.Federation, task: fl.Task, tmp_path: Path, order: str, message: str
) -> None:
    known = {"federation": federation, "task": task, "arrays": (np.ones(3), np.ones(3)), "model": Net(), "none": None}
    given: list[Any] = [known[name] for name in order.split()]
    with pytest.raises(InputError, match=message):
        fl.run(*given, fl.FedAvg(), out=tmp_path)
    with pytest.raises(InputError, match=message):
        next(fl.fit(*given, fl.FedAvg(), 1))


def test_other_initial_weights_in_the_same_file_are_another_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    start = fl.Task("digits_mlp").initial()
    data = {"source": "digits", "partition": {"name": "iid", "clients": 2}}
    values = {"rounds": 1, "data": data, "task": {"init": "start.safetensors"}, "run": {"backend": "serial"}}
    experiment = experiment_file.parse(values, tmp_path)
    save_file(start, "start.safetensors")
    first = run_plan(Plan.of(experiment), "out")
    with Store(Path("out")) as store:  # versions before did not record the file
        store.set_fact("description", {k: v for k, v in store.fact("description").items() if k != "files"})
    assert run_plan(Plan.of(experiment), "out").weights_sha256 == first.weights_sha256
    save_file({name: leaf + 1 for name, leaf in start.items()}, "start.safetensors")
    with pytest.raises(InputError, match=r"another experiment(.|\n)* the file start.safetensors has changed"):
        run_plan(Plan.of(experiment), "out")
    with pytest.raises(InputError, match=r"another experiment(.|\n)* the file start.safetensors has changed"):
        audit(experiment, Path("out"), ["poisoning"], Silent(), 100)
