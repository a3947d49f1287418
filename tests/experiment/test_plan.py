"""The plan of an experiment file: its settings, and data and task for each seed."""

from __future__ import annotations

from contextlib import nullcontext
from math import nan
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom.data.preprocessing import Column, Preprocessing
from fedloom.errors import InputError
from fedloom.experiment import experiment_file
from fedloom.experiment.experiment_file import parse
from fedloom.experiment.plan import Plan
from fedloom.experiment.run import run_plan

DIGITS = {"source": "digits", "partition": {"name": "dirichlet", "clients": 4, "alpha": 1.0}}


def plan(data: dict[str, Any] | None = None, task: dict[str, Any] | None = None, base: Path = Path()) -> Plan:
    values = {"rounds": 3, "seeds": [1, 2], "data": {**DIGITS, **(data or {})}, "task": task or {}}
    return Plan.of(experiment_file.parse({**values, "algorithm": {"fedavg": {}}}, base, default_name="small"))


def test_a_plan_has_the_settings_of_its_file() -> None:
    made = plan()
    assert (made.name, made.rounds, made.seeds, list(made.algorithms)) == ("small", 3, (1, 2), ["fedavg"])
    assert made.resolved is not None
    assert made.resolved["data"]["partition"] == DIGITS["partition"]
    assert made.description()["data"]["source"] == "digits"


def test_seeds_share_data_and_task_unless_each_draws_its_own() -> None:
    shared = plan()
    assert shared.federation(1) is shared.federation(2)
    assert shared.task(1) is shared.task(2)
    drawn = plan({"seed": "run"}, {"seed": "run"})
    assert drawn.federation(1).fingerprint != drawn.federation(2).fingerprint
    one, two = (drawn.task(seed).initial() for seed in (1, 2))
    assert not torch.equal(next(iter(one.values())), next(iter(two.values())))
    assert drawn.federation(1).fingerprint == plan({"seed": 1}).federation(9).fingerprint


def test_a_partition_that_does_not_fit_the_data_is_refused() -> None:
    with pytest.raises(InputError, match=r"'clients' parameter of Iid must be at most the number of examples, 1797"):
        plan({"partition": {"name": "iid", "clients": 100_000}}).federation(1)


def test_your_own_model_and_loss_are_read_from_the_folder_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch.nn.functional as F\n"
        "from fedloom.models.digits_mlp import DigitsMLP as Net\n"
        "def loss(output, target):\n    return 2 * F.cross_entropy(output, target, reduction='none')\n"
    )
    made = plan(task={"model": "mine.py:Net", "loss": "mine.py:loss"}, base=tmp_path).task(1)
    assert type(made.build()).__name__ == "DigitsMLP"
    output, target = torch.zeros(1, 10), torch.zeros(1, dtype=torch.int64)
    assert made.loss(output, target).item() == pytest.approx(2 * torch.log(torch.tensor(10.0)).item())


def test_an_algorithm_that_secure_aggregation_cannot_protect_is_refused_when_it_is_planned() -> None:
    values = {"data": {"source": "digits"}, "algorithm": {"ifca": {}}, "privacy": {"secure_aggregation": {}}}
    with pytest.raises(InputError, match="ifca sums over some of a round's clients"):
        Plan.of(experiment_file.parse(values))
    few = {**values, "algorithm": {"fedavg": {"weights": "uniform"}}, "cohort": {"count": 2}}
    with pytest.raises(InputError, match="min_clients = 3 clients in a round, and a round has 2"):
        Plan.of(experiment_file.parse(few))


def table(folder: Path, **data: Any) -> dict[str, Any]:
    (folder / "days.csv").write_text("x,days,set\n1,3,train\n2,7,test\n3,4,train\n")
    return {"source": "csv", "path": "days.csv", "label": "days", "partition": {"name": "iid", "clients": 1}, **data}


def test_whole_numbers_are_a_regression_if_the_loss_is_for_numbers(tmp_path: Path) -> None:
    data = table(tmp_path, drop=["set"])
    assert plan(data, {"loss": "mse"}, tmp_path).federation(1).y.sort().values.tolist() == [3.0, 4.0, 7.0]
    assert plan(data, {}, tmp_path).federation(1).classes == ("3", "4", "7")
    assert plan({**data, "task": "classification"}, {"loss": "mse"}, tmp_path).federation(1).classes == ("3", "4", "7")


def test_a_column_and_shares_cannot_both_say_the_splits(tmp_path: Path) -> None:
    data = table(tmp_path, split_column="set")
    assert plan(data, {"loss": "mse"}, tmp_path).federation(1).sizes("test").tolist() == [1]
    with pytest.raises(InputError, match="both split and split_column"):
        plan({**data, "split": [1.0, 0.0, 0.0]}, {"loss": "mse"}, tmp_path).federation(1)


AGREED = Preprocessing(
    columns=(Column(name="age"), Column(name="ward", categories=("general", "icu"))),
    marks={"": nan},
    missing=True,
    mean=(60.0, 0.0, 0.0),
    std=(10.0, 1.0, 1.0),
    shape=(3,),
    label=("dead",),
    classes=("no", "yes"),
)


def agreed_data(folder: Path) -> dict[str, Any]:
    """Return the table of a site's data that has what an agreed file does not decide."""
    (folder / "p.csv").write_text("age,ward,dead\n70,icu,no\n50,icu,no\n,icu,no\n")
    AGREED.write(folder / "agreed.json")
    one = {"name": "iid", "clients": 1}
    return {"source": "csv", "path": "p.csv", "label": "dead", "preprocessing": "agreed.json", "partition": one}


@pytest.mark.parametrize("also", [{}, {"normalize": "federated", "fill": "mean", "categorical": ["ward"]}])
def test_a_file_that_sites_agreed_on_decides_categories_classes_and_statistics(
    tmp_path: Path, also: dict[str, Any]
) -> None:
    data = {**agreed_data(tmp_path), **also}
    made = plan(data, {}, tmp_path).federation(1)
    assert sorted(made.x.tolist()) == [[-1.0, 0.0, 1.0], [0.0, 0.0, 1.0], [1.0, 0.0, 1.0]]
    assert (made.classes, made.preprocessing.sha256) == (("no", "yes"), AGREED.sha256)
    (tmp_path / "p.csv").write_text("age,ward,dead\n70,ICU,no\n")
    with pytest.raises(InputError, match=r"Line 2 of .* has 'ICU' in column 'ward', whose categories are general, icu"):
        plan(data, {}, tmp_path).federation(1)
    with pytest.raises(InputError, match='preprocessing is for source = "csv"'):
        plan({"preprocessing": "agreed.json"}, {}, tmp_path).federation(1)


@pytest.mark.parametrize(
    ("scores", "clear"), [("18 20 73", False), ("0 1 2", True), ("18 73 18", True), ("a b 3", True)]
)
def test_a_loss_of_your_own_gets_no_whole_numbers_as_numbers_of_classes_in_silence(
    tmp_path: Path, scores: str, clear: bool
) -> None:
    rows = "".join(f"{place},{score}\n" for place, score in enumerate(scores.split() * 4))
    (tmp_path / "p.csv").write_text("age,score\n" + rows)
    (tmp_path / "own.py").write_text("def own(outputs, labels):\n    return (outputs.sum() - labels.sum()) ** 2\n")
    data = {"source": "csv", "path": "p.csv", "label": "score", "partition": {"name": "iid", "clients": 2}}

    def classes(**more: str) -> tuple[str, ...]:
        return plan({**data, **more}, {"loss": "own.py:own"}, tmp_path).federation(1).classes

    with nullcontext() if clear else pytest.raises(InputError, match=r"are 3 whole numbers, 18 to 73, .* gets 0 to 2"):
        assert len(classes()) == len(set(scores.split()))
    assert len(classes(task="classification")) == len(set(scores.split()))
    if "a" not in scores:
        assert classes(task="regression") == ()


@pytest.mark.parametrize(
    ("also", "said"),
    [
        (
            {"normalize": "client"},
            r'normalize = "client" scales .* preprocessing = "agreed.json" has .* Leave normalize',
        ),
        (
            {"fill": "zero"},
            "fill means 0 for empty cells here, and the agreed file says nan for empty cells.* Leave out",
        ),
        ({"missing": {"?": 0}}, "missing means '\\?' = 0 here, and the agreed file says nan for empty cells"),
        ({"categorical": ["age"]}, "categorical means age here, and the agreed file says ward"),
        ({"task": "regression"}, "task means regression here, and the agreed file says classification"),
        ({"label": "ward"}, r"label means ward here, and the agreed file says dead\. Agree again"),
        ({"label": "Dead"}, r"label means Dead here, and the agreed file says dead\. Did you mean 'dead'\?$"),
        ({"categorical": ["Ward"]}, r"means Ward here, .* says ward\. Did you mean 'ward'\? Leave out categorical"),
    ],
)
def test_keys_that_contradict_an_agreed_file_are_refused(tmp_path: Path, also: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        plan({**agreed_data(tmp_path), **also}, {}, tmp_path).federation(1)


@pytest.mark.parametrize("also", [{}, {"fill": "mean"}, {"task": "classification"}])
def test_the_file_that_a_run_keeps_says_the_same_with_what_sites_agreed_on(
    tmp_path: Path, also: dict[str, Any]
) -> None:
    written = parse({"rounds": 1, "data": {**agreed_data(tmp_path), **also}, "algorithm": {"fedavg": {}}}, tmp_path)
    read = parse(written.as_written(), tmp_path)
    assert read.description() == written.description()
    assert Plan.of(read).federation(1).fingerprint == Plan.of(written).federation(1).fingerprint


@pytest.mark.parametrize("text", ['{"mean": [1]}', '{"columns": [{"name": "age"}], "mean": [1, 2], "std": [1, 2]}'])
def test_a_broken_agreed_file_is_named(tmp_path: Path, text: str) -> None:
    data = agreed_data(tmp_path)
    (tmp_path / "agreed.json").write_text(text)
    with pytest.raises(InputError, match=r"agreed\.json is not a file of `fedloom data agree`"):
        plan(data, {}, tmp_path).federation(1)


def test_asynchronous_rounds_do_not_know_their_cohort_before() -> None:
    values = {
        "rounds": 3,
        "data": DIGITS,
        "cohort": {"mode": "async", "buffer": 2},
        "system": {"step": 1.0},
        "evaluate": {"clients": "cohort"},
        "algorithm": {"fedavg": {}},
    }
    with pytest.raises(InputError, match=r'in asynchronous rounds nobody knows .* Use clients = "all"'):
        Plan.of(experiment_file.parse(values))
    Plan.of(experiment_file.parse({**values, "evaluate": {}}))


def test_without_data_a_model_has_as_many_inputs_as_the_sites_agreed_on_features(tmp_path: Path) -> None:
    columns = (Column(name="age"), Column(name="ward", categories=("a", "b")))
    Preprocessing(columns=columns, shape=(3,), mean=(1, 0, 0), std=(1, 1, 1)).write(tmp_path / "agreed.json")
    values = {"data": {"preprocessing": "agreed.json"}, "task": {"model": "logistic"}}
    made = Plan.of(parse(values, tmp_path))
    assert made.task(1).form["out.weight"][0] == (2, 3)


@pytest.mark.parametrize(("kind", "metric"), [("regression", "mae"), ("classification", "accuracy")])
def test_with_a_loss_of_your_own_a_file_measures_what_fits_the_labels(tmp_path: Path, kind: str, metric: str) -> None:
    rows = "\n".join(f"{n % 7},{n % 3},{n % 2 if kind == 'classification' else n / 7}" for n in range(40))
    (tmp_path / "mine.csv").write_text(f"a,b,y\n{rows}\n")
    loss = "cross_entropy(o, t)" if kind == "classification" else "huber_loss(o.reshape(t.shape), t)"
    (tmp_path / "own.py").write_text(f"from torch.nn import functional as F\n\n\ndef own(o, t):\n    return F.{loss}\n")
    classes = 2 if kind == "classification" else 1
    values = {
        "rounds": 1,
        "data": {"source": "csv", "path": "mine.csv", "label": "y", "partition": {"name": "iid", "clients": 2}},
        "task": {"model": "mlp", "loss": "own.py:own", "args": {"classes": classes}},
        "run": {"backend": "serial"},
    }
    experiment = parse(values, tmp_path)
    assert "metrics" not in experiment.resolved()["task"]  # so that a copy of the file means the same
    result = run_plan(Plan.of(experiment), tmp_path / "out")
    assert tuple(result.metrics) == (metric,)
    assert f"test_{metric}" in result.runs[0].final
