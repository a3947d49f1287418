"""Memory of a coordinator and an agent with a large model, counted in models.

    python benchmarks/network_memory.py           # 200 MB
    python benchmarks/network_memory.py --pack    # the same, compressed on the way

The same run is made with a tiny model and with a large one: two agents, three rounds of FedAvg. What the peaks differ
by, divided by the size of the model, is how many models were in memory. Anonymous memory is what a process needs. The
system can reclaim pages of mapped files at any time, so they are counted separately.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import tomli_w


def experiment(width: int) -> dict[str, Any]:
    return {
        "name": "memory",
        "rounds": 3,
        "data": {"source": "digits", "partition": {"name": "iid", "clients": 2}},
        "task": {"model": "mlp", "args": {"features": 64, "hidden": [width, width], "classes": 10}},
        "train": {"batch_size": 100},
        "cohort": {"start_when": 2, "deadline": "10m", "quorum": 1.0},
        "evaluate": {"every": 1_000_000, "splits": []},
        "algorithm": {"fedavg": {}},
        "run": {"backend": "serial"},
    }


def resident(process: int) -> dict[str, float]:
    """Megabytes of a process now: its own, and mapped from files."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    found = {line.split(":")[0]: int(line.split()[1]) / 1024 for line in lines if line.startswith("Rss")}
    return {"own": found["RssAnon"], "mapped": found["RssFile"] + found["RssShmem"]}


def peaks(width: int, pack: bool) -> dict[str, dict[str, float]]:
    """The largest of both, for a coordinator and one of its agents."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        file, port = folder / "experiment.toml", 18444
        values = experiment(width)
        file.write_text(tomli_w.dumps(values))
        fedloom = [sys.executable, "-m", "fedloom"]
        processes: dict[str, subprocess.Popen[bytes]] = {}
        most = {name: {"own": 0.0, "mapped": 0.0, "both": 0.0} for name in ("coordinator", "agent")}
        log = open(folder / "log.txt", "wb")  # noqa: SIM115 (closed below)
        serve = [*fedloom, "serve", str(file), "--listen", f"127.0.0.1:{port}", "--out", str(folder / "run"), "-q"]
        processes["coordinator"] = subprocess.Popen(serve, stdout=log, stderr=log)
        tokens = folder / "run" / "network" / "tokens"
        while len(list(tokens.glob("*.token"))) < 2 and processes["coordinator"].poll() is None:
            time.sleep(0.1)
        for number, token in enumerate(sorted(tokens.glob("*.token"))):
            site = folder / f"site-{number}.toml"
            table = {"name": f"site-{number}", "hosts": [number], "compress": pack}
            site.write_text(tomli_w.dumps({"site": table, "data": values["data"]}))
            join = [*fedloom, "join", f"https://127.0.0.1:{port}", "--site", str(site), "--token-file", str(token)]
            name = "agent" if number == 0 else "another"
            processes[name] = subprocess.Popen(join, stdout=log, stderr=log)
        while processes["coordinator"].poll() is None:
            for name, found in most.items():
                try:
                    now = resident(processes[name].pid)
                except (OSError, KeyError):
                    continue  # it has ended
                now["both"] = now["own"] + now["mapped"]
                for kind in found:
                    found[kind] = max(found[kind], now[kind])
            time.sleep(0.01)
        for process in processes.values():
            process.wait(timeout=60)
        log.close()
        if processes["coordinator"].returncode:
            raise RuntimeError((folder / "log.txt").read_text()[-3000:])
        return most


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=7000)
    parser.add_argument("--pack", action="store_true")
    given = parser.parse_args()
    width = given.width
    size = 4 * (65 * width + (width + 1) * width + (width + 1) * 10) / (1 << 20)
    small, large = peaks(8, given.pack), peaks(width, given.pack)
    models = {
        name: {kind: round((large[name][kind] - small[name][kind]) / size, 2) for kind in large[name]} for name in large
    }
    shown = {name: {kind: round(value) for kind, value in found.items()} for name, found in large.items()}
    print(json.dumps({"model_megabytes": round(size), "peak_megabytes": shown, "models": models}, indent=2))


if __name__ == "__main__":
    main()
