"""Fingerprints of the code that both sides run: the algorithm, the model, and what they are made of."""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fedloom import user_code
from fedloom.algorithm import Algorithm
from fedloom.errors import InputError
from fedloom.metrics import LOSSES
from fedloom.models import MODELS

OTHERS = ("builtins", "pydantic", "torch", "typing", "abc", "collections")
CORE = [
    "training.clients",
    "training.schedule",
    "training.evaluation",
    "keys",
    "training.lanes",
    "training.local",
    "training.masking",
    "metrics",
    "training.optimizers",
    "aggregation.means",
    "task",
    "tree",
    "aggregation.weights",
    "federation.work",
    "data.split",
]


def source_hashes(experiment: Any) -> dict[str, str]:
    """One hash for everything of an experiment that is code."""
    task = experiment.task
    model = user_code.code(task.model, experiment.base) if user_code.is_code(task.model) else MODELS.get(task.model)
    if model is None:
        raise InputError(f"There is no model '{task.model}'. Known: {', '.join(MODELS)}.")
    loss = user_code.code(task.loss, experiment.base) if user_code.is_code(task.loss) else LOSSES.get(task.loss)
    found = {f"algorithm {label}": _of_class(type(one)) for label, one in experiment.algorithm.items()}
    found["model"] = _of_class(model) if isinstance(model, type) else _files([_file(model)])
    found["loss"] = _files([_file(loss)])
    package = Path(user_code.__file__).parent
    found["core"] = _files(package.joinpath(*name.split(".")).with_suffix(".py") for name in CORE)
    return found


def _of_class(kind: type) -> str:
    """The files of a class and of all that it inherits from."""
    return _files(
        dict.fromkeys(
            _file(one) for one in kind.__mro__ if one.__module__.split(".")[0] not in OTHERS and one is not Algorithm
        )
    )


def _file(thing: Any) -> Path:
    module = sys.modules.get(getattr(thing, "__module__", None) or type(thing).__module__)
    path = getattr(module, "__file__", None) or inspect.getsourcefile(thing)
    if path is None:
        raise InputError(f"There is no source file for {thing!r}, so that two machines cannot compare it.")
    return Path(path)


def _files(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
