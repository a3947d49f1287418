"""Minutes to a test accuracy, with all 10,000 test images after every round: fedloom with its store on, and peers.

    python benchmarks/time_to_accuracy.py --data FOLDER --partition iid shards --peers pfl flower --seeds 3

2NN, 100 clients, 10 a round, batch 10, one local epoch. Runs are whole and one at a time, systems alternating from seed
to seed. Each draws its own cohorts and initial weights, so the number of rounds differs by chance; the table shows it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import environments
from compare import interpreters, split
from harness import HERE, Failed, System, Ticker, Watch, describe_machine, machine, short, table, wait_for_calm, write

sys.path.insert(0, str(HERE / "peers"))

from work import mnist_folder

BARS = {"pfl": 4.0, "flower": 15.0}
RATES = {"iid": 0.1, "shards": 0.05}


def main() -> None:
    """Run every system with every seed, and write one table."""
    options = arguments()
    pythons, failed = interpreters(options)
    asked = {name: value for name, value in vars(options).items() if name not in ("data", "cache", "out")}
    facts: dict[str, Any] = {"machine": machine(), "options": asked, "runs": [], "failed": failed}
    facts["versions"] = {name: environments.versions(python, name) for name, python in pythons.items()}
    systems = [f"fedloom:{options.fedloom}".removesuffix(":auto")]
    systems += [spec for spec in options.peers if split(spec)[0] in pythons]
    for partition in options.partition:
        for seed in range(options.seeds):
            for spec in systems:
                wait_for_calm(options.calm)
                try:
                    facts["runs"].append(run(spec, partition, seed, options, pythons))
                except Failed as error:
                    failed[spec] = str(error)
                    print(error, file=sys.stderr)
                write("time_to_accuracy", report(facts), facts, options.out)
    print(report(facts))


def arguments() -> argparse.Namespace:
    """What is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder with MNIST's idx files (or MNIST_DIR, or FEDLOOM_DATA)")
    parser.add_argument("--partition", nargs="+", choices=RATES, default=list(RATES))
    parser.add_argument("--peers", nargs="*", default=["pfl", "flower"])
    parser.add_argument("--fedloom", default="auto", help="auto, or such as group=5")
    parser.add_argument("--target", type=float, default=0.97)
    parser.add_argument("--most", type=int, default=1000, help="give up a run after this number of rounds")
    parser.add_argument("--seeds", type=int, default=1, help="runs of every system")
    parser.add_argument("--lr", type=float, help=f"learning rate (default: {RATES})")
    parser.add_argument(
        "--calm", type=float, help="wait before a run until others use at most this fraction of the CPU"
    )
    parser.add_argument("--cache", type=Path, default=environments.default_cache(), help="where peers are installed")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks"))
    options = parser.parse_args()
    options.data = str(mnist_folder(options.data))
    return options


def run(spec: str, partition: str, seed: int, options: argparse.Namespace, pythons: dict[str, Path]) -> dict[str, Any]:
    """One run to the target: rounds, seconds since the process began and since its first round began."""
    name, extra = split(spec)
    script = HERE / "fedloom_rounds.py" if name == "fedloom" else HERE / "peers" / f"{name}_rounds.py"
    rate = str(options.lr or RATES[partition])
    command = [str(pythons[name]), str(script), "--data", options.data, "--partition", partition, "--lr", rate]
    command += ["--seed", str(seed), "--evaluate", *extra]
    options.out.mkdir(parents=True, exist_ok=True)
    ticker = Ticker()
    label = "".join(letter if letter.isalnum() else "-" for letter in f"{partition}-{spec}-{seed}")
    with tempfile.TemporaryDirectory() as fresh, Watch(set()) as watch:
        system = System(spec, command, options.out / f"target-{label}.log", {"TORCHINDUCTOR_CACHE_DIR": fresh})
        try:
            system.ready()
            began = time.perf_counter()
            seconds: list[float] = []
            accuracies: list[float] = []
            first = 0.0
            while len(seconds) < options.most and (not accuracies or accuracies[-1] < options.target):
                told = system.rounds(1)[0]
                seconds.append(told["seconds"])
                accuracies.append(told["accuracy"])
                first = first or time.perf_counter() - system.began
                system.tree()
                ticker.say(f"{partition}, seed {seed}, {spec}: round {len(seconds)}, accuracy {accuracies[-1]:.4f}")
            ended = time.perf_counter()
        finally:
            system.close()
    return {
        "system": spec,
        "partition": partition,
        "seed": seed,
        "reached": accuracies[-1] >= options.target,
        "rounds": len(seconds),
        "total": ended - system.began,
        "training": ended - began,
        "startup": first,
        "others": watch.others,
        "seconds": seconds,
        "accuracies": accuracies,
    }


def report(facts: dict[str, Any]) -> str:
    """Markdown: medians over seeds."""
    options = facts["options"]
    rows = []
    for partition in options["partition"]:
        runs = [found for found in facts["runs"] if found["partition"] == partition]
        names = list(dict.fromkeys(found["system"] for found in runs))
        medians = {name: medians_of([found for found in runs if found["system"] == name]) for name in names}
        base = next((found for name, found in medians.items() if split(name)[0] == "fedloom"), None)
        for name, found in medians.items():
            ratio, even, bar = "", "", ""
            if base and found is not base:
                even = f"{found['round'] / base['round']:.1f} ×"
            if base and found is not base and found["reached"] and base["reached"]:
                times, wanted = found["total"] / base["total"], BARS.get(split(name)[0])
                ratio = f"{times:.1f} ×"
                bar = f"{wanted:g} ×: {'met' if times >= wanted else 'missed'}" if wanted else ""
            minutes = f"{found['total'] / 60:.2f}" if found["reached"] else f"not in {found['total'] / 60:.2f}"
            numbers = [f"{found['rounds']:g}", short(found["round"]), f"{found['startup']:.1f}"]
            rows.append([partition, name, minutes, ratio, bar, *numbers, even])
    rows += [["", spec, f"failed: {why}", *[""] * 6] for spec, why in facts["failed"].items()]
    header = ["partition", "system", "minutes", "ratio", "at least", "rounds", "s a round", "start-up s", "per round"]
    title = f"# Minutes to {options['target']:.0%} test accuracy, 2NN, evaluation every round"
    note = (
        f"Medians of {options['seeds']} runs, from the start of the process. 's a round' has the evaluation of 10,000 "
        "test images in it, for fedloom also the store and a checkpoint; 'per round' compares these."
    )
    return "\n\n".join([title, describe_machine(facts["machine"]), note, table(header, rows)])


def medians_of(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Several seeds of one system."""
    numbers = {name: statistics.median(found[name] for found in runs) for name in ("total", "rounds", "startup")}
    later = [second for found in runs for second in found["seconds"][1:]] or [runs[0]["seconds"][0]]
    return {**numbers, "round": statistics.median(later), "reached": all(found["reached"] for found in runs)}


if __name__ == "__main__":
    main()
