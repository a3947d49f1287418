"""Measure what a training step takes on this machine, once in a run."""

from __future__ import annotations

import time

import numpy as np

from fedloom.algorithms.fedavg import FedAvg
from fedloom.backends.serial import Serial
from fedloom.clock.clock import steps
from fedloom.data.federation import Federation
from fedloom.experiment.store import Store
from fedloom.federation.work import ClientWork
from fedloom.task import Task
from fedloom.training.generators import GENERATOR
from fedloom.training.settings import Training

FACT = "seconds of a step"  # by label
MOST = 50  # steps in a measurement


def step_seconds(store: Store, label: str, federation: Federation, task: Task, train: Training) -> float:
    """Return what a step takes: as the run recorded it, or measured now and recorded."""
    with GENERATOR:  # one cell at a time: all seeds of a label use the same number
        known = store.fact(FACT) or {}
        if label not in known:
            known[label] = measure(federation, task, train)
            store.set_fact(FACT, known)
        return float(known[label])


def measure(federation: Federation, task: Task, train: Training) -> float:
    """Return the seconds of a plain training step, at a client of the usual size."""
    sizes = federation.sizes("train")
    client = int(np.argsort(sizes, kind="stable")[len(sizes) // 2])
    plain = train.replace(optimizer_state="reset", clients=None, patience=None)
    taken = float(steps(plain, sizes[client : client + 1])[0])
    if taken > MOST:
        plain = plain.replace(epochs=plain.epochs * MOST / taken)
        taken = float(steps(plain, sizes[client : client + 1])[0])
    work = ClientWork(FedAvg(train=plain), "client", {"model": task.initial()}, (client,), {}, 0, 1, 0, "sum")
    backend = Serial(federation, task)
    found = []
    for _ in range(3):  # the first one also warms up
        began = time.perf_counter()
        backend.run(work)
        found.append(time.perf_counter() - began)
    return min(found) / taken
