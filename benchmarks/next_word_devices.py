"""Next-word prediction on two devices: a coordinator and two agents, each a process with its own author's texts.

    python benchmarks/next_word_devices.py reddit.jsonl vocabulary.txt --rounds 50 --out devices

The two most active authors of the file become the sites rpi1 and rpi2. Every session is a `fedloom serve` and two
`fedloom join` over TLS on this machine; runs continue where they stopped. Written to the folder: the sites' files,
logs, a run folder for each session, numbers.json (accuracy and loss of both devices, bytes, seconds, memory),
curves.png.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from fedloom.data.sources.texts import Texts
from fedloom.results.figure_style import finish_axes, new_figure
from fedloom.results.run_data import RunData

SITES = ("rpi1", "rpi2")
PORT = 18_443
NORMALISED = {"layer_norm": True, "recurrent_dropout": 0.6}
# by session: the model's variant, and the algorithms; the baseline is alone, because its memory was published
SESSIONS: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]]]] = {
    "baseline": ({}, {"fedavg": {}}),
    "fedprox": ({}, {"fedprox": {"mu": 0.1}}),
    "servers": ({}, {"fedadam": {}, "fedadagrad": {}, "fedyogi": {}}),
    "fedbn": (NORMALISED, {"fedbn": {}, "everything-averaged": {"name": "fedavg"}}),
}


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("texts", type=Path)
    asked.add_argument("vocabulary", type=Path)
    asked.add_argument("--rounds", type=int, default=50)
    asked.add_argument("--max-texts", type=int)
    asked.add_argument("--out", type=Path, default=Path("devices"))
    given = asked.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    write_sites(given.texts, given.vocabulary.resolve(), given.max_texts, given.out)
    numbers = {name: session(name, *parts, given.rounds, given.out) for name, parts in SESSIONS.items()}
    (given.out / "numbers.json").write_text(json.dumps(numbers, indent=1))
    draw(given.out)
    print(json.dumps(numbers, indent=1))


def write_sites(texts: Path, vocabulary: Path, most: int | None, out: Path) -> None:
    """A file of texts and a site's file for each of the two most active authors."""
    source = Texts(path=texts.resolve(), max_texts=most)
    held: dict[str, list[Any]] = {}
    for author, some in source.read(source.path):
        held.setdefault(author, []).extend(some)
    able = [author for author in held if most is None or len(held[author]) <= most]
    chosen = sorted(able, key=lambda author: (-len(held[author]), author))[: len(SITES)]
    for site, author in zip(SITES, chosen, strict=True):
        (out / f"{site}.jsonl").write_text(json.dumps({"user": author, "texts": held[author]}) + "\n")
        data = {"source": "texts", "path": f"{site}.jsonl", "vocabulary": str(vocabulary)}
        split = {"train": 0.8, "validation": 0.0, "test": 0.2, "shuffle": False}
        (out / f"{site}.toml").write_text(tomli_w.dumps({"site": {"name": site}, "data": {**data, "split": split}}))


def session(name: str, model: dict[str, Any], algorithms: dict[str, Any], rounds: int, out: Path) -> dict[str, Any]:
    """Serve one experiment to both agents, and return the results."""
    experiment = {
        "name": name,
        "rounds": rounds,
        "task": {"model": "next_word_lstm", "args": model},
        "train": {"optimizer": "adam", "lr": 0.01, "epsilon": 1e-7, "optimizer_state": "keep"},
        "cohort": {"start_when": list(SITES)},
        "algorithm": algorithms,
    }
    (out / f"{name}.toml").write_text(tomli_w.dumps(experiment))
    folder, command = out / "runs" / name, [sys.executable, "-m", "fedloom"]
    serve = [*command, "serve", str(out / f"{name}.toml"), "--listen", f"127.0.0.1:{PORT}", "--out", str(folder)]
    processes = {"coordinator": start(serve, out / f"{name}-coordinator.log")}
    tokens = wait_for_tokens(folder, processes["coordinator"])
    for site, token in zip(SITES, tokens, strict=True):
        join = [*command, "join", f"https://127.0.0.1:{PORT}", "--site", str(out / f"{site}.toml")]
        join += ["--token-file", str(token), "--state", str(out / "state" / f"{name}-{site}")]
        processes[site] = start(join, out / f"{name}-{site}.log")
    peaks = watch(processes)
    if processes["coordinator"].returncode:
        raise SystemExit(f"{name}: see {out / f'{name}-coordinator.log'}")
    return {"peak_megabytes": peaks, "algorithms": measured(folder)}


def start(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)


def wait_for_tokens(folder: Path, serving: subprocess.Popen[bytes]) -> list[Path]:
    """The token of each agent: the coordinator writes them when its port is open."""
    while serving.poll() is None:
        found = sorted((folder / "network" / "tokens").glob("*.token"))
        if len(found) >= len(SITES):
            return found[: len(SITES)]
        time.sleep(0.2)
    raise SystemExit(f"The coordinator of {folder} has ended: see its log.")


def watch(processes: dict[str, subprocess.Popen[bytes]]) -> dict[str, float]:
    """The largest resident memory of each process until all of them have ended."""
    peaks = dict.fromkeys(processes, 0.0)
    while any(process.poll() is None for process in processes.values()):
        for name, process in processes.items():
            peaks[name] = max(peaks[name], resident(process.pid))
        if processes["coordinator"].returncode:
            for process in processes.values():
                process.terminate()
        time.sleep(0.5)
    return peaks


def resident(pid: int) -> float:
    """The peak so far, in megabytes, as Linux counts it."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1000 for line in lines if line.startswith("VmHWM")), 0.0)


def measured(folder: Path) -> dict[str, Any]:
    """Of every algorithm: the averaged model at each device over the last ten rounds, and what a round took."""
    view, found = RunData.read(folder), {}
    for label, seed in view.cells:
        curve, losses = (view.client_values(label, seed, "pre_fit", metric) for metric in ("accuracy", "loss"))
        mean, traffic = curve.by_round(), view.costs(label, seed)
        best = int(np.argmax(mean.mean))
        devices = {
            view.client_name(int(client)): float(curve.values[curve.clients == client][-10:].mean())
            for client in np.unique(curve.clients)
        }
        found[label] = {
            "accuracy": float(mean.mean[-10:].mean()),
            "loss": float(losses.by_round().mean[-10:].mean()),
            "devices": devices,
            "peak": float(mean.mean[best]),
            "peak_round": int(mean.index[best]),
            "rounds": int(mean.index[-1]),
            "bytes_up": float(traffic.bytes_up.mean()),
            "bytes_down": float(traffic.bytes_down.mean()),
            "seconds": float(np.median(traffic.seconds)),
            "sha256": view.cells[label, seed]["weights_sha256"],
        }
    return found


def draw(out: Path) -> None:
    """A panel for each algorithm, a line for each device."""
    lines = [
        (view, label, seed)
        for view in (RunData.read(out / "runs" / name) for name in SESSIONS)
        for label, seed in view.cells
    ]
    figure = new_figure(7.2, 4.2)
    grid = figure.subplots(2, 4, sharex=True, sharey=True)
    for axes, (view, label, seed) in zip(grid.flat, lines, strict=False):
        series = view.client_values(label, seed, "pre_fit", "accuracy")
        for client in np.unique(series.clients):
            here = series.clients == client
            axes.plot(series.rounds[here], series.values[here], linewidth=1.2, label=view.client_name(int(client)))
        finish_axes(axes, label, percent=True)
    for axes in list(grid.flat)[len(lines) :]:
        axes.set_visible(False)
    figure.legend(*grid.flat[0].get_legend_handles_labels(), loc="outside lower right", ncols=2, frameon=False)
    figure.supxlabel("Round")
    figure.savefig(out / "curves.png", dpi=110)


if __name__ == "__main__":
    main()
