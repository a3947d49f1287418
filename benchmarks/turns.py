"""Several systems taking turns: each is loaded once, sleeps, and computes a block of rounds when it is its turn."""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import Failed, System, Ticker, Watch, memory_peak, summary, wait_for_calm


def add_options(parser: ArgumentParser, rounds: int) -> None:
    """The options of all benchmarks that take turns."""
    parser.add_argument("--rounds", type=int, default=rounds, help="rounds that count, of every system")
    parser.add_argument("--block", type=int, default=5, help="rounds in a row before the next system has its turn")
    parser.add_argument("--warmup", type=int, default=2, help="rounds to discard after the first")
    parser.add_argument(
        "--calm", type=float, help="wait before a block until others use at most this fraction of the CPU"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks"), help="folder of results and logs")


def take_turns(title: str, commands: Mapping[str, Sequence[str]], options: Namespace) -> dict[str, Any]:
    """Start every system, then alternate. A system that fails is reported, and the others continue."""
    found: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    running: dict[str, System] = {}
    ticker = Ticker()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for name, command in commands.items():
            ticker.say(f"{title}: starting {name}", always=True)
            try:
                running[name], found[name] = _start(title, name, command, options, folder, stack)
            except Failed as error:
                failed[name] = str(error)
                ticker.say(f"{title}: {error}", always=True)
        blocks = -(-options.rounds // options.block)
        for block in range(blocks):
            rounds = min(options.block, options.rounds - block * options.block)
            for name in _rotated(list(running), block):
                ticker.say(f"{title}: block {block + 1} of {blocks}, {rounds} rounds of {name}")
                wait_for_calm(options.calm)
                try:
                    found[name]["blocks"].append(_block(name, rounds, running))
                except Failed as error:
                    failed[name] = str(error)
                    ticker.say(f"{title}: {error}", always=True)
                    running.pop(name).close()
        for name, system in running.items():
            seconds = [second for block in found[name]["blocks"] for second in block["seconds"]]
            found[name].update(summary(seconds), memory_peak=memory_peak(system.tree()))
            if seconds:
                found[name]["cpu"] = sum(block["cpu"] for block in found[name]["blocks"]) / len(seconds)
                found[name]["others"] = statistics.median(block["others"] for block in found[name]["blocks"])
    return {"systems": {name: found[name] for name in running}, "failed": failed}


def _start(
    title: str,
    name: str,
    command: Sequence[str],
    options: Namespace,
    folder: Path,
    stack: contextlib.ExitStack,
) -> tuple[System, dict[str, Any]]:
    """Start one system, wait for its first round and warm it up."""
    options.out.mkdir(parents=True, exist_ok=True)
    label = "".join(letter if letter.isalnum() else "-" for letter in f"{title}-{name}")
    # a fresh cache for compiled code: start-up is that of a first run
    fresh = {"TORCHINDUCTOR_CACHE_DIR": str(folder / label)}
    with Watch(set()) as watch:
        system = System(name, command, options.out / f"{label}.log", fresh)
        stack.callback(system.close)
        facts = system.ready()
        loaded = time.perf_counter() - system.began
        first = system.rounds(1)[0]["seconds"]
        startup = time.perf_counter() - system.began
        system.tree()
    warm = [report["seconds"] for report in system.rounds(options.warmup)] if options.warmup else []
    times = {"loaded": loaded, "startup": startup, "first_round": first, "warmup": warm}
    return system, {**facts, **times, "busy_at_startup": watch.others, "blocks": []}


def _block(name: str, rounds: int, running: dict[str, System]) -> dict[str, Any]:
    """One system computes, the others sleep: its seconds, and what else the machine was busy with."""
    sleeping = set().union(*(system.tree() for other, system in running.items() if other != name))
    with Watch(running[name].tree()) as watch, Watch(sleeping) as idle:
        reports = running[name].rounds(rounds)
    return {
        "seconds": [report["seconds"] for report in reports],
        "cpu": watch.cpu,
        "sleepers": idle.own,
        "others": max(watch.others - idle.own, 0),
        "stolen": watch.stolen,
    }


def _rotated(names: list[str], turn: int) -> list[str]:
    """Return the order of a block; a different system begins each time, so that none always follows the same one."""
    first = turn % len(names) if names else 0
    return names[first:] + names[:first]
