"""The fields of a pydantic model in words: type, default and meaning."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

KINDS = {
    "number": "number",
    "integer": "whole number",
    "string": "text",
    "boolean": "true or false",
    "array": "list",
    "object": "table",
}
BOUNDS = {
    "minimum": "at least",
    "exclusiveMinimum": "more than",
    "maximum": "at most",
    "exclusiveMaximum": "less than",
}


def words(schema: Mapping[str, Any]) -> str:
    """Say a JSON schema in words.

    >>> words({"anyOf": [{"type": "integer", "minimum": 1}, {"const": "auto", "type": "string"}]})
    'whole number, at least 1, or `"auto"`'
    """
    if "enum" in schema:
        return _either([f"`{json.dumps(choice)}`" for choice in schema["enum"]])
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if "anyOf" in schema or "oneOf" in schema:
        choices = [
            words(choice) for choice in schema.get("anyOf", schema.get("oneOf", ())) if choice != {"type": "null"}
        ]
        return _either(list(dict.fromkeys(choices)))
    if "$ref" in schema or "allOf" in schema:
        return "table"
    word = KINDS.get(str(schema.get("type")), "any value")
    items = schema.get("items")
    if word == "list" and isinstance(items, Mapping) and items:
        inner, comma, limits_of_items = words(items).partition(",")
        plural = {"text": "names", "any value": "values", "true or false": "true and false"}
        word = f"list of {inner if '`' in inner else plural.get(inner, inner + 's')}{comma}{limits_of_items}"
    limits = [f"{said} {_number(schema[bound])}" for bound, said in BOUNDS.items() if bound in schema]
    return ", ".join([word, *limits])


def _number(value: float) -> str:
    return "2^53" if value == 2**53 else f"{value:,g}"


def _either(choices: list[str]) -> str:
    if len(choices) < 2:
        return "".join(choices)
    comma = "," if len(choices) > 2 or any("," in choice for choice in choices[:-1]) else ""
    return f"{', '.join(choices[:-1])}{comma} or {choices[-1]}"


def default(model: type[BaseModel], name: str) -> str:
    """Write a field's default as an experiment file would."""
    info = model.model_fields[name]
    value = info.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined:
        return "required"
    if value is None or value == {}:
        return "default: none" if value is None else "default: `{}`"
    if isinstance(value, float) and value >= 1e6:
        return f"default: `{value:.0e}`".replace("e+0", "e").replace("e+", "e")
    return f"default: `{json.dumps(value, default=str)}`"


def meaning(model: type[BaseModel], name: str) -> str:
    """What a field means, as its docstring or description says."""
    return " ".join((model.model_fields[name].description or "").split())


def summary(model: type[BaseModel]) -> str:
    """What a model says about itself, without its examples."""
    return inspect.cleandoc(model.__doc__ or "").split(">>>")[0].strip()
