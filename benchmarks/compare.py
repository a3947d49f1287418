"""fedloom and its peers on the same work, alternating block by block in one run on one machine.

    python benchmarks/compare.py --data FOLDER --work 2nn cnn lstm --peers flower pfl fedjax --rounds 30

Every system is one process (with whatever it starts), loaded once. All sleep but the one whose block it is. Start-up
(from the start of the process to the end of its first round) is reported apart, warm-up rounds are thrown away.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import environments
from harness import (
    HERE,
    Failed,
    System,
    Ticker,
    Watch,
    describe_machine,
    machine,
    memory_peak,
    short,
    summary,
    table,
    wait_for_calm,
    write,
)

sys.path.insert(0, str(HERE / "peers"))

from work import WORKS, mnist_folder

DOES = {"fedloom": WORKS, "flower": ["2nn", "cnn"], "pfl": WORKS, "fedjax": ["2nn", "cnn"]}
BARS = {  # how many times faster fedloom means to be, at least
    ("2nn", "fedjax"): 2.0,
    ("2nn", "pfl"): 4.5,
    ("2nn", "flower"): 20.0,
    ("cnn", "fedjax"): 2.3,
    ("cnn", "pfl"): 1.5,
    ("cnn", "flower"): 1.5,
    ("lstm", "pfl"): 1.5,
}


def main() -> None:
    """Measure every work, write one table."""
    options = arguments()
    asked = {name: value for name, value in vars(options).items() if name not in ("data", "cache", "out")}
    facts: dict[str, Any] = {"machine": machine(), "options": asked, "works": {}}
    pythons, broken = interpreters(options)
    facts["versions"] = {name: environments.versions(python, name) for name, python in pythons.items()}
    for work in options.work:
        facts["works"][work] = measure(work, options, pythons, dict(broken))
        write("compare", report(facts), facts, options.out)  # after each work: a later one may be interrupted


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder with MNIST's idx files (or MNIST_DIR, or FEDLOOM_DATA)")
    parser.add_argument("--work", nargs="+", choices=WORKS, default=["2nn", "cnn"])
    parser.add_argument(
        "--peers",
        nargs="*",
        default=["flower", "pfl", "fedjax"],
        help="with options behind a colon, such as pfl:processes=2 or fedjax:devices=2",
    )
    parser.add_argument(
        "--fedloom",
        nargs="+",
        default=["auto"],
        help="settings to measure: auto, or such as group=5,compile=true (ratios are against the first)",
    )
    parser.add_argument("--rounds", type=int, default=30, help="rounds that count, of every system")
    parser.add_argument("--block", type=int, default=5, help="rounds at a stretch before the next system has its turn")
    parser.add_argument("--warmup", type=int, default=2, help="rounds thrown away, besides the first")
    parser.add_argument(
        "--calm", type=float, help="wait before a block until others use at most this share of the machine"
    )
    parser.add_argument("--cache", type=Path, default=environments.default_cache(), help="where peers are installed")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks"))
    options = parser.parse_args()
    for spec in options.peers:
        if split(spec)[0] not in environments.RECIPES:
            parser.error(f"there is no peer '{spec}': {', '.join(environments.RECIPES)}")
    if any(work != "lstm" for work in options.work):
        options.data = str(mnist_folder(options.data))
    return options


def split(spec: str) -> tuple[str, list[str]]:
    """`pfl:threads=2` as the peer's name and the options of its script."""
    name, _, rest = spec.partition(":")
    pairs = [pair.partition("=") for pair in rest.split(",") if pair]
    return name, [part for key, _, value in pairs for part in (f"--{key}", *([value] if value else []))]


def interpreters(options: argparse.Namespace) -> tuple[dict[str, Path], dict[str, str]]:
    """Who can be measured, and why others cannot."""
    pythons, broken = {"fedloom": Path(sys.executable)}, {}
    for spec in options.peers:
        name = split(spec)[0]
        if name not in pythons and name not in broken:
            try:
                pythons[name] = environments.prepare(name, options.cache)
            except environments.SetupFailed as error:
                broken[name] = str(error)
                print(f"{name}: {error}", file=sys.stderr)
    return pythons, broken


def measure(work: str, options: argparse.Namespace, pythons: dict[str, Path], failed: dict[str, str]) -> dict[str, Any]:
    """Start everybody, then let them take turns."""
    specs = [f"fedloom:{setting}".removesuffix(":auto") for setting in options.fedloom]
    specs += [spec for spec in options.peers if work in DOES[split(spec)[0]] and split(spec)[0] not in failed]
    found: dict[str, dict[str, Any]] = {}
    running: dict[str, System] = {}
    ticker = Ticker()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for spec in specs:
            ticker.say(f"{work}: starting {spec}", always=True)
            try:
                running[spec], found[spec] = start(spec, work, options, pythons, folder, stack)
            except Failed as error:
                failed[spec] = str(error)
                ticker.say(f"{work}: {error}", always=True)
        blocks = -(-options.rounds // options.block)
        for block in range(blocks):
            order = list(running)
            order = order[block % len(order) :] + order[: block % len(order)] if order else []
            for spec in order:
                rounds = min(options.block, options.rounds - block * options.block)
                ticker.say(f"{work}: block {block + 1} of {blocks}, {rounds} rounds of {spec}")
                wait_for_calm(options.calm)
                others = set().union(*(other.tree() for name, other in running.items() if name != spec))
                try:
                    with Watch(running[spec].tree()) as watch, Watch(others) as idle:
                        reports = running[spec].rounds(rounds)
                except Failed as error:
                    failed[spec] = str(error)
                    ticker.say(f"{work}: {error}", always=True)
                    running.pop(spec).close()
                    continue
                seconds = [report["seconds"] for report in reports]
                loads = {"used": watch.own, "idle_peers": idle.own, "others": max(watch.others - idle.own, 0)}
                found[spec]["blocks"].append({"seconds": seconds, "stolen": watch.stolen, **loads})
        for spec, system in running.items():
            found[spec]["memory_peak"] = memory_peak(system.tree())
            found[spec].update(summary([second for block in found[spec]["blocks"] for second in block["seconds"]]))
    return {"systems": found, "failed": failed}


def start(
    spec: str,
    work: str,
    options: argparse.Namespace,
    pythons: dict[str, Path],
    folder: Path,
    stack: contextlib.ExitStack,
) -> tuple[System, dict[str, Any]]:
    """Start one system, wait for its first round and warm it up."""
    name, extra = split(spec)
    script = HERE / "fedloom_rounds.py" if name == "fedloom" else HERE / "peers" / f"{name}_rounds.py"
    command = [str(pythons[name]), str(script), "--work", work, *extra]
    if options.data:
        command += ["--data", options.data]
    options.out.mkdir(parents=True, exist_ok=True)
    label = "".join(letter if letter.isalnum() else "-" for letter in spec)
    # a fresh cache for compiled code: start-up is that of a first run
    fresh = {"TORCHINDUCTOR_CACHE_DIR": str(folder / label)}
    system = System(spec, command, options.out / f"{work}-{label}.log", fresh)
    stack.callback(system.close)
    with Watch(system.tree()) as watch:
        facts = system.ready()
        loaded = time.perf_counter() - system.began
        first = system.rounds(1)[0]["seconds"]
        startup = time.perf_counter() - system.began
        system.tree()
    warm = [report["seconds"] for report in system.rounds(options.warmup)] if options.warmup else []
    return system, {
        **facts,
        "loaded": loaded,
        "startup": startup,
        "first_round": first,
        "stolen_at_startup": watch.stolen,
        "warmup": warm,
        "blocks": [],
    }


def report(facts: dict[str, Any]) -> str:
    """Markdown: one row per work and system, ratios against the first fedloom of the work."""
    options = facts["options"]
    lines = [
        "# fedloom and peers on the same work",
        "",
        describe_machine(facts["machine"]),
        "",
        f"Medians of {options['rounds']} rounds in blocks of {options['block']}, systems alternating; "
        "quartiles in brackets. A ratio is the system's median over fedloom's; its quartiles are over blocks, each "
        "against fedloom's block of the same turn. Start-up is from the start of the process to the end of the first "
        "round. Memory adds up the peaks of all processes of a system, shared pages counted in each. "
        "'Other load' is the share of the machine that unrelated processes used meanwhile.",
        "",
    ]
    header = ["work", "system", "s a round", "ratio", "at least", "start-up s", "memory GB", "other load"]
    rows = []
    for work, result in facts["works"].items():
        measured = {spec: found for spec, found in result["systems"].items() if found.get("count")}
        base = next((found for spec, found in measured.items() if split(spec)[0] == "fedloom"), None)
        for spec, found in measured.items():
            ratio, bar = "—", ""
            if base and found is not base:
                turns = zip(found["blocks"], base["blocks"], strict=False)
                pairs = summary([statistics.median(a["seconds"]) / statistics.median(b["seconds"]) for a, b in turns])
                times = found["median"] / base["median"]
                ratio = f"{times:.2f} × ({pairs['q1']:.2f} – {pairs['q3']:.2f})"
                wanted = BARS.get((work, split(spec)[0]))
                bar = f"{wanted:g} ×: {'met' if times >= wanted else 'missed'}" if wanted else ""
            load = statistics.median(block["others"] for block in found["blocks"])
            label = spec
            if spec.startswith("fedloom"):
                label += f" (group {found['group']}, {'compiled' if found['compile'] else 'eager'})"
            spread = f"{short(found['median'])} ({short(found['q1'])} – {short(found['q3'])})"
            memory = f"{found['memory_peak'] / 2**30:.1f}"
            rows.append([work, label, spread, ratio, bar, f"{found['startup']:.1f}", memory, f"{load:.0%}"])
        rows += [[work, spec, f"failed: {why}", "", "", "", "", ""] for spec, why in result["failed"].items()]
    lines += [table(header, rows), ""]
    for name, found in facts["versions"].items():
        lines.append(f"- {name}: " + ", ".join(f"{package} {version}" for package, version in found.items()))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
