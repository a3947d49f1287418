"""What is exported is read back by the programs it is for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fedloom.errors import InputError, StoreError
from fedloom.results import export
from fedloom.results.prediction import Predictor
from fedloom.results.result import TABLES, CellResult, Result
from fedloom.results.run_data import RunData
from tests.results.hospitals import hospitals


@pytest.fixture
def result(comparison: Path) -> Result:
    return Result.read(comparison)


def test_parquet_holds_what_the_database_holds(result: Result, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    written = export.export_parquet(result, tmp_path)
    assert {path.stem for path in written} == {table for table in TABLES if result.rows(table)}
    for path in written:
        assert parquet.read_table(path).to_pylist() == result.rows(path.stem)


def test_tensorboard_reads_the_curves_and_a_second_export_replaces_them(result: Result, tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    export.export_tensorboard(result, tmp_path)
    folders = export.export_tensorboard(result, tmp_path)
    assert [folder.name for folder in folders] == ["fedavg-1", "local-1", "pooled-1", "fedavg-2", "local-2", "pooled-2"]
    run = RunData.read(result.folder)
    for folder, (label, seed) in zip(folders, run.cells, strict=True):
        events = reader.EventAccumulator(str(folder), size_guidance={reader.SCALARS: 0})
        events.Reload()
        read = {(tag, event.step): event.value for tag in events.Tags()["scalars"] for event in events.Scalars(tag)}
        expected = {(scalar.tag, scalar.round): scalar.value for scalar in export.scalars(run, label, seed)}
        assert read.keys() == expected.keys()
        assert list(read.values()) == pytest.approx([expected[key] for key in read], rel=1e-6)
        assert sum(len(events.Scalars(tag)) for tag in events.Tags()["scalars"]) == len(expected)
    stats = run.client_values("fedavg", 1, "post_fit", "accuracy").by_round()
    found = {s.round: s.value for s in export.scalars(run, "fedavg", 1) if s.tag == "clients/post_fit/test/accuracy"}
    assert found == dict(zip(stats.index.tolist(), stats.mean.tolist(), strict=True))


@pytest.mark.filterwarnings("ignore")  # MLflow's own
def test_mlflow_reads_the_runs(result: Result, tmp_path: Path) -> None:
    tracking = pytest.importorskip("mlflow.tracking")
    pytest.importorskip("alembic")  # MLflow's databases need it
    (path,) = export.export_mlflow(result, tmp_path)
    client = tracking.MlflowClient(tracking_uri=f"sqlite:///{path}")
    (experiment,) = (one for one in client.search_experiments() if one.name != "Default")
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert set(runs) == {f"{label} (seed {seed})" for label, seed in RunData.read(result.folder).cells}
    run = runs["fedavg (seed 2)"]
    assert run.info.status == "FINISHED"
    assert run.data.params["seed"] == "2"
    history = client.get_metric_history(run.info.run_id, "clients/post_fit/test/accuracy")
    stats = RunData.read(result.folder).client_values("fedavg", 2, "post_fit", "accuracy").by_round()
    assert {one.step: one.value for one in history} == dict(zip(stats.index.tolist(), stats.mean.tolist(), strict=True))
    with pytest.raises(StoreError, match="exists already"):
        export.export_mlflow(result, tmp_path)


def test_csv_holds_what_the_database_holds(result: Result, tmp_path: Path) -> None:
    import csv

    for path in export.export_csv(result, tmp_path):
        with open(path, newline="") as file:
            read = list(csv.DictReader(file))
        rows = [{k: "" if v is None else str(v) for k, v in row.items()} for row in result.rows(path.stem)]
        assert read == rows


NAMES = {
    "features": ["age", "ward=general", "ward=icu", "ward=surgery", "crp"],
    "label": ["outcome"],
    "classes": ["alive", "dead"],
}


@pytest.fixture(scope="module")
def patients(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return hospitals(tmp_path_factory.mktemp("hospitals"))


def features(patients: Result) -> torch.Tensor:
    cells = {"age": ["70", "33"], "ward": ["icu", "surgery"], "crp": ["3.5", ""]}
    return patients.preprocessing(1).encode(cells, str)


def test_a_torch_program_has_the_preprocessing_in_it(patients: Result, tmp_path: Path) -> None:
    written = export.export_torch(patients, tmp_path)
    assert [path.name for path in written] == ["fedavg-1.pt2", "preprocessing-1.json", "MODEL_CARD.md"]
    x = features(patients)
    expected = patients.predictor()(x)
    program = torch.export.load(tmp_path / "fedavg-1.pt2").module()
    assert torch.equal(program(x), expected)
    assert torch.equal(program(x[:1]), expected[:1])
    assert not program(x).requires_grad
    names = dict.fromkeys(NAMES, "")
    torch.export.load(tmp_path / "fedavg-1.pt2", extra_files=names)
    assert {what: json.loads(text) for what, text in names.items()} == NAMES


def test_an_algorithm_without_a_global_model_is_named(patients: Result, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^local has no global model: name a client with --client\.$"):
        export.export_torch(patients.only("local", None), tmp_path)


def test_an_onnx_file_has_the_preprocessing_in_it(patients: Result, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    assert export.export_onnx(patients, tmp_path, "oslo")[0].name == "fedavg-1-oslo.onnx"
    x = features(patients)
    session = runtime.InferenceSession(tmp_path / "local-1-oslo.onnx")
    assert session.get_inputs()[0].shape == ["batch", 5]
    assert session.get_outputs()[0].shape == ["batch", 2]
    told = session.get_modelmeta().custom_metadata_map
    assert {what: json.loads(told[what]) for what in NAMES} == NAMES
    (found,) = session.run(None, {"features": x.numpy()})
    expected = patients.predictor("local", client="oslo")(x)
    torch.testing.assert_close(torch.from_numpy(found), expected.detach(), rtol=1e-5, atol=1e-7)


def test_weights_are_named_after_their_clients(patients: Result, tmp_path: Path) -> None:
    names = [path.name for path in export.export_models(patients, tmp_path)]
    assert "local-1-berlin.safetensors" in names
    assert names[-1] == "MODEL_CARD.md"
    card = (tmp_path / "MODEL_CARD.md").read_text()
    assert all(f"| {name} | `" in card for name in names[:-1])


def test_clients_whose_files_would_have_one_name_keep_apart() -> None:
    cell = CellResult("local", 1, "done", 1, {}, {}, None)
    assert export._stems(cell, ["a/b", "a_b", "c"]) == ["local-1-a_b-0", "local-1-a_b-1", "local-1-c"]


def test_a_program_leaves_out_outputs_that_belong_to_no_class(patients: Result, tmp_path: Path) -> None:
    class Wide(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[:, :1] * torch.ones(5)

    predictor = Predictor(Wide(), patients.preprocessing(1), torch.float32)
    classes = len(predictor.preprocessing.classes)
    assert classes < 5
    export._write_program(predictor, tmp_path / "wide.pt2")
    program = torch.export.load(tmp_path / "wide.pt2").module()
    found = program(torch.ones((3, *predictor.preprocessing.shape)))
    assert torch.equal(found, torch.full((3, classes), 0.2))


def test_a_model_that_returns_several_tensors_is_not_exported(patients: Result, tmp_path: Path) -> None:
    class Pair(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x, x

    predictor = Predictor(Pair(), patients.preprocessing(1), torch.float32)
    with pytest.raises(
        InputError, match=r"program: The model returns a tuple, and .* returns one tensor\. Export its w"
    ):
        export._write_program(predictor, tmp_path / "pair.pt2")


def test_a_model_that_cannot_be_exported_is_explained(patients: Result, tmp_path: Path) -> None:
    class Odd(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum().item() > 0 else -x

    predictor = Predictor(Odd(), patients.preprocessing(1), torch.float32)
    with pytest.raises(InputError, match=r"cannot be written as a torch\.export program: .*--model instead"):
        export._write_program(predictor, tmp_path / "odd.pt2")
