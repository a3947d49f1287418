"""The sanity check of Samani 2020 (section 5.5.4): the same federated averaging in fedloom and in Flower.

    python benchmarks/crosscheck.py --data Postures.csv

Both train on the same users, splits and initial weights, with the settings of `fedloom reproduce crosscheck` (the row
that averages by examples); each draws only the order of examples. The first run uses full batches and SGD, where the
order does not matter: the weights must agree up to rounding.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import environments
import numpy as np
from harness import HERE, describe_machine, machine

from fedloom.experiment.experiment_file import Experiment
from fedloom.experiment.plan import Plan
from fedloom.experiment.run import run
from fedloom.papers import published
from fedloom.papers.reproduce import Rerun

ROW = "by examples, new optimiser every round"
EXACT = {
    "rounds": 5,
    "seeds": [1],
    "train.optimizer": "sgd",
    "train.epsilon": None,
    "train.lr": 1e-6,
    "train.epochs": 2,
    "train.batch_size": "full",
}


def main() -> None:
    """Full batches first, then the check itself for every seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="UCI's Postures.csv, or a part of it, packed or not")
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--cache", type=Path, default=environments.default_cache(), help="where Flower is installed")
    options = parser.parse_args()
    python = environments.prepare("flower", options.cache)
    path = {"data.path": str(options.data.resolve())}
    print(describe_machine(machine()), environments.versions(python, "flower"), sep="\n")
    with tempfile.TemporaryDirectory() as scratch:
        ours, theirs = both(experiment({**path, **EXACT}), python, Path(scratch) / "exact")
        gap = max(np.abs(a - b).max() for a, b in zip(ours["weights"], theirs["weights"], strict=True))
        print(f"full batches, SGD, 5 rounds of 2 epochs: the weights differ by at most {gap:.1e}")
        for seed in options.seeds:
            settings = {"rounds": options.rounds, "train.epochs": options.epochs, "seeds": [seed]}
            ours, theirs = both(experiment({**path, **settings}), python, Path(scratch) / f"seed-{seed}")
            told = [
                f"{name} {100 * found['accuracy'][-1]:.2f} %" for name, found in (("fedloom", ours), ("Flower", theirs))
            ]
            print(
                f"seed {seed}, {options.rounds} rounds of {options.epochs} epochs: {', '.join(told)}; {ours['sha256']}"
            )


def experiment(changes: dict[str, Any]) -> Experiment:
    """Return the row of the reproduction with some settings changed."""
    found = published.load("crosscheck")
    (row,) = (row for row in found.row if row.name == ROW)
    keep = {key: value for key, value in changes.items() if value is not None}
    for key in changes.keys() - keep.keys():
        table, name = key.split(".")
        found.experiment[table].pop(name)
    return Rerun(found, changes=keep).experiment(row)


def both(experiment: Experiment, python: Path, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Accuracy after every round and the final weights, ours and Flower's."""
    folder.mkdir(parents=True)
    plan, seed = Plan(experiment), experiment.seeds[0]
    result = run(**plan.arguments(), out=folder / "run")
    curve = [row["value"] for row in result.rows("server") if row["metric"] == "accuracy"]
    weights = [leaf.flatten().double().numpy() for leaf in result.weights()["model"].values()]
    ours = {"accuracy": curve, "weights": weights, "sha256": result.weights_sha256}
    save_job(plan, seed, folder / "job.npz")
    command = [
        str(python),
        str(HERE / "peers" / "flower_crosscheck.py"),
        str(folder / "job.npz"),
        str(folder / "out.json"),
    ]
    # start a separate Ray: without this, it would join any cluster it finds on the machine
    alone = {**os.environ, "RAY_ADDRESS": "local", "RAY_TMPDIR": str(folder)}
    with open(folder / "flower.log", "w") as log:  # a file, not a pipe: Ray's daemons would keep a pipe open
        failed = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=alone).returncode
    if failed or not (folder / "out.json").is_file():
        raise SystemExit(f"Flower failed:\n{(folder / 'flower.log').read_text()[-3000:]}")
    theirs = json.loads((folder / "out.json").read_text())
    return ours, {**theirs, "weights": [np.array(leaf) for leaf in theirs["weights"]]}


def save_job(plan: Plan, seed: int, path: Path) -> None:
    """The users' examples, the initial weights and the settings, for any implementation."""
    federation, task, train = plan.federation(seed), plan.task(seed), plan.experiment.train
    arrays: dict[str, Any] = {}
    for client in range(federation.clients):
        rows = federation.indices(client, "train")
        arrays[f"train_x_{client}"], arrays[f"train_y_{client}"] = (
            federation.x[rows].numpy(),
            federation.y[rows].numpy(),
        )
    rows = federation.indices(federation.everyone, "test")
    arrays["test_x"], arrays["test_y"] = federation.x[rows].numpy(), federation.y[rows].numpy()
    leaves = list(task.initial().values())
    for number, (weight, bias) in enumerate(zip(leaves[::2], leaves[1::2], strict=True)):
        arrays[f"weight_{number}"], arrays[f"bias_{number}"] = weight.numpy(), bias.numpy()
    settings = {
        "clients": federation.clients,
        "rounds": plan.experiment.rounds,
        "epochs": int(train.epochs),
        "batch": 0 if train.batch_size == "full" else train.batch_size,
        "optimizer": train.optimizer,
        "lr": train.lr,
        "seed": seed,
    }
    np.savez(path, settings=json.dumps(settings), **arrays)


if __name__ == "__main__":
    main()
