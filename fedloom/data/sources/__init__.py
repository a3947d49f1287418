"""Where examples come from. One file, one source: fedloom finds every file in this folder."""

from __future__ import annotations

import inspect
import pkgutil
import re
from importlib import import_module

from fedloom.data.sources.base import Source
from fedloom.data.sources.custom import custom
from fedloom.errors import InputError, nearest

__all__ = ["SOURCES", "Source", "source"]


def _discover() -> dict[str, type[Source]]:
    """Import every file of this folder and return its sources by name."""
    found: dict[str, type[Source]] = {}
    for file in pkgutil.iter_modules(__path__, f"{__name__}."):
        for name, item in vars(import_module(file.name)).items():
            is_source = inspect.isclass(item) and issubclass(item, Source) and not inspect.isabstract(item)
            if is_source and item.__module__ == file.name and not name.startswith("_"):
                in_snake_case = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
                found[vars(item).get("source_name", in_snake_case)] = item
    return found


SOURCES = _discover()


def source(name: str) -> type[Source]:
    """Return the source with this name, or the one that calls `my_module:loader` or `file.py:loader`.

    >>> source("digits")(image=True)
    Digits(image=True)
    """
    if ":" in name:
        return custom(name)
    if name not in SOURCES:
        raise InputError(
            f"There is no source '{name}'. Known: {', '.join(SOURCES)}, or your own function as "
            f"'my_module:loader' or 'file.py:loader'.{nearest(name, SOURCES)}"
        )
    return SOURCES[name]
