"""What Flower costs: seconds and bytes a round of the same small experiment on four engines, all on this machine.

    python benchmarks/flower.py [ROUNDS]      # in an environment with fedloom[flower]

Four clients at two nodes train the 2NN (199,210 parameters) on a few examples each, so that what is left is the engine.
Nothing is evaluated. All engines must end with the same weights.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

sys.path.insert(0, str(Path(__file__).parents[1]))


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


def report(engine: str, folder: Path) -> str:
    from fedloom.experiment.result import Result
    from fedloom.experiment.store import Store

    with Store(folder, read_only=True) as store:
        rows = store.rows("rounds")[1:]  # the first one loads and compiles
    seconds = [row["seconds"] for row in rows]
    up, down = (sum(row[way] for row in rows) / len(rows) / 4 for way in ("bytes_up", "bytes_down"))
    print(
        f"{engine:<24} {statistics.median(seconds):8.3f} s a round ({min(seconds):.3f} to {max(seconds):.3f}), "
        f"a client sends {up:,.0f} bytes and is sent {down:,.0f}",
        flush=True,
    )
    return str(Result.read(folder).weights_sha256)


def main() -> None:
    from tests.flower.conftest import Fleet
    from tests.network.conftest import wait_for

    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 6
    found = {}
    with tempfile.TemporaryDirectory(dir=Path.home()) as name:
        folder = Path(name)
        file, local = write(folder, rounds), [sys.executable, "-m", "fedloom"]

        def run(engine: str, *command: Any) -> None:
            out = folder / engine.replace(" ", "-")
            done = subprocess.run([*map(str, command), "--out", str(out)], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            found[engine] = report(engine, out)

        run("vector", *local, "run", file, "-q")
        run("serve and join", *local, "serve", file, "--local", "2", "-q")
        subprocess.run([*local, "flower", "app", str(file), str(folder / "app")], check=True, capture_output=True)
        fleet = Fleet(folder / "fleet")
        try:
            fleet.superlink()
            for number in range(2):
                fleet.supernode(number, f"partition-id={number} num-partitions=2")
            for engine in ("Flower, no worker", "Flower, with workers"):
                if "with" in engine:
                    for number in range(2):
                        part = ("--partition-id", str(number), "--num-partitions", "2")
                        fleet.start(f"worker-{number}", "fedloom", "flower", "worker", folder / "app", *part)
                        wait_for(lambda at=f"worker-{number}": "Ready for the SuperNode" in fleet.log(at))
                out = folder / engine.replace(", ", "-").replace(" ", "-")
                fleet.flwr("run", folder / "app", "here", "--stream", "--run-config", f"out='{out}'")
                found[engine] = report(engine, out)
        finally:
            fleet.stop()
    assert len(set(found.values())) == 1, found
    print(f"all with the weights {next(iter(found.values()))}")


if __name__ == "__main__":
    main()
