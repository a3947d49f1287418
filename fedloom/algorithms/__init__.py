"""The algorithms, one file for each paper. All algorithms in this folder are found automatically: there is no list.

`ALGORITHMS` maps the names of experiment files to classes. An algorithm's name is its `name`, or by default the name of
its class in lower case. `from fedloom.algorithms import FedAvg` works for every class.
"""

from __future__ import annotations

from typing import Any

from fedloom.algorithm import Algorithm
from fedloom.discovery import discover


def _name(kind: type[Algorithm]) -> str | None:
    is_base_class = kind.round is Algorithm.round
    return None if is_base_class else vars(kind).get("name", kind.__name__.lower())


ALGORITHMS = discover(__path__, __name__, Algorithm, _name)
CLASSES = {kind.__name__: kind for kind in ALGORITHMS.values()}


def __getattr__(name: str) -> Any:
    if name in CLASSES:
        return CLASSES[name]
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
