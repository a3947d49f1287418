"""One cell: its rounds, checkpoints, target and end."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedloom as fl
from fedloom import tree
from fedloom.algorithms import Ditto
from fedloom.errors import FedloomError, InputError, QuorumError, StoreError, TrainingError
from fedloom.experiment.cell import Cell
from fedloom.experiment.progress import Progress, Silent
from fedloom.experiment.store import Store
from fedloom.experiment.tables import EvaluateTable
from fedloom.results.report_warnings import cautions
from fedloom.results.result import Result
from fedloom.results.run_data import RunData
from fedloom.tree import Groups, add
from tests.experiment.small_run import ALGORITHMS, StopAfter, run


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


def test_checkpoints_need_not_be_made_every_round(federation: fl.Federation, task: fl.Task, tmp_path: Path) -> None:
    whole = run(federation, task, tmp_path / "whole", rounds=5)
    run(federation, task, tmp_path / "parts", rounds=5, checkpoint_every=3, should_stop=StopAfter(2))
    again = run(federation, task, tmp_path / "parts", rounds=5, checkpoint_every=3)
    assert again.weights_sha256 == whole.weights_sha256


@pytest.mark.parametrize(("kept", "done", "lost"), [(0, 3, "2 rounds, from 1 to 2"), (1, 4, "2 rounds, from 2 to 3")])
def test_a_run_whose_database_lost_rounds_continues_from_a_checkpoint_and_says_so(
    kept: int, done: int, lost: str, federation: fl.Federation, task: fl.Task, tmp_path: Path
) -> None:
    """`done` rounds were computed; a finished cell measures its last round again."""
    fedavg = {"fedavg": ALGORITHMS["fedavg"]}
    whole = run(federation, task, tmp_path / "whole", algorithms=fedavg)
    run(federation, task, tmp_path / "parts", algorithms=fedavg, should_stop=StopAfter(done))
    with Store(tmp_path / "parts") as store:
        store.forget_after(1, kept)
    notes: list[str] = []
    progress = Silent()
    progress.note = notes.append  # type: ignore[method-assign]
    again = run(federation, task, tmp_path / "parts", algorithms=fedavg, progress=progress)
    assert lost in " ".join(notes)
    assert again.weights_sha256 == whole.weights_sha256
    assert again.runs[0].final == whole.runs[0].final
    first, last = lost.split("from ")[1].split(" to ")
    assert f"what 2 rounds between {first} and {last} measured is missing" in " ".join(
        cautions(RunData.read(again.folder))
    )
    assert not any("missing" in caution for caution in cautions(RunData.read(whole.folder)))


def test_a_finished_cell_without_its_numbers_or_an_earlier_checkpoint_is_refused(
    federation: fl.Federation, task: fl.Task, tmp_path: Path
) -> None:
    run(federation, task, tmp_path, keep_checkpoints=1)
    with Store(tmp_path) as store:
        store.forget_after(1, 2)
    with pytest.raises(StoreError, match=r"fedavg \(seed 1\) is done, but .* lost what its last round measured"):
        run(federation, task, tmp_path, keep_checkpoints=1)


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
    assert tree.is_sound(weights, weights)


def test_a_cell_whose_workers_end_because_another_cell_failed_is_stopped(
    federation: fl.Federation, task: fl.Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def workers_are_gone(*_: object) -> bool:
        raise TrainingError("a worker process ended")

    monkeypatch.setattr(Cell, "_rounds", workers_are_gone)
    with pytest.raises(TrainingError):
        run(federation, task, tmp_path, algorithms=fl.FedAvg(), should_stop=lambda: True)
    (cell,) = Result.read(tmp_path).runs
    assert (cell.status, cell.error) == ("stopped", None)


def test_only_a_cell_that_is_done_counts_in_the_progress(
    federation: fl.Federation, task: fl.Task, tmp_path: Path
) -> None:
    ended: list[bool] = []

    class Listening(Progress):
        def end(self, cell: str, done: bool = True) -> None:
            ended.append(done)

    settings: dict[str, Any] = {"algorithms": fl.FedAvg(), "progress": Listening()}
    run(federation, task, tmp_path, should_stop=StopAfter(1), **settings)
    run(federation, task, tmp_path, **settings)
    assert ended == [False, True]


def test_a_damaged_checkpoint_falls_back_to_the_one_before(
    federation: fl.Federation, task: fl.Task, tmp_path: Path
) -> None:
    notes: list[str] = []

    class Listening(Progress):
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


def test_a_kill_after_the_last_checkpoint_loses_nothing(
    federation: fl.Federation, task: fl.Task, tmp_path: Path
) -> None:
    whole = run(federation, task, tmp_path)
    with Store(tmp_path) as store:  # as if the process had died before it could note that it was done
        for cell in store.cells():
            store.set_status(cell["id"], "running")
    assert Result.read(tmp_path).weights_sha256 is None
    assert run(federation, task, tmp_path).json() == whole.json()


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


def test_a_run_that_stops_at_its_target_has_final_numbers(
    federation: fl.Federation, task: fl.Task, tmp_path: Path
) -> None:
    at_once = EvaluateTable(target={"accuracy": 0.01}, stop="target", universal=True)
    result = run(federation, task, tmp_path, rounds=9, algorithms=ALGORITHMS["fedavg"], evaluate=at_once)
    assert result.runs[0].rounds == 1
    assert {"test_accuracy", "universal_accuracy"} <= result.runs[0].final.keys()
    with pytest.raises(InputError, match="target must be about one of loss, accuracy"):
        run(federation, task, tmp_path / "x", evaluate=EvaluateTable(target={"auroc": 0.5}, stop="target"))


def test_a_round_for_which_nobody_is_drawn_is_not_abandoned(
    federation: fl.Federation, task: fl.Task, tmp_path: Path
) -> None:
    few = fl.Sampling(sampling="poisson", fraction=0.1, max_abandoned=0)
    result = run(federation, task, tmp_path, cohort=few, rounds=8, algorithms=ALGORITHMS["fedavg"])
    assert (result.status, result.runs[0].abandoned) == ("done", 0)
    rounds = [(row["participants"] > 0, row["complete"]) for row in result.rows("rounds")]
    assert set(rounds) == {(True, 1), (False, 1)}


def test_a_round_that_never_has_enough_clients_is_an_error(
    federation: fl.Federation, task: fl.Task, tmp_path: Path
) -> None:
    nobody = fl.Sampling(sampling="poisson", fraction=1e-9)
    with pytest.raises(QuorumError, match="Nothing was learnt by fedavg: no round had enough clients"):
        run(federation, task, tmp_path, cohort=nobody, algorithms=ALGORITHMS["fedavg"])


def test_a_run_whose_updates_are_all_left_out_says_that_it_diverges(
    federation: fl.Federation, task: fl.Task, tmp_path: Path
) -> None:
    judged, far = fl.Sampling(outlier_factor=10), fl.Pooled(lr=1e15, batch_size="full")
    with pytest.raises(QuorumError, match="Nothing was learnt by pooled: updates were left out, because training"):
        run(federation, task, tmp_path, rounds=1, algorithms={"pooled": far}, cohort=judged)


class AsksNobody(fl.FedAvg):
    def round(self, state: Any, cohort: Any) -> Any:
        return state


class MakesNan(fl.FedAvg):
    def correct(self, step: Any, shared: Any, own: Any) -> Any:
        return {name: leaf * float("nan") for name, leaf in step.grad.items()}


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (AsksNobody(), r"learnt by mine: AsksNobody.round \(\S+, line \d+\) asked no clients: call cohort.reduce"),
        (MakesNan(batch_size=4), r"Does MakesNan.correct \(\S+, line \d+\) return NaN or infinity\?"),
    ],
)
def test_methods_of_your_own_that_spoil_a_round_are_named(
    federation: fl.Federation, task: fl.Task, tmp_path: Path, algorithm: fl.Algorithm, message: str
) -> None:
    with pytest.raises(FedloomError, match=message):
        run(federation, task, tmp_path, algorithms={"mine": algorithm})


@pytest.mark.slow
def test_the_fingerprint_covers_models_that_clients_keep(
    federation: fl.Federation, task: fl.Task, tmp_path: Path
) -> None:
    def ditto(lam: float, name: str) -> Result:
        return fl.run(federation, task, {"ditto": Ditto(lam=lam, lr=0.1)}, rounds=2, out=tmp_path / name)

    weak, strong, again = ditto(0.1, "weak"), ditto(5.0, "strong"), ditto(0.1, "again")
    shared = [result.weights("ditto")["model"] for result in (weak, strong)]
    assert all(torch.equal(shared[0][name], shared[1][name]) for name in shared[0])  # only clients' own models differ
    assert weak.weights_sha256 == again.weights_sha256 != strong.weights_sha256


class Random(fl.FedAvg):
    """FedAvg whose server adds noise: from a generator that is named."""

    noise: str = "torch"

    def round(self, state: Groups, cohort: fl.Cohort) -> Groups:
        made = torch.Generator().manual_seed(cohort.key("noise")) if self.noise == "key" else None
        mean = super().round(state, cohort)["model"]
        scale = {"numpy": np.random.normal, "python": random.random}.get(self.noise, lambda: 0.1)()
        drawn = {name: torch.randn(leaf.shape, generator=made) for name, leaf in mean.items()}
        return {"model": add(mean, drawn, scale=scale)}


@pytest.mark.parametrize("noise", ["torch", "numpy", "python", "key"])
def test_a_server_that_draws_what_nobody_can_repeat_is_a_caution(
    federation: fl.Federation, task: fl.Task, tmp_path: Path, noise: str
) -> None:
    notes: list[str] = []
    progress = Silent()
    progress.note = notes.append  # type: ignore[method-assign]
    algorithms = {"mine": Random(noise=noise), "fedavg": fl.FedAvg()}
    if noise != "torch":
        algorithms.pop("fedavg")
    result = run(federation, task, tmp_path, 3, algorithms=algorithms, seeds=2, progress=progress)
    said = [text for text in cautions(RunData.read(result.folder)) if "global generator" in text]
    assert [text.partition(" (")[0] for text in said] == (
        [] if noise == "key" else ["mine: the server's half, Random.round"]
    )
    assert [text for text in notes if "global generator" in text] == [f"Caution: {text}" for text in said]


def test_the_round_in_which_a_run_was_stopped_is_not_its_last_one(
    federation: fl.Federation, task: fl.Task, tmp_path: Path
) -> None:
    """Its model was not measured as a final one."""
    one = {"fedavg": ALGORITHMS["fedavg"]}
    stopped = run(federation, task, tmp_path, rounds=5, algorithms=one, seeds=1, should_stop=StopAfter(2))
    (done,) = (cell.rounds for cell in stopped.runs)
    with pytest.raises(InputError, match=f"was stopped after round {done}, which was not to be its last: ask for more"):
        run(federation, task, tmp_path, rounds=done, algorithms=one, seeds=1)
    more = run(federation, task, tmp_path, rounds=done + 1, algorithms=one, seeds=1)
    assert more.status == "done"
    assert "test_accuracy" in more.runs[0].final
