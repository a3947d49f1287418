"""fedloom: train one model across many data holders whose data never moves."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedloom.machine import prepare_environment

__version__ = "0.1.0"

prepare_environment()

if TYPE_CHECKING:
    from fedloom.algorithm import Algorithm, Update
    from fedloom.algorithms import (
        FSVRG,
        IFCA,
        SNES,
        SVRG,
        CoCoA,
        Ditto,
        FedAdagrad,
        FedAdam,
        FedAvg,
        FedAvgM,
        FedBN,
        FedDyn,
        FederatedDropout,
        FedNova,
        FedProx,
        FedRep,
        FedSGD,
        FedYogi,
        LocalOnly,
        Neuroevolution,
        OpenAIES,
        Peer,
        PerFedAvg,
        Pooled,
        QFedAvg,
        RandomSearch,
        Scaffold,
        Staged,
    )
    from fedloom.data.federation import Federation
    from fedloom.experiment.run import run
    from fedloom.federation.cohort import Cohort
    from fedloom.federation.engine import Evaluation, fit
    from fedloom.federation.sampling import Sampling
    from fedloom.task import Task
    from fedloom.training.local import Step, Training

# public name → where it lives, if it is no algorithm; imported on first use, so that `fedloom --help` loads no torch
_HOME = {
    "Algorithm": "fedloom.algorithm",
    "Cohort": "fedloom.federation.cohort",
    "Evaluation": "fedloom.federation.engine",
    "Federation": "fedloom.data.federation",
    "Sampling": "fedloom.federation.sampling",
    "Step": "fedloom.training.local",
    "Task": "fedloom.task",
    "Training": "fedloom.training.local",
    "Update": "fedloom.algorithm",
    "fit": "fedloom.federation.engine",
    "run": "fedloom.experiment.run",
}

__all__ = [
    "Algorithm",
    "CoCoA",
    "Cohort",
    "Ditto",
    "Evaluation",
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
    "Federation",
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
    "Sampling",
    "Scaffold",
    "Staged",
    "Step",
    "Task",
    "Training",
    "Update",
    "__version__",
    "fit",
    "run",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(_HOME.get(name, "fedloom.algorithms")), name)
    raise AttributeError(f"module 'fedloom' has no attribute '{name}'")


def __dir__() -> list[str]:
    return __all__
