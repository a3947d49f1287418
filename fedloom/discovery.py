"""Find classes and packages: what a folder of the package holds, and what not every installation has."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from pkgutil import walk_packages
from typing import Any, TypeVar

from fedloom.errors import InputError

Kind = TypeVar("Kind")


def discover(
    folders: Iterable[str], package: str, base: type[Kind], name: Callable[[type[Kind]], str | None]
) -> dict[str, type[Kind]]:
    """Return the public classes of a kind that a package's modules define, by name, in alphabetical order.

    `name` gives the name of a class, or None to leave it out.
    """
    found: dict[str, type[Kind]] = {}
    for module in walk_packages(folders, f"{package}."):
        for kind in vars(import_module(module.name)).values():
            defined_here = isinstance(kind, type) and issubclass(kind, base) and kind.__module__ == module.name
            if not defined_here or kind.__name__.startswith("_") or (known_as := name(kind)) is None:
                continue
            if known_as in found:
                raise TypeError(f"Two classes have the name '{known_as}': {found[known_as]!r} and {kind!r}.")
            found[known_as] = kind
    return dict(sorted(found.items()))


def optional(package: str, need: str, extra: str) -> Any:
    """Import a package that not every installation has, or say how to install it."""
    try:
        return import_module(package)
    except ImportError as error:
        raise InputError(f"{need}: pip install 'fedloom[{extra}]'.") from error
