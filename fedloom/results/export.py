"""A run's tables, curves and trained weights as files for other programs."""

from __future__ import annotations

import csv
import json
import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from fedloom.data.split import SPLITS
from fedloom.data.words import Vocabulary
from fedloom.discovery import optional
from fedloom.errors import FedloomError, InputError, StoreError
from fedloom.results.model_card import write_card
from fedloom.results.prediction import Predictor
from fedloom.results.result import TABLES, CellResult, Result
from fedloom.results.run_data import RunData
from fedloom.results.run_values import Curve
from fedloom.results.safe_text import for_spreadsheet

MODEL_FILES = (".safetensors", ".pt", ".pt2", ".onnx", ".json", ".txt")  # what a model card lists


def export_csv(result: Result, folder: Path) -> list[Path]:
    """Write every table that has rows as a CSV file, and return the paths."""
    written = []
    for table, rows in _tables(result):
        written.append(folder / f"{table}.csv")
        with open(written[-1], "w", newline="", encoding="utf-8") as out:
            writer = csv.DictWriter(out, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows({key: for_spreadsheet(value) for key, value in row.items()} for row in rows)
    return written


def export_parquet(result: Result, folder: Path) -> list[Path]:
    """Write every table that has rows as a Parquet file, and return the paths."""
    names = ("pyarrow", "pyarrow.parquet")
    pyarrow, parquet = (optional(name, "Parquet files need pyarrow", "parquet") for name in names)
    written = []
    for table, rows in _tables(result):
        written.append(folder / f"{table}.parquet")
        parquet.write_table(pyarrow.Table.from_pylist(rows), written[-1])
    return written


def _tables(result: Result) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    return ((table, rows) for table in TABLES if (rows := result.rows(table)))


class Scalar(NamedTuple):
    """A value at a round, and when it was known, in seconds since 1970."""

    tag: str
    round: int
    value: float
    moment: float


def scalars(run: RunData, label: str, seed: int) -> Iterator[Scalar]:
    """All curves of one cell: means over clients, the server's values, bytes and seconds."""
    started, costs = run.cells[label, seed]["started"], run.costs(label, seed)
    start = datetime.fromisoformat(started).timestamp() if started else 0.0
    moments = dict(zip(costs.rounds.tolist(), (start + costs.seconds.cumsum()).tolist(), strict=True))
    for tag, (rounds, values) in _curves(run, label, seed):
        for round, value in zip(rounds.tolist(), values.tolist(), strict=True):
            yield Scalar(tag, round, float(value), moments[round])


def _curves(run: RunData, label: str, seed: int) -> Iterator[tuple[str, Curve]]:
    costs = run.costs(label, seed)
    yield "bytes/up", (costs.rounds, costs.bytes_up.astype(float))
    yield "bytes/down", (costs.rounds, costs.bytes_down.astype(float))
    yield "seconds", (costs.rounds, costs.seconds)
    for name in run.metrics:
        for split in SPLITS:
            for phase in ("pre_fit", "post_fit", "final", "universal"):
                stats = run.client_values(label, seed, phase, name, split).by_round()
                yield f"clients/{phase}/{split}/{name}", (stats.index, stats.mean)
                yield f"pooled/{phase}/{split}/{name}", run.pooled_values(label, seed, phase, name, split)
            yield f"server/{split}/{name}", run.server_values(label, seed, name, split)


def export_tensorboard(result: Result, folder: Path) -> list[Path]:
    """Write event files, one folder per cell: `tensorboard --logdir FOLDER/tensorboard`."""
    tensorboard = optional("torch.utils.tensorboard", "Event files need tensorboard", "tensorboard")
    run, written = RunData.read(result.folder), []
    for label, seed in run.cells:
        written.append(folder / "tensorboard" / f"{label}-{seed}")
        for old in written[-1].glob("events.out.tfevents.*"):
            old.unlink()  # the same points twice would be drawn as a zigzag
        with tensorboard.SummaryWriter(str(written[-1])) as writer:
            for scalar in scalars(run, label, seed):
                writer.add_scalar(scalar.tag, scalar.value, scalar.round, walltime=scalar.moment)
    return written


def export_mlflow(result: Result, folder: Path) -> list[Path]:
    """Write a local MLflow store, one run per cell: `mlflow ui --backend-store-uri sqlite:///FOLDER/mlflow.db`."""
    need = "An MLflow store needs mlflow"
    entities, tracking = (optional(f"mlflow.{part}", need, "mlflow") for part in ("entities", "tracking"))
    run, path = RunData.read(result.folder), folder / "mlflow.db"
    if path.exists():
        raise StoreError(f"{path} exists already, and a second export would add every run again. Delete it first.")
    client = tracking.MlflowClient(tracking_uri=f"sqlite:///{path.resolve()}")
    experiment = client.create_experiment(run.name, artifact_location=(folder / "mlflow-artifacts").resolve().as_uri())
    for (label, seed), cell in run.cells.items():
        settings = {"algorithm": label, "seed": seed, **_flat(run.description)}
        id = client.create_run(experiment, run_name=f"{label} (seed {seed})").info.run_id
        tags = [entities.RunTag(key, str(cell[key])) for key in ("weights_sha256", "status")]
        params = [entities.Param(key[:250], str(value)[:6000]) for key, value in settings.items()]
        client.log_batch(id, params=params[:100], tags=tags)
        points = [
            entities.Metric(scalar.tag, scalar.value, int(scalar.moment * 1000), scalar.round)
            for scalar in scalars(run, label, seed)
        ]
        for first in range(0, len(points), 1000):  # MLflow accepts 1,000 at once
            client.log_batch(id, metrics=points[first : first + 1000])
        client.set_terminated(id, "FINISHED" if cell["status"] == "done" else "FAILED")
    return [path]


def _flat(tables: Any, above: str = "") -> dict[str, Any]:
    """Nested tables as dotted keys."""
    if not isinstance(tables, dict):
        return {above: tables}
    return {key: v for name, value in tables.items() for key, v in _flat(value, f"{above}.{name}".strip(".")).items()}


def export_models(result: Result, folder: Path, client: str | None = None) -> list[Path]:
    """Write the trained weights of every cell as `LABEL-SEED.safetensors` and as a torch state_dict (`.pt`).

    With a `client`, write the whole model that this client uses: `LABEL-SEED-CLIENT.safetensors`. Without a global
    model, there is a file for each client. What prepares examples is beside them, and a model card.
    """
    written = []
    for cell in _trained(result):
        weights = result.weights(cell.algorithm, cell.seed, client)
        named = list(weights) if client is None else [client]
        stems = _stems(cell, [] if named == ["model"] and client is None else named)
        for stem, each in zip(stems, weights.values(), strict=True):
            plain = {leaf: tensor.clone().contiguous() for leaf, tensor in each.items()}
            save_file(plain, folder / f"{stem}.safetensors")
            torch.save(plain, folder / f"{stem}.pt")
            written += [folder / f"{stem}.safetensors", folder / f"{stem}.pt"]
    return written + _beside(result, folder)


def export_onnx(result: Result, folder: Path, client: str | None = None) -> list[Path]:
    """Write every global model, or a client's, with its preprocessing as an ONNX file, for onnxruntime and others."""
    optional("onnxscript", "ONNX files need onnxscript", "onnx")
    return _export_programs(result, folder, client, ".onnx")


def export_torch(result: Result, folder: Path, client: str | None = None) -> list[Path]:
    """Write every global model, or a client's, with its preprocessing as a `torch.export` program (`.pt2`)."""
    return _export_programs(result, folder, client, ".pt2")


def _export_programs(result: Result, folder: Path, client: str | None, ending: str) -> list[Path]:
    cells = [cell for cell in _trained(result) if client is not None or result.has_global_model(cell)]
    predictors = [result.predictor(cell.algorithm, cell.seed, client) for cell in cells]
    stems = [_stems(cell, [] if client is None else [client])[0] for cell in cells]
    written = [folder / f"{stem}{ending}" for stem in stems]
    for predictor, path in zip(predictors, written, strict=True):
        _write_program(predictor, path)
    if not written:
        labels = {cell.algorithm: None for cell in _trained(result)}  # perhaps not all of the run
        have = "has" if len(labels) == 1 else "have"
        raise InputError(f"{', '.join(labels)} {have} no global model: name a client with --client.")
    return written + _beside(result, folder)


def _write_program(predictor: Predictor, path: Path) -> None:
    """Write a model with its preprocessing. Its input is a batch of any size.

    The names of features, label and classes are in the file, each as a JSON list: `metadata_props` of an ONNX model,
    `extra_files` of a torch program.
    """
    preprocessing = predictor.preprocessing
    kind = torch.int32 if preprocessing.words is not None else torch.float32
    if not preprocessing.columns and preprocessing.scale != 1.0:
        kind = torch.uint8
    example = (torch.ones((2, *preprocessing.shape), dtype=kind),)
    lists = {"features": preprocessing.features, "label": preprocessing.label, "classes": preprocessing.classes}
    names = {what: json.dumps(list(found), ensure_ascii=False) for what, found in lists.items() if found}
    predictor.requires_grad_(False)  # answers are not for training
    try:
        with _quiet_torch():
            program = torch.export.export(predictor, example, dynamic_shapes=({0: torch.export.Dim("batch")},))
            if path.suffix == ".pt2":
                torch.export.save(program, path, extra_files=names)
                return
            made = torch.onnx.export(
                program,
                (),
                input_names=["features"],
                output_names=["answers"],
                dynamic_shapes=({0: "batch"},),  # a program has forgotten the name
                verbose=False,
            )
            assert made is not None
            made.model.metadata_props.update(names)
            made.save(path, external_data=False)
    except Exception as error:
        what = "an ONNX model" if path.suffix == ".onnx" else "a torch.export program"
        why = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {str(error).splitlines()[0]}"
        raise InputError(
            f"The model cannot be written as {what}: {why} Export its weights with --model instead."
        ) from error


@contextmanager
def _quiet_torch() -> Iterator[None]:
    """Leave out what torch's exporters say about themselves, such as packages that they could also use."""
    exporters = logging.getLogger("torch.onnx")
    before = exporters.level
    exporters.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        exporters.setLevel(before)


def _trained(result: Result) -> list[CellResult]:
    found = [cell for cell in result.runs if cell.rounds]
    if not found:
        raise StoreError(f"{result.folder} has no trained weights yet.")
    return found


def _stems(cell: CellResult, clients: list[str]) -> list[str]:
    """Return the names of files without their endings: of the global model, or one for each client."""
    safe = [re.sub(r"[^\w.-]", "_", client) for client in clients]
    alike = {name for name in safe if safe.count(name) > 1}
    names = [f"{name}-{place}" if name in alike else name for place, name in enumerate(safe)]
    return [f"{cell.algorithm}-{cell.seed}-{name}" for name in names] or [f"{cell.algorithm}-{cell.seed}"]


def _beside(result: Result, folder: Path) -> list[Path]:
    """Write what prepares examples for the models, and the model card."""
    added = []
    try:
        for seed in dict.fromkeys(cell.seed for cell in _trained(result)):
            preprocessing = result.preprocessing(seed)
            added.append(folder / f"preprocessing-{seed}.json")
            preprocessing.write(added[-1])
        if preprocessing.words is not None:
            added.append(folder / "vocabulary.txt")
            Vocabulary(preprocessing.classes).write(added[-1])
    except FedloomError:  # a run whose data is no longer here: the weights are written
        return added
    files = [path for path in sorted(folder.iterdir()) if path.suffix in MODEL_FILES]
    return [*added, write_card(result, folder, files)]
