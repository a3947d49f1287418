"""What virtual time costs: the clock's share of a round, and a long asynchronous run with many clients.

    python benchmarks/clock.py round    # ten clients of 600 examples, 2NN, bandwidth and a cycle of availability
    python benchmarks/clock.py async    # 10,000 answers of a small net, 100,000 clients, 1,000 at work
    python benchmarks/clock.py async --buffer 1 --concurrency 100 --cycle

Examples are random numbers. Times are processor time of one core, so that other programs disturb them little.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

import fedloom as fl
from fedloom.clock.clock import Clock
from fedloom.clock.fleet import Fleet

CYCLE = {"name": "cycle", "period": "24h", "share": 0.7}
QUIET = fl.Evaluation(splits=(), server=())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("round", "async"))
    parser.add_argument("--rounds", type=int, default=20, help="of the part 'round'")
    parser.add_argument("--answers", type=int, default=10_000, help="of the part 'async'")
    parser.add_argument("--clients", type=int, default=100_000)
    parser.add_argument("--buffer", type=int, default=10)
    parser.add_argument("--concurrency", type=int, default=1000)
    parser.add_argument("--cycle", action="store_true", help="clients are available 70 % of the time")
    options = parser.parse_args()
    torch.set_num_threads(1)
    (one_round if options.part == "round" else many_answers)(options)


def one_round(options: argparse.Namespace) -> None:
    """Print how much of a round is spent in the clock."""
    spent = [0.0]
    for name in ("begin", "answering", "end"):
        setattr(Clock, name, timed(getattr(Clock, name), spent))
    data = federation(100, 600, (1, 28, 28))
    system = fl.System(step=0.01, speed={"name": "lognormal"}, download=20.0, upload=5.0, availability=CYCLE)
    task, algorithm = fl.Task("mnist_2nn"), fl.FedAvg(batch_size=10, lr=0.01)
    sampling, fleet = fl.Sampling(count=10), Fleet.of(system, data)
    records = fl.fit(data, task, algorithm, options.rounds + 1, sampling=sampling, evaluation=QUIET, fleet=fleet)
    next(records)  # the first round also measures the size of an answer, once
    spent[0], began = 0.0, time.process_time()
    for _ in records:
        pass
    whole = (time.process_time() - began) / options.rounds
    clock = spent[0] / options.rounds
    print(f"a round {1e3 * whole:.0f} ms, the clock {1e3 * clock:.2f} ms of it: {clock / whole:.2%}")


def many_answers(options: argparse.Namespace) -> None:
    """Print how long a number of answers takes, and the largest memory until then."""
    data = federation(options.clients, 5, (64,))
    system = fl.System(step=0.1, speed={"name": "lognormal"}, availability=CYCLE if options.cycle else "always")
    sampling = fl.Sampling(mode="async", buffer=options.buffer, concurrency=options.concurrency)
    began, rounds = time.process_time(), options.answers // options.buffer
    task, algorithm = fl.Task("digits_mlp"), fl.FedAvg(batch_size=5)
    records = fl.fit(data, task, algorithm, rounds, sampling=sampling, evaluation=QUIET, fleet=Fleet.of(system, data))
    answers = sum(len(record.cohort) for record in records)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"{answers:,} answers in {time.process_time() - began:.0f} s of processor time, at most {memory:.2f} GB")


def federation(clients: int, examples: int, shape: tuple[int, ...]) -> fl.Federation:
    """Return clients with random examples of ten classes."""
    count, generator = clients * examples, torch.Generator().manual_seed(0)
    x = torch.rand(count, *shape, generator=generator)
    y = torch.randint(10, (count,), generator=generator)
    names = torch.arange(clients).repeat_interleave(examples)
    return fl.Federation.from_arrays(x.numpy(), y.numpy(), client=names.numpy(), split=(1.0, 0.0, 0.0))


def timed(method: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    """Return a method that adds its processor time to `spent`."""

    @wraps(method)
    def measured(*given: Any, **named: Any) -> Any:
        began = time.process_time()
        try:
            return method(*given, **named)
        finally:
            spent[0] += time.process_time() - began

    return measured


if __name__ == "__main__":
    main()
