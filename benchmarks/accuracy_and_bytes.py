"""What compression costs in accuracy, and what it saves in bytes: one experiment with each method, over its seeds.

    python benchmarks/accuracy_and_bytes.py FILE.toml --out FOLDER [--set TABLE.KEY=VALUE] [--only eden topk]

Each method has a run folder in FOLDER, so a second start continues. FOLDER/FILE.json has what each seed ended with: the
accuracy of the last model, the bytes of all rounds, and with error feedback how long everything is that clients still
hold back, beside the whole change of the model, and the accuracy of the model with it. The tables of
docs/how-to/compression.md come from such files in docs/how-to/results.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import fedloom as fl
from fedloom import tree
from fedloom.compression.uplink import LEFT, MEMORY
from fedloom.experiment import checkpoint, experiment_file
from fedloom.experiment.plan import Plan
from fedloom.results.result import Result
from fedloom.training.evaluation import prepare

METHODS = {
    "nothing": "",
    "lossless": '"lossless"',
    "float16": '"float16"',
    "qsgd-8": '{ name = "qsgd", bits = 8 }',
    "qsgd-4": '{ name = "qsgd", bits = 4 }',
    "qsgd-1": '{ name = "qsgd", bits = 1 }',
    "eden": '"eden"',
    "powersgd": '{ name = "powersgd", rank = 2 }',
    "topk-10": '{ name = "topk", keep = 0.1 }',
    "topk-1": '{ name = "topk", keep = 0.01 }',
    "randomk-10": '{ name = "randomk", keep = 0.1 }',
    "randomk-1": '{ name = "randomk", keep = 0.01 }',
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="the experiment")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks"))
    parser.add_argument("--set", action="append", default=[], dest="changes", help="change a key of the file")
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS))
    options = parser.parse_args()
    records = [measure(method, options) for method in options.only]
    target = options.out / f"{options.file.stem}.json"
    target.write_text("[\n" + ",\n".join(map(json.dumps, records)) + "\n]\n", encoding="utf-8")
    print(target)


def measure(method: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run the experiment with one method, and return what each of its seeds ended with."""
    folder = options.out / f"{options.file.stem}-{method}"
    changes = [*options.changes, *([f"compress.up={METHODS[method]}"] if METHODS[method] else [])]
    command = [sys.executable, "-m", "fedloom", "run", str(options.file), "--out", str(folder), "--workers", "1"]
    subprocess.run([*command, "--quiet", "--no-report", *(f"--set={change}" for change in changes)], check=True)
    result = fl.load(folder)
    totals = result.frame("rounds").groupby("seed")[["bytes_up", "bytes_down"]].sum()
    return {
        "up": METHODS[method],
        "changes": options.changes,
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d}",
        "seeds": [run.seed for run in result.runs],
        "accuracy": [round(accuracy(run.final), 6) for run in result.runs],
        "bytes_up": totals["bytes_up"].tolist(),
        "bytes_down": totals["bytes_down"].tolist(),
        "weights_sha256": result.weights_sha256,
        **held_back(result),
    }


def accuracy(final: Mapping[str, float]) -> float:
    """Return the last model's accuracy on the server's test data, or on those of all clients together."""
    return final.get("server_test_accuracy", final.get("pooled_test_accuracy", float("nan")))


def held_back(result: Result) -> dict[str, list[float]]:
    """Return what is held back beside the model's change, by seed, and the accuracy of the model with all of it."""
    plan = Plan.of(experiment_file.load(result.folder / "experiment.toml"))
    found: dict[str, list[float]] = {"held_back": [], "accuracy_with_it": []}
    for run in result.runs:
        loaded = checkpoint.load(checkpoint.of_cell(result.folder, run.algorithm, run.seed))
        assert loaded is not None
        kept = [own.get(MEMORY, {}) for own in loaded.snapshot.own.values()]
        names = {name.split(f"/{LEFT}/")[-1]: name for name in (kept[0] if kept else {}) if f"/{LEFT}/" in name}
        federation, task, model = plan.federation(run.seed), plan.task(run.seed), loaded.snapshot.state["model"]
        if not names or "test" not in federation.server:
            return {}
        cohort = plan.cohort.size(federation.clients)  # each client counts 1/cohort when it takes part
        late = {leaf: torch.stack([one[name] for one in kept]).sum(0) / cohort for leaf, name in names.items()}
        moved = tree.sub(tree.select(model, late), tree.select(task.initial(), late))
        found["held_back"].append(round(float(tree.norm(late) / tree.norm(moved)), 4))
        module = task.build()
        module.load_state_dict({**model, **tree.add(tree.select(model, late), late)})
        x, y = prepare(*federation.server["test"], federation.scale, task)
        with torch.no_grad():
            right = (module.eval()(x).argmax(1) == y).double().mean()
        found["accuracy_with_it"].append(round(float(right), 6))
    return found


if __name__ == "__main__":
    main()
