"""How fedloom's rounds scale: workers, clients a round, model size, population; evaluation; the mean; memory.

python benchmarks/scaling.py --data FOLDER --part workers clients size population evaluation mean
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import turns
from harness import HERE, describe_machine, machine, short, summary, table, write
from settings import add_settings, settings

sys.path.insert(0, str(HERE / "peers"))

from work import mnist_folder

Rows = list[list[str]]


def main() -> None:
    """Measure the requested parts, one section each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder with MNIST's idx files (or MNIST_DIR, or FEDLOOM_DATA)")
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--work", nargs="+", choices=["2nn", "cnn", "lstm"], default=["2nn", "cnn"], help="for workers")
    parser.add_argument("--cohorts", nargs="+", type=int, default=[5, 10, 20, 50, 100])
    parser.add_argument("--hidden", nargs="+", type=int, default=[25, 50, 100, 200, 400, 800])
    parser.add_argument("--groups", nargs="+", default=["1", "5"], help="for size: group sizes")
    parser.add_argument("--populations", nargs="+", type=int, default=[1_000, 1_000_000])
    turns.add_options(parser, rounds=20)
    add_settings(parser)
    options = parser.parse_args()
    if set(options.part) & {"workers", "clients", "size", "evaluation"}:
        options.data = str(mnist_folder(options.data))
    facts: dict[str, Any] = {"machine": machine()}
    sections = ["# How fedloom scales", describe_machine(facts["machine"])]
    for part in options.part:
        title, header, rows, facts[part] = PARTS[part](options)
        sections += [f"## {title}", table(header, rows)]
        write("scaling", "\n\n".join(sections), facts, options.out)
    print("\n\n".join(sections))


def rounds(options: argparse.Namespace, *extra: str, script: str = "fedloom_rounds.py") -> list[str]:
    """Return the command of a process that computes rounds with these options."""
    command = [sys.executable, str(HERE / script), "--group", options.group]
    if options.workers:
        command += ["--workers", str(options.workers)]
    if script == "fedloom_rounds.py":
        command += ["--data", str(options.data)]
    return [*command, *extra]


def spread(found: dict[str, Any]) -> str:
    """A median with its quartiles."""
    return f"{short(found['median'])} ({short(found['q1'])} – {short(found['q3'])})"


def setting(found: dict[str, Any]) -> str:
    """Return how clients were computed."""
    return str(found["group"])


def failures(result: dict[str, Any], width: int) -> Rows:
    """Return a row for each system that failed."""
    return [[name, f"failed: {why}", *[""] * (width - 2)] for name, why in result["failed"].items()]


def workers(options: argparse.Namespace) -> tuple[str, list[str], Rows, Any]:
    """One worker against two, and as many as there are cores."""
    rows: Rows = []
    facts = {}
    header = ["work", "workers", "group", "s a round", "against one", "CPU s a round", "memory GB"]
    for work in options.work:
        commands = {str(n): rounds(options, "--work", work, "--workers", str(n)) for n in (1, 2)}
        facts[work] = result = turns.take_turns(f"workers {work}", commands, options)
        one = result["systems"].get("1")
        for number, found in result["systems"].items():
            gain = f"{one['median'] / found['median']:.2f} ×" if one else ""
            memory = f"{found['memory_peak'] / 2**30:.2f}"
            rows.append([work, number, setting(found), spread(found), gain, short(found["cpu"]), memory])
        rows += failures(result, len(header))
    return "Workers (at least 1.8 × with two)", header, rows, facts


def clients(options: argparse.Namespace) -> tuple[str, list[str], Rows, Any]:
    """More clients per round: the cost of each client should stay the same."""
    commands = {str(n): rounds(options, "--work", "2nn", "--cohort", str(n)) for n in options.cohorts}
    result = turns.take_turns("clients", commands, options)
    rows = [
        [
            number,
            setting(found),
            spread(found),
            f"{found['median'] / int(number) * 1000:.2f}",
            f"{found['cpu'] / int(number) * 1000:.2f}",
            f"{found['memory_peak'] / 2**30:.2f}",
        ]
        for number, found in result["systems"].items()
    ]
    header = ["clients a round", "group", "s a round", "ms a client", "CPU ms a client", "memory GB"]
    return "Clients a round, 2NN", header, rows + failures(result, len(header)), result


def size(options: argparse.Namespace) -> tuple[str, list[str], Rows, Any]:
    """Models of other sizes, in groups: the rule for the group size is based on this."""
    rows: Rows = []
    facts = {}
    header = ["hidden", "parameters", "group", "s a round", "CPU µs a client-step", "start-up s", "memory GB"]
    for hidden in options.hidden:
        commands = {}
        for group in options.groups:
            extra = ["--hidden", str(hidden), "--group", group]
            commands[group] = rounds(options, *extra)
        facts[hidden] = result = turns.take_turns(f"size {hidden}", commands, options)
        for found in result["systems"].values():
            step = f"{found['cpu'] / 600 * 1e6:.0f}"
            memory = f"{found['memory_peak'] / 2**30:.2f}"
            start = f"{found['startup']:.1f}"
            rows.append([str(hidden), f"{found['parameters']:,}", setting(found), spread(found), step, start, memory])
        rows += failures(result, len(header))
    return "Model size: two hidden layers, 10 clients of 600, batch 10", header, rows, facts


def population(options: argparse.Namespace) -> tuple[str, list[str], Rows, Any]:
    """A thousand clients and a million: the build, and the same round."""
    commands = {
        f"{n:,}": rounds(options, "--clients", str(n), script="population_rounds.py") for n in options.populations
    }
    result = turns.take_turns("population", commands, options)
    least = next(iter(result["systems"].values()), None)
    rows = [
        [
            name,
            f"{found['examples']:,}",
            f"{found['build_seconds']:.1f}",
            f"{found['memory_after_build'] / 2**30:.2f} ({found['memory_of_arrays'] / 2**30:.2f})",
            spread(found),
            f"{found['median'] / least['median']:.2f} ×" if least else "",
            f"{found['startup']:.1f}",
            f"{found['memory_peak'] / 2**30:.2f}",
        ]
        for name, found in result["systems"].items()
    ]
    header = [
        "clients",
        "examples",
        "build s",
        "peak GB after it (before)",
        "s a round",
        "against the first",
        "start-up s",
        "peak GB, all processes",
    ]
    title = "Population (a million: built in 15 s and 2 GB, a round ± 20 %)"
    return title, header, rows + failures(result, len(header)), result


def evaluation(options: argparse.Namespace) -> tuple[str, list[str], Rows, Any]:
    """All 100 clients on 120 test examples each, against a round of 2NN."""
    import fedloom_work

    import fedloom as fl
    from fedloom.backends.vector import Vector, Workers
    from fedloom.federation.evaluation import TOGETHER, EvaluationWork
    from fedloom.machine import cores

    chosen = settings(options)
    work = fedloom_work.reference("2nn", options.data)
    tested = fedloom_work.mnist(options.data, split=(0.8, 0.0, 0.2))
    setup = fedloom_work.setup_for(work, chosen["group"])
    count = options.workers or cores()
    training = Vector(work.federation, work.task, setup, Workers(count))
    testing = Vector(tested, work.task, setup, Workers(count))
    everyone = tuple(range(tested.clients))
    records = fl.fit(
        work.federation,
        work.task,
        work.algorithm,
        10**9,
        sampling=work.sampling,
        evaluation=fedloom_work.NOTHING,
        backend=training,
    )
    state = {"model": work.task.initial()}
    examine = EvaluationWork(work.algorithm, state, {}, everyone, ("test",), together=TOGETHER)
    found = alternate({"round": lambda: next(records), "evaluation": lambda: testing.run(examine)}, options.rounds)
    training.close()
    testing.close()
    share = found["evaluation"]["median"] / found["round"]["median"]
    rows = [["a round of 2NN", spread(found["round"]), ""], ["evaluation", spread(found["evaluation"]), f"{share:.0%}"]]
    title = f"Evaluation of 100 clients on 120 test examples each (group {setup.group})"
    return title, ["what", "s", "share"], rows, {**found, "group": setup.group}


def mean(options: argparse.Namespace) -> tuple[str, list[str], Rows, Any]:
    """The weighted mean of 100 models of 1.66 million parameters, against torch's own sum of it."""
    import torch

    from fedloom.aggregation import means
    from fedloom.models.mnist_cnn import MnistCNN

    torch.set_num_threads(1)
    updates = 100
    shapes = {name: leaf.shape for name, leaf in MnistCNN().state_dict().items()}
    flat = torch.rand(updates, sum(shape.numel() for shape in shapes.values()))
    parts = flat.split([shape.numel() for shape in shapes.values()], dim=1)
    named = zip(shapes.items(), parts, strict=True)
    stacked = {name: part.contiguous().reshape(updates, *shape) for (name, shape), part in named}
    weights = torch.full((updates,), 600.0)

    found = alternate(
        {
            "torch.sum to one number": lambda: flat.sum(),
            "torch.sum over clients": lambda: flat.sum(0),
            "rules.mean": lambda: means.mean(stacked, weights),
        },
        options.rounds,
    )
    base = found["torch.sum over clients"]["median"]
    rows = [[name, spread(seconds), f"{seconds['median'] / base:.2f} ×"] for name, seconds in found.items()]
    title = "Mean over 100 updates of 1.66 M parameters, one thread (at most 1.5 × torch.sum)"
    return title, ["what", "s", "against torch.sum over clients"], rows, found


def alternate(actions: dict[str, Callable[[], Any]], times: int) -> dict[str, dict[str, float]]:
    """Seconds of some actions in this process, one after the other, again and again."""
    for action in actions.values():
        action()
        action()
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(times):
        for name, action in actions.items():
            began = time.perf_counter()
            action()
            seconds[name].append(time.perf_counter() - began)
    return {name: summary(values) for name, values in seconds.items()}


PARTS = {
    "workers": workers,
    "clients": clients,
    "size": size,
    "population": population,
    "evaluation": evaluation,
    "mean": mean,
}

if __name__ == "__main__":
    main()
