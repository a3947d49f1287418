"""The reference work in fedloom: data, task, algorithm, cohort, and how they are computed."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import fedloom as fl
from fedloom.data.build import federate
from fedloom.data.sources.mnist import Mnist
from fedloom.experiment.tables import RunTable
from fedloom.experiment.worker_groups import choose_setup
from fedloom.training.clients import Setup
from fedloom.training.probe import probe

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))

import work as works

NOTHING = fl.Evaluation(splits=(), server=())
PARTITIONS = {"iid": {"name": "iid"}, "shards": {"name": "shards", "per_client": 2}}


@dataclass(frozen=True)
class Reference:
    """What `fl.fit` and `fl.run` take."""

    federation: fl.Federation
    task: fl.Task
    algorithm: fl.Algorithm
    sampling: fl.Sampling


def reference(
    name: str,
    data: str | None = None,
    partition: str = "iid",
    lr: float | None = None,
    cohort: int | None = None,
    hidden: int | None = None,
) -> Reference:
    """One of the works that the peers do too; `cohort` and `hidden` change its size for scaling."""
    work = works.WORKS[name]
    if name == "lstm":
        federation, task = text(), fl.Task("next_word_lstm")
    else:
        federation = mnist(data, partition, work.clients)
        task = fl.Task({"2nn": "mnist_2nn", "cnn": "mnist_cnn"}[name])
        if hidden is not None:
            task = fl.Task("mlp", args={"features": 784, "hidden": [hidden, hidden], "classes": 10})
    algorithm = fl.FedAvg(lr=lr or work.lr, batch_size=work.batch, epochs=work.epochs)
    return Reference(federation, task, algorithm, fl.Sampling(count=cohort or work.cohort))


def mnist(
    data: str | None, partition: str = "iid", clients: int = 100, split: tuple[float, float, float] = (1, 0, 0)
) -> fl.Federation:
    """MNIST in equal parts, with the official test set on the server."""
    dataset = Mnist(path=works.mnist_folder(data)).load(Path())
    return federate(dataset, partition={**PARTITIONS[partition], "clients": clients}, split=split, server="test")


def text() -> fl.Federation:
    """The synthetic sequences."""
    held = works.sequences()
    owner = np.repeat(np.arange(len(held)), [len(y) for _, y in held])
    x, y = (np.concatenate(parts) for parts in zip(*held, strict=True))
    return fl.Federation.from_arrays(x, y, client=owner, split=(1, 0, 0))


def setup_for(reference: Reference, group: int | str = "auto") -> Setup:
    """Return what a run would choose."""
    cohort = reference.sampling.size(reference.federation.clients)
    facts = probe(reference.federation, reference.task)
    return choose_setup(facts, RunTable(group=group, device="cpu"), cohort)
