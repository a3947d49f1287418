"""A run's tables and trained weights as files that other programs read."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from fedloom.errors import InputError, StoreError
from fedloom.results.result import TABLES, Result
from fedloom.results.run_data import RunData


def export_csv(result: Result, folder: Path) -> list[Path]:
    """Every table that has rows, as one CSV file each."""
    written = []
    for table in TABLES:
        rows = result.rows(table)
        if not rows:
            continue
        path = folder / f"{table}.csv"
        with open(path, "w", newline="", encoding="utf-8") as out:
            writer = csv.DictWriter(out, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        written.append(path)
    return written


def export_parquet(result: Result, folder: Path) -> list[Path]:
    """Every table that has rows, as one Parquet file each."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise InputError("Parquet files need pyarrow: pip install 'fedloom[parquet]'.") from error
    written = []
    for table in TABLES:
        rows = result.rows(table)
        if rows:
            parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{table}.parquet")
            written.append(folder / f"{table}.parquet")
    return written


class Scalar(NamedTuple):
    """A number at a round, and when it was known, in seconds since 1970."""

    tag: str
    round: int
    value: float
    moment: float


def scalars(view: RunData, label: str, seed: int) -> Iterator[Scalar]:
    """All curves of one cell: means over clients, the server's numbers, bytes and seconds."""
    cell, traffic = view.cells[label, seed], view.costs(label, seed)
    began = datetime.fromisoformat(cell["started"]).timestamp() if cell["started"] else 0.0
    moments = dict(zip(traffic.rounds.tolist(), (began + traffic.seconds.cumsum()).tolist(), strict=True))
    for place, round in enumerate(traffic.rounds.tolist()):
        yield Scalar("bytes/up", round, float(traffic.bytes_up[place]), moments[round])
        yield Scalar("bytes/down", round, float(traffic.bytes_down[place]), moments[round])
        yield Scalar("seconds", round, float(traffic.seconds[place]), moments[round])
    for metric, kind in view.metrics.items():
        for split in ("train", "validation", "test"):
            for phase in ("pre_fit", "post_fit", "final", "universal"):
                stats = view.client_values(label, seed, phase, metric, split).by_round()
                for round, value in zip(stats.index.tolist(), stats.mean.tolist(), strict=True) if kind.is_mean else ():
                    yield Scalar(f"clients/{phase}/{split}/{metric}", round, value, moments[round])
                rounds, values = view.pooled_values(label, seed, phase, metric, split)
                for round, value in zip(rounds.tolist(), values.tolist(), strict=True):
                    yield Scalar(f"pooled/{phase}/{split}/{metric}", round, value, moments[round])
            rounds, values = view.server_values(label, seed, metric, split)
            for round, value in zip(rounds.tolist(), values.tolist(), strict=True):
                yield Scalar(f"server/{split}/{metric}", round, value, moments[round])


def export_tensorboard(result: Result, folder: Path) -> list[Path]:
    """Event files, a folder for each cell: `tensorboard --logdir FOLDER/tensorboard`."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise InputError("Event files need tensorboard: pip install 'fedloom[tensorboard]'.") from error
    view = RunData.read(result.folder)
    written = []
    for label, seed in view.cells:
        path = folder / "tensorboard" / f"{label}-{seed}"
        for old in path.glob("events.out.tfevents.*"):
            old.unlink()  # exported again: the same points twice would be drawn as a zigzag
        with SummaryWriter(str(path)) as writer:
            for scalar in scalars(view, label, seed):
                writer.add_scalar(scalar.tag, scalar.value, scalar.round, walltime=scalar.moment)
        written.append(path)
    return written


def export_mlflow(result: Result, folder: Path) -> list[Path]:
    """A local MLflow store with a run for each cell: `mlflow ui --backend-store-uri sqlite:///FOLDER/mlflow.db`."""
    try:
        from mlflow.entities import Metric, Param, RunTag
        from mlflow.tracking import MlflowClient
    except ImportError as error:
        raise InputError("An MLflow store needs mlflow: pip install 'fedloom[mlflow]'.") from error
    view = RunData.read(result.folder)
    path = folder / "mlflow.db"
    if path.exists():
        raise StoreError(f"{path} exists already, and a second export would add every run again. Delete it first.")
    client = MlflowClient(tracking_uri=f"sqlite:///{path.resolve()}")
    experiment = client.create_experiment(view.name, artifact_location=(folder / "mlflow-artifacts").resolve().as_uri())
    for (label, seed), cell in view.cells.items():
        settings = {"algorithm": label, "seed": seed, **_flat(view.description)}
        run = client.create_run(experiment, run_name=f"{label} (seed {seed})")
        tags = [RunTag("weights_sha256", str(cell["weights_sha256"])), RunTag("status", cell["status"])]
        params = [Param(key[:250], str(value)[:6000]) for key, value in settings.items()]
        client.log_batch(run.info.run_id, params=params[:100], tags=tags)
        points = [
            Metric(scalar.tag, scalar.value, int(scalar.moment * 1000), scalar.round)
            for scalar in scalars(view, label, seed)
        ]
        for begin in range(0, len(points), 1000):  # as many as MLflow takes at once
            client.log_batch(run.info.run_id, metrics=points[begin : begin + 1000])
        client.set_terminated(run.info.run_id, "FINISHED" if cell["status"] == "done" else "FAILED")
    return [path]


def _flat(tables: Any, above: str = "") -> dict[str, Any]:
    """Nested tables as dotted keys."""
    if not isinstance(tables, dict):
        return {above: tables}
    return {key: v for name, value in tables.items() for key, v in _flat(value, f"{above}.{name}".strip(".")).items()}


def export_models(result: Result, folder: Path, client: str | None = None) -> list[Path]:
    """The trained weights of every cell: `LABEL-SEED.safetensors`, and the same as a torch state_dict (`.pt`).

    With a `client`, the whole model that this client uses: `LABEL-SEED-CLIENT.safetensors`.
    """
    written = []
    for run in result.runs:
        if run.rounds == 0:
            continue
        for name, weights in result.weights(run.algorithm, run.seed, client).items():
            last = re.sub(r"[^\w.-]", "_", client) if client is not None else name
            stem = f"{run.algorithm}-{run.seed}" + ("" if last == "model" and client is None else f"-{last}")
            plain = {leaf: tensor.clone().contiguous() for leaf, tensor in weights.items()}
            save_file(plain, folder / f"{stem}.safetensors")
            torch.save(plain, folder / f"{stem}.pt")
            written += [folder / f"{stem}.safetensors", folder / f"{stem}.pt"]
    if not written:
        raise StoreError(f"{result.folder} has no trained weights yet.")
    return written
