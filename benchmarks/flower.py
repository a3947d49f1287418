"""What Flower costs: seconds and bytes a round of the same small experiment on four engines, all on this machine.

    python benchmarks/flower.py [ROUNDS [ENGINE …]]      # in an environment with fedloom[flower]

Four clients at two nodes train the 2NN (199,210 parameters) on a few examples each, so almost all time is the engine's.
Nothing is evaluated. All engines end with the same weights.
"""

from __future__ import annotations

import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

sys.path.insert(0, str(Path(__file__).parents[1]))
ENGINES = ("vector", "serve-and-join", "flower-no-worker", "flower-with-workers")


def write(folder: Path, rounds: int) -> Path:
    x = np.random.default_rng(0).normal(size=(40, 784)).astype(np.float32)
    np.savez(folder / "data.npz", x=x, y=np.arange(40) % 10)
    values = {
        "name": "engines",
        "rounds": rounds,
        "data": {
            "source": "npz",
            "path": "data.npz",
            "partition": {"name": "iid", "clients": 4},
            "split": [1.0, 0.0, 0.0],
        },
        "task": {"model": "mnist_2nn"},
        "evaluate": {"splits": []},
        "algorithm": {"fedavg": {}},
        "run": {"group": 1},
    }
    path = folder / "experiment.toml"
    path.write_text(tomli_w.dumps(values))
    return path


def report(engine: str, folder: Path) -> None:
    from fedloom.experiment.store import Store
    from fedloom.results.result import Result

    with Store(folder, read_only=True) as store:
        rows = store.rows("rounds")[1:]  # the first one loads and compiles
    seconds = [row["seconds"] for row in rows]
    up, down = (sum(row[way] for row in rows) / len(rows) / 4 for way in ("bytes_up", "bytes_down"))
    print(
        f"{engine:<20} {statistics.median(seconds):8.3f} s a round ({min(seconds):.3f} to {max(seconds):.3f}), "
        f"a client sends {up:,.0f} bytes and is sent {down:,.0f}; "
        f"weights {Result.read(folder).weights_sha256}",
        flush=True,
    )


def local(folder: Path, engine: str, *command: Any) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fedloom", *map(str, command), "-q", "--out", str(folder / engine)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    report(engine, folder / engine)


def on_flower(folder: Path, engine: str, file: Path) -> None:
    from fedloom.experiment.experiment_file import load
    from fedloom.flower.app import write_app
    from tests.flower.conftest import Fleet
    from tests.network.conftest import wait_for

    write_app(load(file), folder / "app")
    fleet = Fleet(folder / "fleet")
    try:
        names = [f"worker-{number}" for number in range(2)] if engine == "flower-with-workers" else []
        for number, name in enumerate(names):
            part = ("--partition-id", str(number), "--num-partitions", "2")
            fleet.start(name, "fedloom", "flower", "worker", folder / "app", *part)
        fleet.superlink()
        for number in range(2):
            fleet.supernode(number, f"partition-id={number} num-partitions=2")
        wait_for(lambda: all("Ready for the SuperNode" in fleet.log(name) for name in names))
        fleet.flwr("run", folder / "app", "here", "--stream", "--run-config", f"out='{folder / engine}'")
        report(engine, folder / engine)
    finally:
        fleet.stop()


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that Flower's programs end, too
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 6
    for engine in sys.argv[2:] or ENGINES:
        with tempfile.TemporaryDirectory() as name:
            file = write(Path(name), rounds)
            if engine == "vector":
                local(Path(name), engine, "run", file)
            elif engine == "serve-and-join":
                local(Path(name), engine, "serve", file, "--local", "2")
            else:
                on_flower(Path(name), engine, file)


if __name__ == "__main__":
    main()
