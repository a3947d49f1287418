"""One paper, one file. A name in an experiment file resolves to a class here, or to somebody else's."""

from __future__ import annotations

from fedloom.algorithm import Algorithm
from fedloom.algorithms.cocoa import CoCoA
from fedloom.algorithms.ditto import Ditto
from fedloom.algorithms.evolution.neuroevolution import Neuroevolution, RandomSearch
from fedloom.algorithms.evolution.openai_es import OpenAIES
from fedloom.algorithms.evolution.snes import SNES
from fedloom.algorithms.fed_dropout import FederatedDropout
from fedloom.algorithms.fedavg import FedAvg
from fedloom.algorithms.fedbn import FedBN
from fedloom.algorithms.feddyn import FedDyn
from fedloom.algorithms.fednova import FedNova
from fedloom.algorithms.fedopt import FedAdagrad, FedAdam, FedAvgM, FedYogi
from fedloom.algorithms.fedprox import FedProx
from fedloom.algorithms.fedrep import FedRep
from fedloom.algorithms.fedsgd import FedSGD
from fedloom.algorithms.fsvrg import FSVRG, SVRG
from fedloom.algorithms.ifca import IFCA
from fedloom.algorithms.local_only import LocalOnly
from fedloom.algorithms.peer import Peer
from fedloom.algorithms.perfedavg import PerFedAvg
from fedloom.algorithms.pooled import Pooled
from fedloom.algorithms.qfedavg import QFedAvg
from fedloom.algorithms.scaffold import Scaffold
from fedloom.algorithms.staged import Staged

ALGORITHMS: dict[str, type[Algorithm]] = {
    "pooled": Pooled,
    "local": LocalOnly,
    "fedavg": FedAvg,
    "fedsgd": FedSGD,
    "staged": Staged,
    "peer": Peer,
    "fedprox": FedProx,
    "fedbn": FedBN,
    "fedavgm": FedAvgM,
    "fedadagrad": FedAdagrad,
    "fedadam": FedAdam,
    "fedyogi": FedYogi,
    "fsvrg": FSVRG,
    "svrg": SVRG,
    "cocoa": CoCoA,
    "scaffold": Scaffold,
    "fednova": FedNova,
    "feddyn": FedDyn,
    "qfedavg": QFedAvg,
    "ditto": Ditto,
    "perfedavg": PerFedAvg,
    "fedrep": FedRep,
    "ifca": IFCA,
    "fed_dropout": FederatedDropout,
    "neuroevolution": Neuroevolution,
    "random_search": RandomSearch,
    "openai_es": OpenAIES,
    "snes": SNES,
}

__all__ = [
    "ALGORITHMS",
    "CoCoA",
    "Ditto",
    "FSVRG",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedBN",
    "FedDyn",
    "FedNova",
    "FedProx",
    "FedRep",
    "FedSGD",
    "FedYogi",
    "FederatedDropout",
    "IFCA",
    "LocalOnly",
    "Neuroevolution",
    "OpenAIES",
    "Peer",
    "PerFedAvg",
    "Pooled",
    "QFedAvg",
    "RandomSearch",
    "SNES",
    "SVRG",
    "Scaffold",
    "Staged",
]
