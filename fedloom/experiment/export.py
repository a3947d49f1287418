"""A run's tables and trained weights as files that other programs read."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import torch
from safetensors.torch import save_file

from fedloom.errors import StoreError
from fedloom.experiment.result import TABLES, Result


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
