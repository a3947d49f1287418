"""fedloom: train one model across many data holders whose data never moves.

Every public name, such as `fedloom.run` or `fedloom.FedAvg`, is imported on first use, so that `fedloom --help` does
not load torch. Algorithms are found in the folder `fedloom/algorithms`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedloom.machine import prepare_environment

__version__ = "0.1.0"

prepare_environment()

if TYPE_CHECKING:
    from fedloom.algorithm import Algorithm as Algorithm
    from fedloom.algorithm import Update as Update
    from fedloom.clock.system import System as System
    from fedloom.data.federation import Federation as Federation
    from fedloom.experiment.run import run as run
    from fedloom.federation.cohort import Cohort as Cohort
    from fedloom.federation.engine import Evaluation as Evaluation
    from fedloom.federation.engine import fit as fit
    from fedloom.federation.sampling import Sampling as Sampling
    from fedloom.results.result import load as load
    from fedloom.task import Task as Task
    from fedloom.training.local import Step as Step
    from fedloom.training.local import Training as Training

_HOME = {  # public name → its module, for everything but algorithms
    "Algorithm": "fedloom.algorithm",
    "Cohort": "fedloom.federation.cohort",
    "Evaluation": "fedloom.federation.engine",
    "Federation": "fedloom.data.federation",
    "Sampling": "fedloom.federation.sampling",
    "Step": "fedloom.training.local",
    "System": "fedloom.clock.system",
    "Task": "fedloom.task",
    "Training": "fedloom.training.local",
    "Update": "fedloom.algorithm",
    "fit": "fedloom.federation.engine",
    "load": "fedloom.results.result",
    "run": "fedloom.experiment.run",
}


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return __dir__()
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    # only a class can be an algorithm: `from fedloom import tree` must not load all of them
    if name[:1].isupper() and name in (classes := import_module("fedloom.algorithms").CLASSES):
        return classes[name]
    raise AttributeError(f"module 'fedloom' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*_HOME, *import_module("fedloom.algorithms").CLASSES, "__version__"})
