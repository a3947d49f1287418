"""The result of a run: its numbers, its tables, and the models it trained."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedloom as fl
from fedloom import tree
from fedloom.errors import InputError, StoreError
from fedloom.experiment import experiment_file
from fedloom.experiment.plan import Plan
from fedloom.experiment.run import run_plan
from fedloom.experiment.run_folder import locked
from fedloom.experiment.store import Store
from fedloom.experiment.tables import EvaluateTable
from fedloom.results.result import CellResult, Result, overall
from fedloom.results.run_data import RunData
from tests.conftest import federation as data_of
from tests.experiment.small_run import ALGORITHMS, run


class NormedNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.out = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(x))


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
            assert tree.sha256(result.weights(label, client=number)[name]) == tree.sha256(dict(model.state_dict()))
    assert result.personal() == ["fedbn", "fedrep", "ditto"]
    with pytest.raises(InputError, match=r"no client 'aa'. Known: a, b, c. Did you mean 'a'"):
        result.model("ditto", client="aa")
    with pytest.raises(InputError, match="was run from Python"):
        Result.read(tmp_path).model("ditto", client="a")


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


@pytest.mark.parametrize(("rule", "choose"), [("best", min), ("last:2", lambda curve: sum(curve[-2:]) / 2)])
def test_the_headline_of_the_pooled_model_is_a_mean_over_clients(tmp_path: Path, rule: str, choose: Any) -> None:
    data, task = data_of([10, 60, 30], seed=1), fl.Task("logistic", args={"features": 16, "classes": 3})
    algorithms = {"pooled": fl.Pooled(lr=0.1)}
    result = run(data, task, tmp_path, algorithms=algorithms, evaluate=EvaluateTable(headline=rule))
    values: dict[tuple[str, int], list[float]] = {}
    for row in result.rows("clients"):
        if (row["metric"], row["split"]) == ("loss", "test"):
            values.setdefault((row["phase"], row["round"]), []).append(row["value"])
    last = result.runs[0].rounds
    means = {place: sum(some) / len(some) for place, some in values.items()}
    curve = [*(means["pre_fit", round] for round in range(2, last + 1)), means["final", last]]
    assert result.runs[0].headline["post_fit_test_loss"] == pytest.approx(choose(curve))
    assert means["final", last] != pytest.approx(means["post_fit", last])  # over all examples
    assert result.runs[0].final["post_fit_test_loss"] == result.runs[0].final["test_loss"]


def cell(status: str = "done", sha256: str | None = "aa") -> CellResult:
    return CellResult("fedavg", 1, status, 2, {"loss": 1.0}, {"loss": 0.5}, sha256)


def test_the_fingerprint_covers_all_cells_in_any_order_and_waits_for_the_last_one() -> None:
    one, two = (
        Result(Path("r"), "r", "done", cells) for cells in ((cell(), cell(sha256="bb")), (cell(sha256="bb"), cell()))
    )
    assert one.weights_sha256 == two.weights_sha256 == hashlib.sha256(b"aa\nbb").hexdigest()
    assert Result(Path("r"), "r", "running", (cell(), cell(sha256=None))).weights_sha256 is None
    assert Result(Path("r"), "r", "waiting", ()).weights_sha256 is None


@pytest.mark.parametrize(
    ("statuses", "worst"),
    [
        ([], "waiting"),
        (["done", "done"], "done"),
        (["done", "waiting"], "waiting"),
        (["waiting", "stopped"], "stopped"),
        (["stopped", "running"], "running"),
        (["running", "failed", "done"], "failed"),
    ],
)
def test_the_status_of_a_run_is_the_worst_of_its_cells(statuses: list[str], worst: str) -> None:
    assert overall({*statuses}, abandoned=False) == worst


def test_a_run_in_which_some_rounds_did_not_count_is_degraded() -> None:
    assert overall({"done"}, abandoned=True) == "degraded"
    assert overall({"failed", "done"}, abandoned=True) == "failed"


def test_json_names_the_headline_only_if_it_differs_from_the_end() -> None:
    (shown,) = Result(Path("r"), "r", "done", (cell(),)).json()["runs"]
    assert "headline" not in shown
    assert "error" not in shown
    (best,) = Result(Path("r"), "r", "done", (cell(),), rule="best").json()["runs"]
    assert best["headline"] == {"loss": 0.5}


def test_a_folder_without_a_database_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"is not a run folder: there is no run\.db in it"):
        Result.read(tmp_path)
    advice = "Check its name, or start the run first: .* If you just did, wait for its first lines"
    with pytest.raises(StoreError, match=f"nothing is not a run folder: there is no such folder. {advice}.$"):
        Result.read(tmp_path / "nothing")
    (tmp_path / "live").mkdir()
    (tmp_path / "live" / "run.db").touch()
    with pytest.raises(StoreError, match="Did you mean 'live'"):
        Result.read(tmp_path / "lvie")


def test_a_run_whose_process_is_gone_is_interrupted(comparison: Path, tmp_path: Path) -> None:
    """While a process holds the folder, the run goes on; once nobody does, it was interrupted."""
    folder = shutil.copytree(comparison, tmp_path / "run")
    with Store(folder) as store:
        first, *_, last = store.cells()
        store.set_status(first["id"], "running")
        store.set_status(last["id"], "waiting")
    with locked(folder):
        assert Result.read(folder).status == "running"
    found = Result.read(folder)
    assert found.status == RunData.read(folder).result.status == "interrupted"
    assert [found.runs[0].status, found.runs[-1].status] == ["interrupted", "waiting"]
    with Store(folder) as store:
        store.set_status(first["id"], "done")  # killed between two cells
    assert Result.read(folder).status == "interrupted"
    with Store(folder) as store:
        store.set_status(first["id"], "stopped")  # Ctrl-C: the rest waits
    assert Result.read(folder).status == "stopped"


def test_a_notebook_shows_the_picture_itself(comparison: Path, tmp_path: Path) -> None:
    from IPython.core.formatters import DisplayFormatter

    result = Result.read(comparison)
    for ending, kind in ((".png", "image/png"), (".svg", "image/svg+xml")):
        picture = result.plot("accuracy", tmp_path / f"picture{ending}")
        assert isinstance(picture, Path)
        shown, _ = DisplayFormatter().format(picture)
        assert [name for name in shown if name != "text/plain"] == [kind]
    assert result.plot("accuracy", tmp_path / "picture.pdf").read_bytes().startswith(b"%PDF")


def test_the_figure_of_a_picture_can_be_changed_and_saved_again(comparison: Path, tmp_path: Path) -> None:
    figure = Result.read(comparison).plot("accuracy", tmp_path / "picture.svg").figure
    assert figure is not None
    figure.axes[0].set_title("A title of mine")
    figure.savefig(tmp_path / "mine.pdf")
    assert (tmp_path / "mine.pdf").read_bytes().startswith(b"%PDF")


def test_code_that_came_with_a_run_s_folder_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that somebody sent you may name a file inside of itself; models are rebuilt only from your own files."""
    net = "from torch import nn\n\n\nclass Net(nn.Linear):\n    def __init__(self):\n        super().__init__(64, 10)\n"
    (tmp_path / "net.py").write_text(net)
    values = {
        "rounds": 1,
        "data": {"source": "digits", "partition": {"name": "iid", "clients": 2}},
        "task": {"model": "net.py:Net"},
        "algorithm": {"fedavg": {}},
        "run": {"backend": "serial"},
    }
    folder = tmp_path / "run"
    run_plan(Plan.of(experiment_file.parse(values, tmp_path)), folder)
    monkeypatch.chdir(tmp_path)
    assert Result.read(folder).model("fedavg").out_features == 10
    (folder / "net.py").write_text(f"open({str(tmp_path / 'it-ran')!r}, 'w')\n{net}")
    file = folder / "experiment.toml"
    file.write_text(file.read_text().replace("net.py:Net", "run/net.py:Net"))
    with pytest.raises(InputError, match=r"run/net\.py:Net, is in its own folder.* Nothing was loaded"):
        Result.read(folder).model("fedavg")
    assert not (tmp_path / "it-ran").exists()


def test_a_result_is_shown_in_one_line(comparison: Path) -> None:
    assert repr(Result.read(comparison)) == (
        f"Result(folder={comparison!r}, name='small', status='done', rule='final', metrics=('accuracy',))"
    )


def test_an_empty_table_has_the_columns_of_a_full_one(federation: fl.Federation, task: fl.Task, tmp_path: Path) -> None:
    empty = run(federation, task, tmp_path).frame("public")
    assert len(empty) == 0
    assert {"algorithm", "seed", "round"} <= {*empty.columns}


def test_the_model_that_predicts_is_the_first_that_all_clients_share(tmp_path: Path) -> None:
    x = np.random.default_rng(1).normal(size=(40, 2)).astype("float32")
    data = fl.Federation.from_arrays(x, (x[:, 0] > 0).astype(int), clients=2)
    algorithms = {"alone": fl.LocalOnly(), "together": fl.FedAvg()}
    found = fl.run(data, fl.Task(lambda: nn.Linear(2, 2)), algorithms, rounds=1, out=tmp_path / "run", backend="serial")
    shared = found.predictor("together")(torch.from_numpy(x))
    assert torch.equal(found.predictor()(torch.from_numpy(x)), shared)
    assert found.predicting(None, None, "0").algorithm == "alone"


def test_a_model_is_the_global_one_or_that_of_a_client_who_is_named(
    federation: fl.Federation, task: fl.Task, tmp_path: Path
) -> None:
    algorithms = {"alone": fl.LocalOnly(lr=0.1), "fedavg": fl.FedAvg(lr=0.1)}
    result = fl.run(federation, task, algorithms, 1, backend="serial", out=tmp_path)
    with pytest.raises(InputError, match=r"alone has no global model: every client has its own\. Name .*fedavg"):
        result.model("alone")
    name = federation.name(1)
    (own,) = result.weights("alone", client=name).values()
    assert result.model("alone", client=name).state_dict().keys() == own.keys()
    shared = result.weights("fedavg")["model"]
    for leaf, found in result.model().state_dict().items():  # of the first algorithm that has one
        assert found.equal(shared[leaf])
