"""Compression methods, one file for each. All methods in this folder are found by their names: there is no list."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedloom.compression.method import Method
from fedloom.discovery import discover
from fedloom.errors import InputError, ParameterError, unknown

METHODS = discover(__path__, __name__, Method, lambda kind: kind.name or None)


def method(value: Any) -> Any:
    """Make a method from its name, or from a table with its name and fields."""
    if value is None or isinstance(value, Method):
        return value
    fields = {"name": value} if isinstance(value, str) else dict(value) if isinstance(value, Mapping) else {}
    name = fields.pop("name", None)
    if not isinstance(name, str):
        raise InputError(
            'A compression is a name, such as "float16", or a table with a name, such as { name = "topk", '
            f"keep = 0.01 }}. Got {value!r} instead."
        )
    if name not in METHODS:
        raise unknown("compression", name, METHODS)
    try:
        return METHODS[name](**fields)
    except ParameterError as error:
        raise InputError(str(error)) from None
