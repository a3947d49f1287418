"""Seconds a generation of federated neuroevolution: fedloom against a loop over individuals, nodes and layers.

The loop is the published way (Szegedi 2019, listings 5 to 10) with torch in place of Keras: every individual becomes a
new model, is evaluated on every node of the generation by itself with scikit-learn's mean squared error, and is bred
and mutated layer by layer. The lean loop does the same with one module that is reused and torch's arithmetic. All
compute such generations on the same data; blocks of generations alternate. EEG trials are random: their values do not
affect the time.

    python benchmarks/evolution.py --part eeg digits long
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from fedloom import machine
from fedloom.algorithms import Neuroevolution
from fedloom.backends.serial import Serial
from fedloom.backends.vector import Vector
from fedloom.data.build import federate
from fedloom.data.federation import Dataset, Federation
from fedloom.data.sources.digits import Digits
from fedloom.federation.engine import Evaluation, fit
from fedloom.federation.sampling import Sampling
from fedloom.task import Task
from fedloom.training.probe import probe

POPULATION, PARENTS, CHANCE, RATE = 50, 8, 0.01, 3.0
QUIET = Evaluation(splits=(), every=10**9)
SAMPLING = Sampling(fraction=0.1, redraw_every=10)


def eeg_data() -> Federation:
    """Make ten trials per node, and a validation set on the server."""
    draws = np.random.default_rng(0)
    x = torch.from_numpy(draws.normal(0, 10, size=(925, 64, 256)).astype(np.float32))
    y = torch.from_numpy(draws.integers(0, 2, 925))
    partition = {"name": "unbalanced", "clients": 74, "shuffle": False}
    return federate(
        Dataset(x, y, classes=("a", "b")), partition=partition, split=(1.0, 0.0, 0.0), server={"validation": 0.2}
    )


def digits_data() -> Federation:
    partition = {"name": "unbalanced", "clients": 100}
    return federate(Digits().load(Path()), partition=partition, split=(1.0, 0.0, 0.0), server={"validation": 0.1})


def published_loop(federation: Federation, task: Task, lean: bool = False) -> Iterator[None]:
    """A generation a step, with lists of layers and numpy, as in the listings."""
    from sklearn.metrics import mean_squared_error

    random = np.random.default_rng(1)
    population = [
        [leaf.numpy() for leaf in Task(task.model, args=task.args, seed=number).initial().values()]
        for number in range(POPULATION)
    ]
    module = task.build().eval()
    names = list(task.initial())
    layers = [name for name, _ in module.named_parameters()]
    chosen = [names.index(name) for name in layers]
    validation_x, validation_y = federation.server["validation"]
    scale = 1.0 if federation.x.is_floating_point() else federation.scale

    def model_of(weights: list[np.ndarray]) -> torch.nn.Module:
        model = module if lean else task.build().eval()
        model.load_state_dict(dict(zip(names, (torch.from_numpy(np.asarray(w)) for w in weights), strict=True)))
        return model

    @torch.no_grad()
    def node_fitness(model: torch.nn.Module, node: int) -> tuple[int, float]:
        rows = federation.indices(node, "train")
        y = federation.y[rows]
        output = model(federation.x[rows].float() * scale)
        if not lean:
            one_hot = np.eye(output.shape[1], dtype=np.float32)[y.numpy()]
            return len(y), -mean_squared_error(one_hot, output.numpy())
        return len(y), -float((output - torch.nn.functional.one_hot(y, output.shape[1])).square().mean())

    def kernelwise(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.where(random.integers(2, size=(1, *a.shape[1:])).astype(bool), a, b)

    def mutated(layer: np.ndarray) -> np.ndarray:
        indices = np.append(
            np.full(int(layer.size * CHANCE), True), np.full(layer.size - int(layer.size * CHANCE), False)
        )
        random.shuffle(indices)
        return np.where(indices.reshape(layer.shape), layer * (1 + random.normal(0, 0.01 * RATE)), layer).astype(
            layer.dtype
        )

    generation = 0
    while True:
        generation += 1
        nodes = SAMPLING.draw(federation.clients, generation, 1)
        fitness = []
        for weights in population:
            model = model_of(weights)
            counted = np.array([node_fitness(model, node) for node in nodes]).T
            fitness.append(np.average(counted[1], weights=counted[0]))
        with torch.no_grad():
            best = model_of(population[int(np.argmax(fitness))])
            (best(validation_x.float() * scale).argmax(1) == validation_y).float().mean().item()
        order = np.argsort(fitness)[::-1]
        parents = [population[number] for number in [*order[: PARENTS - 1], random.choice(order[PARENTS - 1 :])]]
        offspring = []
        for _ in range(POPULATION - PARENTS):
            a, b = random.choice(PARENTS, 2, replace=False)
            child = list(parents[a])
            for place in chosen:
                child[place] = mutated(kernelwise(parents[a][place], parents[b][place]))
            offspring.append(child)
        population = [*parents, *offspring]
        yield


def fedloom_generations(
    federation: Federation, task: Task, workers: int, group: int = 1
) -> tuple[Iterator[object], Callable[[], None]]:
    """The same with fedloom: in this process, or in this number of worker processes."""
    setup = probe(federation, task).setup(group=group)
    backend = Vector(federation, task, setup, workers) if workers else Serial(federation, task, setup)
    records = fit(
        federation, task, Neuroevolution(), 10**9, seed=1, sampling=SAMPLING, evaluation=QUIET, backend=backend
    )
    return records, backend.close


def compare(
    name: str,
    federation: Federation,
    published: Task,
    task: Task,
    blocks: int,
    each: int,
    settings: list[tuple[int, int]],
) -> dict[str, object]:
    """Median seconds a generation of each way, in alternating blocks."""
    ways: dict[str, Iterator[object]] = {
        "published loop": published_loop(federation, published),
        "lean loop": published_loop(federation, published, lean=True),
    }
    closers = []
    for workers, group in settings:
        where = f"{workers} worker{'s' if workers > 1 else ''}" if workers else "serial"
        label = f"fedloom, {where}" + (f", group {group}" if group > 1 else "")
        ways[label], close = fedloom_generations(federation, task, workers, group)
        closers.append(close)
    for way in ways.values():
        next(way)
    seconds: dict[str, list[float]] = {label: [] for label in ways}
    for _ in range(blocks):
        for label, way in ways.items():
            for _ in range(1 if label.endswith("loop") else each):
                began = time.perf_counter()
                next(way)
                seconds[label].append(time.perf_counter() - began)
    for close in closers:
        close()
    medians = {label: statistics.median(values) for label, values in seconds.items()}
    slowest = medians["published loop"]
    print(f"\n## {name}: population {POPULATION}, {SAMPLING.size(federation.clients)} nodes a generation\n")
    print("| way | median ms a generation | times as fast |\n| --- | --- | --- |")
    for label, median in medians.items():
        print(f"| {label} | {median * 1000:.1f} | {slowest / median:.1f} |")
    return {"medians": medians, "seconds": seconds}


def long_run(generations: int) -> dict[str, object]:
    """Many generations of the digits net, validation every generation included."""
    federation, task = digits_data(), Task("digits_mlp")
    records, close = fedloom_generations(federation, task, 1, 32)
    began = time.perf_counter()
    best = max(next(records).notes["validation"] for _ in range(generations))  # type: ignore[attr-defined]
    took = time.perf_counter() - began
    close()
    print(f"\n{generations:,} generations of digits_mlp ({task.parameters:,} parameters): {took:.0f} s; ", end="")
    print(f"best validation accuracy {100 * best:.1f} %")
    return {"generations": generations, "seconds": took, "validation": best}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", nargs="+", choices=["eeg", "digits", "long"], default=["eeg", "digits", "long"])
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--generations", type=int, default=5000, help="of the long run")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks"))
    options = parser.parse_args()
    found: dict[str, object] = {"machine": machine.facts()}
    cores = machine.cores()
    with torch.no_grad():
        if "eeg" in options.part:
            plain = Task("eeg_cnn", args={"composed": False})
            found["eeg"] = compare(
                "EEG net", eeg_data(), plain, Task("eeg_cnn"), options.blocks, 3, [(0, 1), (cores, 1)]
            )
        if "digits" in options.part:
            task = Task("digits_mlp")
            found["digits"] = compare(
                "digits net", digits_data(), task, task, options.blocks, 20, [(0, 1), (1, 32), (cores, 32)]
            )
        if "long" in options.part:
            found["long"] = long_run(options.generations)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "evolution.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
