"""One paper, one file. A name in an experiment file resolves to a class here, or to somebody else's."""

from __future__ import annotations

from fedloom.algorithm import Algorithm
from fedloom.algorithms.fedavg import FedAvg
from fedloom.algorithms.fedsgd import FedSGD
from fedloom.algorithms.local_only import LocalOnly
from fedloom.algorithms.pooled import Pooled

__all__ = ["ALGORITHMS", "FedAvg", "FedSGD", "LocalOnly", "Pooled"]

ALGORITHMS: dict[str, type[Algorithm]] = {"fedavg": FedAvg, "fedsgd": FedSGD, "local": LocalOnly, "pooled": Pooled}
