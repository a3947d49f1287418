"""A dense net whose file does not say how many outputs it has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedloom.data.preprocessing import Column, Preprocessing
from fedloom.errors import InputError
from fedloom.experiment.checks import check_start
from fedloom.experiment.experiment_file import parse
from fedloom.experiment.plan import Plan
from fedloom.experiment.run import run_plan
from fedloom.results.result import Result


def table(folder: Path, label: str = "stage", **kinds: tuple[str, ...]) -> dict[str, Any]:
    """One file for each client, with labels that take turns."""
    (folder / "sites").mkdir(parents=True, exist_ok=True)
    for client, names in kinds.items():
        rows = "".join(f"{n % 7},{n % 5 + len(client) / 9},{n / 9},{names[n % len(names)]}\n" for n in range(40))
        (folder / "sites" / f"{client}.csv").write_text(f"a,b,days,stage\n{rows}")
    drop = ["days"] if label == "stage" else []
    return {"data": {"source": "csv", "path": "sites", "label": label, "drop": drop}, "run": {"backend": "serial"}}


STAGES = ("none", "mild", "severe")


def test_a_table_without_a_task_trains_a_net_with_an_output_for_each_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {**table(tmp_path, north=STAGES, southern=STAGES), "rounds": 1}
    plan = Plan.of(parse(values, tmp_path))
    assert (plan.task(1).model, plan.task(1).args) == ("mlp", {"classes": 3})
    run_plan(plan, tmp_path / "out")
    monkeypatch.chdir(tmp_path)  # a folder is read where its experiment file was
    for file in (tmp_path / "sites").iterdir():
        file.unlink()  # what the model looks like is kept with the run
    told = Result.read(tmp_path / "out").predict([[1.0, 2.0]])
    assert {name for name in told if name.startswith("probability ")} == {f"probability {stage}" for stage in STAGES}
    client = Result.read(tmp_path / "out").weights("fedavg", client="north")
    assert client["north"]["layers.1.bias"].shape == (3,)


@pytest.mark.parametrize(
    ("label", "task", "outputs"),
    [
        ("days", {"loss": "mse"}, 1),
        ("days", {"loss": "mae", "model": "logistic"}, 1),
        (["days", "b"], {"loss": "mse"}, 2),
        ("stage", {"loss": "bce"}, 1),
        ("stage", {"model": "logistic"}, 2),
    ],
)
def test_the_loss_and_the_labels_decide_the_outputs(
    tmp_path: Path, label: Any, task: dict[str, Any], outputs: int
) -> None:
    values = {**table(tmp_path, label="days", x=("0", "1"), y=("0", "1")), "task": task}
    values["data"] |= {"label": label, "drop": ["days"] if label == "stage" else ["stage"]}
    plan = Plan.of(parse(values, tmp_path))
    assert plan.task(1).args == {"classes": outputs}
    check_start(plan)  # the model fits the labels


def test_classes_that_may_be_misspelt_get_no_outputs_before_somebody_has_looked(tmp_path: Path) -> None:
    values = table(tmp_path, north=STAGES, southern=STAGES, west=("none", "mild", "sever"))
    with pytest.raises(InputError, match=r"Only one client has sever .* If they really are 4 classes"):
        check_start(Plan.of(parse(values, tmp_path)))
    values["task"] = {"args": {"classes": 4}}
    check_start(Plan.of(parse(values, tmp_path)))


@pytest.mark.parametrize("where", ["served", "at_site"])
def test_a_site_does_not_decide_for_the_others(tmp_path: Path, where: str) -> None:
    values = table(tmp_path, north=STAGES, southern=STAGES)
    assert Plan.of(parse(values, tmp_path), **{where: True}).task(1).args == {}
    columns = (Column(name="a"), Column(name="b"))
    agreed = Preprocessing(columns=columns, mean=(3.0, 2.0), std=(1.0, 1.0), shape=(2,), label=("stage",))
    agreed.replace(classes=(*STAGES, "worse")).write(tmp_path / "agreed.json")
    values["data"]["preprocessing"] = "agreed.json"
    assert Plan.of(parse(values, tmp_path), **{where: True}).task(1).args == {"classes": 4}


def test_other_data_keeps_its_usual_model_and_yours_its_arguments(tmp_path: Path) -> None:
    assert parse({}).task.model == parse({"data": {"source": "digits"}}).task.model == "digits_mlp"
    assert parse({"data": {"preprocessing": "agreed.json"}}).task.model == "mlp"
    (tmp_path / "own.py").write_text(
        "from torch import nn\n\n\ndef net(classes=2):\n    return nn.LazyLinear(classes)\n"
    )
    values = {**table(tmp_path, north=STAGES, southern=STAGES), "task": {"model": "own.py:net"}}
    assert Plan.of(parse(values, tmp_path)).task(1).args == {}
