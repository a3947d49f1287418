"""The algorithms, one file for each paper. All algorithms in this folder are found automatically: there is no list.

`ALGORITHMS` maps the names of experiment files to classes. An algorithm's name is its `name`, or by default the name of
its class in lower case. `from fedloom.algorithms import FedAvg` works for every class.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import walk_packages
from typing import Any

from fedloom.algorithm import Algorithm


def discover(folders: list[str], package: str) -> dict[str, type[Algorithm]]:
    """Return the algorithms that are defined in the modules of a package, by name, in alphabetical order."""
    found: dict[str, type[Algorithm]] = {}
    for module in walk_packages(folders, f"{package}."):
        for kind in vars(import_module(module.name)).values():
            if not (isinstance(kind, type) and issubclass(kind, Algorithm) and kind.__module__ == module.name):
                continue
            if kind.round is Algorithm.round or kind.__name__.startswith("_"):  # a base class, or a private one
                continue
            name = vars(kind).get("name", kind.__name__.lower())
            if name in found:
                raise TypeError(f"Two algorithms have the name '{name}': {found[name]!r} and {kind!r}.")
            found[name] = kind
    return dict(sorted(found.items()))


ALGORITHMS = discover(__path__, __name__)
CLASSES = {kind.__name__: kind for kind in ALGORITHMS.values()}


def __getattr__(name: str) -> Any:
    if name in CLASSES:
        return CLASSES[name]
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
