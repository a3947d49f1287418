"""fedloom: train one model across many data holders whose data never moves."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedloom.machine import prepare_environment

__version__ = "0.1.0"

prepare_environment()

if TYPE_CHECKING:
    from fedloom.algorithm import Algorithm, Update
    from fedloom.algorithms import FedAvg, FedSGD, LocalOnly, Pooled
    from fedloom.cohort import Cohort, Sampling
    from fedloom.data.federation import Federation
    from fedloom.engine import Evaluation, fit
    from fedloom.experiment.run import run
    from fedloom.local import Step, Training
    from fedloom.task import Task

# public name → where it lives; imported on first use, so that `fedloom --help` need not load torch
_HOME = {
    "Algorithm": "fedloom.algorithm",
    "Cohort": "fedloom.cohort",
    "Evaluation": "fedloom.engine",
    "FedAvg": "fedloom.algorithms",
    "FedSGD": "fedloom.algorithms",
    "Federation": "fedloom.data.federation",
    "LocalOnly": "fedloom.algorithms",
    "Pooled": "fedloom.algorithms",
    "Sampling": "fedloom.cohort",
    "Step": "fedloom.local",
    "Task": "fedloom.task",
    "Training": "fedloom.local",
    "Update": "fedloom.algorithm",
    "fit": "fedloom.engine",
    "run": "fedloom.experiment.run",
}

__all__ = [
    "Algorithm",
    "Cohort",
    "Evaluation",
    "FedAvg",
    "FedSGD",
    "Federation",
    "LocalOnly",
    "Pooled",
    "Sampling",
    "Step",
    "Task",
    "Training",
    "Update",
    "__version__",
    "fit",
    "run",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'fedloom' has no attribute '{name}'")


def __dir__() -> list[str]:
    return __all__
