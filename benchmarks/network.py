"""What the network costs: seconds a round of a coordinator and agents on this machine, beside the serial backend.

    python benchmarks/network.py empty       # 100 rounds of a tiny task, 2 agents
    python benchmarks/network.py overhead    # 10 agents, the 2NN (199,210 parameters), one example each
    python benchmarks/network.py training    # the same clients' training alone, in ten processes side by side
    python benchmarks/network.py restart     # kill -9 of the coordinator: seconds to the next round; memory of an agent

The clients have one training example and take one step, so almost all time is the network's: assignments, tensors both
ways, checks, commits, checkpoints. Only the first and the last round are evaluated.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

TASKS = {
    "empty": {
        "agents": 2,
        "rounds": 100,
        "features": 4,
        "task": {"model": "logistic", "args": {"features": 4, "classes": 2}},
    },
    "overhead": {"agents": 10, "rounds": 30, "features": 784, "task": {"model": "mnist_2nn"}},
}


def write(folder: Path, agents: int, rounds: int, features: int, task: dict[str, object]) -> Path:
    rows = 4 * agents
    x = np.random.default_rng(0).normal(size=(rows, features)).astype(np.float32)
    np.savez(folder / "data.npz", x=x, y=np.arange(rows) % 2)
    values = {
        "name": "network-cost",
        "rounds": rounds,
        "data": {
            "source": "npz",
            "path": "data.npz",
            "partition": {"name": "iid", "clients": agents},
            "split": [1.0, 0.0, 0.0],
        },
        "task": task,
        "train": {"batch_size": "full"},
        "evaluate": {"every": 1_000_000, "splits": []},
        "algorithm": {"fedavg": {}},
        "run": {"backend": "serial", "checkpoint_every": int(os.environ.get("CHECKPOINT_EVERY", "1"))},
    }
    path = folder / "experiment.toml"
    path.write_text(tomli_w.dumps(values))
    return path


def seconds_a_round(folder: Path) -> list[float]:
    from fedloom.experiment.store import Store

    with Store(folder, read_only=True) as store:
        return [row["seconds"] for row in store.rows("rounds", 1)]


def memory(process: int, what: str = "VmRSS") -> float:
    """Megabytes of a process: resident now, or at most so far (VmHWM)."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return round(int(next(line for line in lines if line.startswith(what)).split()[1]) / 1024)


def restart() -> None:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.network.conftest import EXPERIMENT, Federation, said, wait_for

    with tempfile.TemporaryDirectory() as temporary:
        cohort = {"deadline": "60s", "quorum": 1.0}
        world = Federation(
            Path(temporary), {**EXPERIMENT, "rounds": 100_000, "cohort": cohort, "evaluate": {"splits": []}}
        )
        checkpoints = world.out / "cells" / "fedavg-1"

        def newest() -> int:
            return max((int(path.stem.split("-")[1]) for path in checkpoints.glob("round-*.json")), default=0)

        try:
            world.serve()
            first = world.join(0)
            wait_for(lambda: said(world.folder, "site-0 is ready"))
            time.sleep(1.0)
            found = {"idle_agent_megabytes": memory(first.pid)}
            world.join(1)
            wait_for(lambda: newest() >= 20)
            found["training_agent_megabytes"] = memory(first.pid, "VmHWM")
            world.coordinator.kill()
            world.coordinator.wait()
            done, began = newest(), time.perf_counter()
            world.serve()
            wait_for(lambda: newest() > done)
            found["seconds_from_start_of_the_coordinator_to_its_next_round"] = round(time.perf_counter() - began, 1)
            found["coordinator_megabytes"] = memory(world.coordinator.pid)
        finally:
            world.stop()
    print(json.dumps({"restart": found}, indent=2))


def _train(file: str, client: int, rounds: int, together: Any) -> None:
    from fedloom.backends.serial import Serial
    from fedloom.experiment import experiment_file
    from fedloom.experiment.plan import Plan
    from fedloom.federation.work import ClientWork
    from fedloom.machine import prepare_process

    prepare_process()
    plan = Plan(experiment_file.load(Path(file)))
    (algorithm,) = plan.experiment.algorithm.values()
    task = plan.task(1)
    place, model = Serial(plan.federation(1), task).place, task.initial()
    for round in range(rounds):
        work = ClientWork(algorithm, "client", {"model": model}, (client,), {}, 1, round + 1, 0, "stack")
        together.wait()
        work.perform(place)
        together.wait()


def training() -> None:
    """What a round's training takes by itself: as many processes as agents, each with one client, side by side."""
    settings = TASKS["overhead"]
    agents, rounds = settings["agents"], settings["rounds"]
    with tempfile.TemporaryDirectory() as temporary:
        file = write(Path(temporary), agents, rounds, settings["features"], settings["task"])
        context = multiprocessing.get_context("spawn")
        together = context.Barrier(agents + 1)
        processes = [context.Process(target=_train, args=(str(file), n, rounds, together)) for n in range(agents)]
        for process in processes:
            process.start()
        seconds = []
        for _ in range(rounds):
            together.wait()
            began = time.perf_counter()
            together.wait()
            seconds.append(time.perf_counter() - began)
        for process in processes:
            process.join()
    print(json.dumps({"training": {"median_ms_a_round": round(1000 * float(np.median(seconds[1:])), 1)}}))


def main(name: str) -> None:
    if name == "restart":
        return restart()
    if name == "training":
        return training()
    settings = TASKS[name]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        file = write(folder, settings["agents"], settings["rounds"], settings["features"], settings["task"])
        found = {}
        for kind, more in (("serial", ["run"]), ("network", ["serve", "--local", str(settings["agents"])])):
            command, *options = more
            began = time.perf_counter()
            done = subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "fedloom",
                    command,
                    str(file),
                    *options,
                    "--out",
                    str(folder / kind),
                    "--json",
                    "-q",
                ],
                check=True,
                capture_output=True,
                text=True,
            )
            rounds = seconds_a_round(folder / kind)[1:]
            found[kind] = {
                "sha256": json.loads(done.stdout)["weights_sha256"][:12],
                "wall_seconds": round(time.perf_counter() - began, 2),
                "median_ms_a_round": round(1000 * float(np.median(rounds)), 1),
                "mean_ms_a_round": round(1000 * float(np.mean(rounds)), 1),
                "all_rounds_seconds": round(sum(rounds), 2),
            }
        found["overhead_ms_a_round"] = round(
            found["network"]["median_ms_a_round"] - found["serial"]["median_ms_a_round"], 1
        )
        print(json.dumps({name: {**settings, **found}}, indent=2))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "overhead")
