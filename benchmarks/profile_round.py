"""Where the time of one round goes: in the parent, and in one worker's share of it, computed in this process.

    python benchmarks/profile_round.py --data FOLDER --work 2nn --group 5

The profiler slows down Python calls but not kernels, so the seconds without it are shown as well. A worker is
profiled by its processor time, which other processes on the machine disturb less than the clock; the parent by the
clock, because it mostly waits. `--ops` adds torch's own profile of the kernels.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import fedloom_work
import torch
import work as works
from harness import describe_machine, machine, short, table
from settings import add_settings, settings

import fedloom as fl
from fedloom.backends.protocol import Backend
from fedloom.backends.vector import Vector
from fedloom.federation.work import Place, Work
from fedloom.machine import cores, prepare_process
from fedloom.training.clients import Setup

# what a profiled function belongs to: the first pattern that its `file:name` contains decides
KINDS = (
    ("backward pass", ("run_backward", "autograd/graph.py", "autograd/__init__.py")),
    ("vmap and functional grad, in Python", ("torch/_functorch", "torch/func", "_functorch", "pytree")),
    ("update of the weights", ("_foreach", "optimizers.py")),
    ("forward pass and loss", ("nn.linear", "conv2d", "relu", "max_pool", "cross_entropy", "lstm", "embedding", "nn/")),
    ("reading the loss", ("method 'item'",)),
    ("examples of a batch", ("evaluation.py:", "method 'mul_'", "method 'to'", "method 'index_select'")),
    ("order of batches, steps", ("course.py", "keys.py", "_hashlib", "blake2", "argsort", "method 'permutation'")),
    ("lanes", ("lanes.py",)),
    ("local training, in Python", ("local.py", "clients.py", "federation.py")),
    ("sums", ("rules.py", "tree.py", "work.py", "weights.py")),
    ("messages", ("pickle", "connection.py", "posix.read", "posix.write", "storage", "_io", "socket")),
    ("waiting for workers", ("select.poll", "select.select", "selectors.py", "method 'poll'", "posix.waitpid")),
)


class Here(Backend):
    """A worker's half of the vector backend, without the process: a message in, the work, a message out."""

    def __init__(self, reference: fedloom_work.Reference, setup: Setup) -> None:
        self.place = Place(reference.federation, reference.task, setup)

    def run(self, work: Work) -> Any:
        told = cloudpickle.loads(cloudpickle.dumps(work))
        answer = cloudpickle.loads(cloudpickle.dumps(told.perform(self.place)))
        return work.merge([answer])


def main() -> None:
    """Profile the parent, then a worker."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", choices=works.WORKS, default="2nn")
    parser.add_argument("--data")
    parser.add_argument("--rounds", type=int, default=5, help="rounds with and rounds without the profiler")
    parser.add_argument("--lines", type=int, default=20, help="functions to list")
    parser.add_argument("--ops", action="store_true", help="also torch's own profile")
    add_settings(parser)
    options = parser.parse_args()
    chosen = settings(options)
    reference = fedloom_work.reference(options.work, options.data)
    setup = fedloom_work.setup_for(reference, chosen["group"])
    workers = options.workers or cores()
    print(f"# One round of {options.work}: group {setup.group}, {workers} workers\n")
    print(describe_machine(machine()), "\n")
    backend = Vector(reference.federation, reference.task, setup, workers)
    profile("The parent", rounds(reference, backend), options, time.perf_counter)
    backend.close()
    prepare_process()
    share = -(-reference.sampling.size(reference.federation.clients) // workers)
    alone = fedloom_work.Reference(reference.federation, reference.task, reference.algorithm, fl.Sampling(count=share))
    profile(f"A worker: {share} clients", rounds(alone, Here(alone, setup)), options, time.thread_time)


def rounds(reference: fedloom_work.Reference, backend: Any) -> Iterator[Any]:
    """Rounds without evaluation."""
    return fl.fit(
        reference.federation,
        reference.task,
        reference.algorithm,
        10**9,
        sampling=reference.sampling,
        evaluation=fedloom_work.NOTHING,
        backend=backend,
    )


def profile(title: str, records: Iterator[Any], options: argparse.Namespace, clock: Callable[[], float]) -> None:
    """Some rounds to warm up, some with a clock, some with the profiler."""
    for _ in range(2):
        next(records)
    wall, used = clocked(records, options.rounds)
    profiler = cProfile.Profile(clock)
    profiler.enable()
    profiled = clocked(records, options.rounds)[clock is time.thread_time]
    profiler.disable()
    found = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    total = sum(own for _, _, own, _, _ in found.values())
    print(f"## {title}\n\n{short(wall)} s a round, of which {short(used)} s of processor time in this thread.")
    kind = "processor time" if clock is time.thread_time else "time"
    print(f"Shares of {short(profiled)} s {kind} with the profiler on:\n")
    kinds: Counter[str] = Counter()
    for place, (_, _, own, _, _) in found.items():
        kinds[kind_of(place)] += own
    per_round = total / options.rounds
    print(
        table(
            ["what", "share", "s a round"],
            [[kind, f"{own / total:.1%}", short(own / total * per_round)] for kind, own in kinds.most_common()],
        )
    )
    print()
    slowest = sorted(found.items(), key=lambda entry: -entry[1][2])[: options.lines]
    print(
        table(
            ["function", "calls a round", "own share", "with what it calls"],
            [
                [
                    f"`{name_of(place)}`",
                    f"{calls / options.rounds:.0f}",
                    f"{own / total:.1%}",
                    f"{cumulative / total:.1%}",
                ]
                for place, (_, calls, own, cumulative, _) in slowest
            ],
        )
    )
    print()
    if options.ops:
        ops(records, options)


def clocked(records: Iterator[Any], count: int) -> tuple[float, float]:
    """The median seconds of a round, by the clock and of this thread's processor time."""
    walls, used = [], []
    for _ in range(count):
        began, before = time.perf_counter(), time.thread_time()
        next(records)
        walls.append(time.perf_counter() - began)
        used.append(time.thread_time() - before)
    return statistics.median(walls), statistics.median(used)


def kind_of(place: tuple[str, int, str]) -> str:
    """What a function of the profile belongs to."""
    text = name_of(place)
    for kind, patterns in KINDS:
        if any(pattern in text for pattern in patterns):
            return kind
    return "other torch" if "torch" in text else "other"


def name_of(place: tuple[str, int, str]) -> str:
    """A function as `file:name`, the file from its package on."""
    file, _, function = place
    for package in ("/site-packages/", "/fedloom/", "/lib/python3"):
        file = file.partition(package)[2] or file
    return function if file == "~" else f"{file}:{function}"


def ops(records: Iterator[Any], options: argparse.Namespace) -> None:
    """What torch says about its kernels."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        seconds = clocked(records, options.rounds)[0]
    events = sorted(profiler.key_averages(), key=lambda event: -event.self_cpu_time_total)
    total = sum(event.self_cpu_time_total for event in events) / 1e6 / options.rounds
    print(f"Kernels, as torch sees them: {short(total)} s of {short(seconds)} s a round\n")
    print(
        table(
            ["kernel", "calls a round", "s a round", "µs a call"],
            [
                [
                    f"`{event.key}`",
                    f"{event.count / options.rounds:.0f}",
                    short(event.self_cpu_time_total / 1e6 / options.rounds),
                    f"{event.self_cpu_time_total / event.count:.1f}",
                ]
                for event in events[: options.lines]
            ],
        )
    )
    print()


if __name__ == "__main__":
    main()
