"""A run: cells, resuming, extending, refusing, and what comes out of it."""

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
from fedloom.errors import InputError, QuorumError, StoreError, TrainingError
from fedloom.experiment.experiment_file import EvaluateTable
from fedloom.experiment.progress import Silent
from fedloom.experiment.store import Store
from fedloom.results.result import Result


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@pytest.fixture
def federation() -> fl.Federation:
    random = np.random.default_rng(3)
    x = random.normal(size=(60, 3)).astype("float32")
    return fl.Federation.from_arrays(x, (x[:, 0] > 0).astype(int), client=np.repeat(["a", "b", "c"], 20))


@pytest.fixture
def task() -> fl.Task:
    return fl.Task(Net)


ALGORITHMS = {
    "fedavg": fl.FedAvg(lr=0.2, batch_size=4),
    "kept": fl.FedAvg(optimizer="adam", lr=0.01, optimizer_state="keep"),
    "fedsgd": fl.FedSGD(lr=0.2),
    "local": fl.LocalOnly(lr=0.2, batch_size=4),
    "pooled": fl.Pooled(optimizer="adam", lr=0.01),
}


def run(federation: Any, task: Any, folder: Path, rounds: int = 4, **settings: Any) -> Result:
    settings = {"algorithms": ALGORITHMS, "backend": "serial", **settings}
    return fl.run(federation, task, rounds=rounds, out=folder, **settings)


class StopAfter:
    """Asks to stop after some rounds."""

    def __init__(self, rounds: int) -> None:
        self.left = rounds

    def __call__(self) -> bool:
        self.left -= 1
        return self.left <= 0


def test_a_run_that_was_stopped_goes_on_to_the_same_bits(
    federation: fl.Federation, task: fl.Task, tmp_path: Path
) -> None:
    whole = run(federation, task, tmp_path / "whole", cohort=fl.Sampling(count=2))
    for stop in (1, 3, 6, 3):
        again = run(federation, task, tmp_path / "parts", cohort=fl.Sampling(count=2), should_stop=StopAfter(stop))
    assert again.status == "stopped"
    again = run(federation, task, tmp_path / "parts", cohort=fl.Sampling(count=2))
    assert again.status == whole.status == "done"
    assert [r.weights_sha256 for r in again.runs] == [r.weights_sha256 for r in whole.runs]
    columns = ("algorithm", "seed", "round", "client", "phase", "split", "metric", "value")
    assert [[row[c] for c in columns] for row in again.rows("clients")] == [
        [row[c] for c in columns] for row in whole.rows("clients")
    ]


class LSTM(nn.Module):
    """Torch's own, which cannot be vmapped."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, 4, batch_first=True)
        self.out = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.lstm(x.unsqueeze(-1))[0][:, -1])


def test_what_cannot_be_computed_side_by_side_is_computed_one_by_one_and_the_reason_is_kept(
    federation: fl.Federation, tmp_path: Path
) -> None:
    settings = {"algorithms": {"fedavg": fl.FedAvg(batch_size=4)}, "backend": "vector", "workers": 1}
    grouped, plain = (
        run(federation, fl.Task(LSTM), tmp_path / str(group), rounds=2, group=group, **settings) for group in (3, 1)
    )
    assert grouped.weights_sha256 == plain.weights_sha256
    with Store(grouped.folder, read_only=True) as store:
        assert store.fact("setup")["group"] == 1
        assert "vmap" in store.fact("one by one")
    with Store(plain.folder, read_only=True) as store:
        assert store.fact("one by one") is None, "nobody asked for it"


def test_checkpoints_need_not_be_made_every_round(federation: fl.Federation, task: fl.Task, tmp_path: Path) -> None:
    whole = run(federation, task, tmp_path / "whole", rounds=5)
    run(federation, task, tmp_path / "parts", rounds=5, checkpoint_every=3, should_stop=StopAfter(2))
    again = run(federation, task, tmp_path / "parts", rounds=5, checkpoint_every=3)
    assert again.weights_sha256 == whole.weights_sha256


def test_more_rounds_extend_a_run(federation: fl.Federation, task: fl.Task, tmp_path: Path) -> None:
    whole = run(federation, task, tmp_path / "whole", rounds=5, evaluate=fl.Evaluation(universal=True))
    run(federation, task, tmp_path / "short", rounds=2, evaluate=fl.Evaluation(universal=True))
    longer = run(federation, task, tmp_path / "short", rounds=5, evaluate=fl.Evaluation(universal=True))
    assert longer.weights_sha256 == whole.weights_sha256
    assert [r.final for r in longer.runs] == [r.final for r in whole.runs]
    assert {row["round"] for row in longer.rows("clients") if row["phase"] in ("final", "universal")} == {5}


def test_a_run_of_an_older_version_whose_setup_has_other_names_can_be_extended(
    federation: fl.Federation, task: fl.Task, tmp_path: Path
) -> None:
    short = run(federation, task, tmp_path / "r", rounds=1)
    with Store(short.folder) as store:
        store.set_fact("setup", {**store.fact("setup"), "compile": False})
    longer = run(federation, task, tmp_path / "r", rounds=2)
    assert longer.weights_sha256 == run(federation, task, tmp_path / "whole", rounds=2).weights_sha256


def test_a_finished_run_is_not_run_again(federation: fl.Federation, task: fl.Task, tmp_path: Path) -> None:
    first = run(federation, task, tmp_path)
    before = first.rows("rounds")
    assert run(federation, task, tmp_path).rows("rounds") == before  # seconds would differ


def test_another_experiment_is_refused_with_the_difference(
    federation: fl.Federation, task: fl.Task, tmp_path: Path
) -> None:
    run(federation, task, tmp_path / "r", algorithms={"fedavg": fl.FedAvg(lr=0.2)})
    with pytest.raises(InputError, match=r"algorithm.fedavg.train.lr: 0.2 → 0.3"):
        run(federation, task, tmp_path / "r", algorithms={"fedavg": fl.FedAvg(lr=0.3)})
    with pytest.raises(InputError, match="more than the 2 asked for"):
        run(federation, task, tmp_path / "r", rounds=2, algorithms={"fedavg": fl.FedAvg(lr=0.2)})
    changed = run(federation, task, tmp_path / "r", algorithms={"fedavg": fl.FedAvg(lr=0.3)}, fresh=True)
    assert changed.status == "done"
    assert len(list(tmp_path.iterdir())) == 2  # the old results are beside the new ones


def test_changed_data_is_refused(federation: fl.Federation, task: fl.Task, tmp_path: Path) -> None:
    described = {"data": "by name only"}
    run(federation, task, tmp_path, description=described, should_stop=StopAfter(1))
    other = fl.Federation.from_arrays(federation.x + 1, federation.y, clients=3)
    with pytest.raises(StoreError, match="data has changed"):
        run(other, task, tmp_path, description=described)


def test_one_folder_is_for_one_process(federation: fl.Federation, task: fl.Task, tmp_path: Path) -> None:
    def nested() -> bool:
        with pytest.raises(StoreError, match="Another process"):
            run(federation, task, tmp_path)
        return True

    assert run(federation, task, tmp_path, should_stop=nested).status == "stopped"


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


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_checkpoint(
    task: fl.Task, tmp_path: Path
) -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(40, 3)).astype("float32") * 100
    federation = fl.Federation.from_arrays(x, random.normal(size=40).astype("float32"), clients=2)
    linear = fl.Task(nn.Linear, args={"in_features": 3, "out_features": 1}, loss="mse", metrics=())
    with pytest.raises(
        TrainingError, match=r"Round \d+, client '\d', local training, step \d+ of \d+: the loss is (inf|nan)"
    ):
        run(federation, linear, tmp_path, rounds=50, algorithms=fl.FedAvg(lr=0.001, batch_size="full"))
    result = Result.read(tmp_path)
    assert result.status == "failed"
    assert "the loss is" in str(result.runs[0].error)
    weights = result.weights()["model"]
    assert result.runs[0].rounds >= 1
    assert tree.is_finite(weights)


def test_a_damaged_checkpoint_falls_back_to_the_one_before(
    federation: fl.Federation, task: fl.Task, tmp_path: Path
) -> None:
    notes: list[str] = []

    class Listening:
        def expect(self, cells: int, rounds: int) -> None: ...
        def begin(self, cell: str, done: int, rounds: int) -> None: ...
        def step(self, cell: str, round: int, values: dict[str, float], seconds: float) -> None: ...
        def end(self, cell: str) -> None: ...
        def note(self, text: str) -> None:
            notes.append(text)

    only = {"algorithms": {"kept": ALGORITHMS["kept"]}}
    whole = run(federation, task, tmp_path / "whole", **only)
    run(federation, task, tmp_path / "parts", should_stop=StopAfter(3), **only)
    newest = sorted((tmp_path / "parts" / "cells" / "kept-1").glob("state-*"))[-1]
    newest.write_bytes(newest.read_bytes()[:-10])
    again = run(federation, task, tmp_path / "parts", progress=Listening(), **only)
    assert again.weights_sha256 == whole.weights_sha256
    assert notes
    assert "kept, seed 1" in notes[0]


def test_stop_at_a_target(federation: fl.Federation, task: fl.Task, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "algorithms": {"fedavg": fl.FedAvg(lr=0.5, batch_size=4)},
        "evaluate": EvaluateTable(target={"accuracy": 0.8}, stop="target"),
    }
    result = run(federation, task, tmp_path, rounds=60, **settings)
    done = result.runs[0].rounds
    assert result.status == "done"
    assert 0 < done < 60
    again = run(federation, task, tmp_path, rounds=60, **settings)
    assert again.runs[0].rounds == done


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


class NormedNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.out = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(x))


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


def test_what_peers_think_of_each_other_is_kept(federation: fl.Federation, task: fl.Task, tmp_path: Path) -> None:
    peer, alone = fl.Peer(lr=0.2, weights="score", metric="loss"), fl.LocalOnly(lr=0.2)
    result = run(federation, task, tmp_path, rounds=1, algorithms={"peer": peer, "local": alone})
    rows = [row for row in result.rows("public") if row["algorithm"] == "peer"]
    found = {(row["client"], row["about"]): row["value"] for row in rows if row["name"] == "scores"}
    names = ("a", "b", "c")
    assert len(found) == 9
    for i, judge in enumerate(names):
        held = federation.indices(i, "validation")
        for author in range(3):
            model = result.model("local", client=author)  # in round 1 peers train as everybody alone does
            loss = nn.functional.cross_entropy(model(federation.x[held]), federation.y[held]).item()
            assert found[judge, author] == pytest.approx(loss, rel=1e-5), f"E[{judge}, {author}]"


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


def test_a_kill_after_the_last_checkpoint_loses_nothing(
    federation: fl.Federation, task: fl.Task, tmp_path: Path
) -> None:
    whole = run(federation, task, tmp_path)
    with Store(tmp_path) as store:  # as if the process had died before it could note that it was done
        for cell in store.cells():
            store.set_status(cell["id"], "running")
    assert Result.read(tmp_path).weights_sha256 is None
    assert run(federation, task, tmp_path).json() == whole.json()


def test_checkpoints_without_a_database_are_not_mistaken_for_this_run(
    federation: fl.Federation, task: fl.Task, tmp_path: Path
) -> None:
    run(federation, task, tmp_path)
    for file in tmp_path.glob("run.db*"):
        file.unlink()
    with pytest.raises(StoreError, match="has no record of them"):
        run(federation, task, tmp_path)


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


def test_the_validation_split_can_be_watched_after_every_epoch(
    federation: fl.Federation, task: fl.Task, tmp_path: Path
) -> None:
    two = {"algorithms": fl.FedAvg(lr=0.2, epochs=2)}
    plain = run(federation, task, tmp_path / "plain", rounds=1, **two)
    watched = run(federation, task, tmp_path / "watched", rounds=1, evaluate=fl.Evaluation(epochs=True), **two)
    assert {row["metric"] for row in plain.rows("history")} == {"loss"}
    assert {row["metric"] for row in watched.rows("history")} == {"loss", "validation_loss", "validation_accuracy"}
    assert {row["epoch"] for row in watched.rows("history")} == {1, 2}
    assert watched.weights_sha256 == plain.weights_sha256


def test_a_model_that_cannot_be_grouped_says_why(federation: fl.Federation, tmp_path: Path) -> None:
    class Drawing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(x + torch.rand_like(x))

    notes: list[str] = []

    class Listening(Silent):
        def note(self, text: str) -> None:
            notes.append(text)

    settings = {"backend": "vector", "workers": 1, "group": 3, "progress": Listening(), "algorithms": fl.FedAvg()}
    result = run(federation, fl.Task(Drawing), tmp_path, rounds=1, **settings)
    assert result.status == "done"
    assert any("one by one" in note and "global generator" in note for note in notes)


def test_an_attempt_that_never_trained_does_not_claim_the_folder(
    federation: fl.Federation, task: fl.Task, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="only 3 clients"):
        run(federation, task, tmp_path, cohort=fl.Sampling(count=9))
    assert run(federation, task, tmp_path, cohort=fl.Sampling(count=2)).status == "done"


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


def test_starting_anew_does_not_take_the_folder_from_a_running_process(
    federation: fl.Federation, task: fl.Task, tmp_path: Path
) -> None:
    def nested() -> bool:
        with pytest.raises(StoreError, match="Another process"):
            run(federation, task, tmp_path / "r", fresh=True)
        return True

    assert run(federation, task, tmp_path / "r", should_stop=nested).status == "stopped"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_run_that_stops_at_its_target_has_final_numbers(
    federation: fl.Federation, task: fl.Task, tmp_path: Path
) -> None:
    at_once = EvaluateTable(target={"accuracy": 0.01}, stop="target", universal=True)
    result = run(federation, task, tmp_path, rounds=9, algorithms=ALGORITHMS["fedavg"], evaluate=at_once)
    assert result.runs[0].rounds == 1
    assert {"test_accuracy", "universal_accuracy"} <= result.runs[0].final.keys()
    with pytest.raises(InputError, match="target must be about one of loss, accuracy"):
        run(federation, task, tmp_path / "x", evaluate=EvaluateTable(target={"auroc": 0.5}, stop="target"))


def test_a_metric_that_is_no_mean_is_never_averaged_over_clients(federation: fl.Federation, tmp_path: Path) -> None:
    ranking = fl.Task(Net, metrics=["auroc"])
    only = {"algorithms": ALGORITHMS["fedavg"], "evaluate": EvaluateTable(headline="best")}
    result = run(federation, ranking, tmp_path, **only)
    assert not any(name.endswith("auroc") for name in result.runs[0].headline)
    assert "pooled_test_auroc" in result.runs[0].final
    assert result.plot("auroc").is_file()


def test_a_round_that_never_has_enough_clients_is_an_error(
    federation: fl.Federation, task: fl.Task, tmp_path: Path
) -> None:
    nobody = fl.Sampling(sampling="poisson", fraction=1e-9)
    with pytest.raises(QuorumError, match="nothing was learnt"):
        run(federation, task, tmp_path, cohort=nobody, algorithms=ALGORITHMS["fedavg"])


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
