"""Compare clients one after another with clients side by side, in processor time of one thread.

    python benchmarks/lanes.py

Both take turns, so that a busy machine slows both. Examples are random: only their shapes matter. The table is in the
docstring of `fedloom.training.trainers.lanes`, which chooses between them.
"""

from __future__ import annotations

import time
from statistics import median

import numpy as np

import fedloom as fl
from fedloom.federation.engine import Evaluation, fit
from fedloom.federation.work import Place
from fedloom.testing.ways import InProcess
from fedloom.training.probe import probe

WORKS = {  # model → shape of an example, clients, examples of each
    "digits_mlp": ((64,), 100, 30),
    "mnist_2nn": ((1, 28, 28), 20, 60),
    "mnist_cnn": ((1, 28, 28), 20, 20),
}
ROUNDS, NOTHING = 7, Evaluation(splits=(), server=())


def main() -> None:
    """Print the seconds of a round for every model, and the ratio."""
    print("| model | bytes | clients | one by one | ten side by side | ratio |\n| --- | --- | --- | --- | --- | --- |")
    for name, (shape, clients, examples) in WORKS.items():
        random = np.random.default_rng(0)
        x = random.normal(size=(clients * examples, *shape)).astype(np.float32)
        data = fl.Federation.from_arrays(x, np.arange(len(x)) % 10, clients=clients, split=(1, 0, 0))
        task = fl.Task(name)
        facts = probe(data, task)
        algorithm = fl.FedAvg(lr=0.01, batch_size=10)
        running = {}
        for group in (1, 10):
            backend = InProcess(Place(data, task, facts.setup(group)), ())
            running[group] = fit(data, task, algorithm, 10**9, evaluation=NOTHING, backend=backend)
            next(running[group])  # records the steps
        seconds: dict[int, list[float]] = {1: [], 10: []}
        for _ in range(ROUNDS):
            for group, records in running.items():
                began = time.thread_time()
                next(records)
                seconds[group].append(time.thread_time() - began)
        one, ten = median(seconds[1]), median(seconds[10])
        ratio = median(b / a for a, b in zip(seconds[1], seconds[10], strict=True))
        size = f"{facts.bytes:,}"
        print(f"| {name} | {size} | {clients} | {one * 1000:.0f} ms | {ten * 1000:.0f} ms | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    main()
