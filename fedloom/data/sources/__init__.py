"""Where examples come from. fedloom finds every source in the files of this folder."""

from __future__ import annotations

import inspect
import re

from fedloom.data.sources.archive import SAVE_AS_CSV
from fedloom.data.sources.base import Source
from fedloom.data.sources.custom import custom
from fedloom.discovery import discover
from fedloom.errors import InputError, unknown

__all__ = ["SOURCES", "Source", "source"]


def _name(kind: type[Source]) -> str | None:
    in_snake_case = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__).lower()
    return None if inspect.isabstract(kind) else vars(kind).get("source_name", in_snake_case)


SOURCES = discover(__path__, __name__, Source, _name)  # type: ignore[type-abstract]


def source(name: str) -> type[Source]:
    """Return the source with this name, or the one that calls `my_module:loader` or `file.py:loader`.

    >>> source("digits")(image=True)
    Digits(image=True)
    """
    if ":" in name:
        return custom(name)
    if name.lower() in ("excel", "xlsx", "xls", "ods"):
        raise InputError(f"There is no source '{name}': {SAVE_AS_CSV} and use source = \"csv\".")
    if name not in SOURCES:
        raise unknown("source", name, SOURCES, "or your own function as 'my_module:loader' or 'file.py:loader'")
    return SOURCES[name]
