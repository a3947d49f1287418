"""Writes the fields of a pydantic model as a Markdown table."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import BaseModel

from fedloom.field_words import default, meaning, words


def table(model: type[BaseModel], *, without: Iterable[str] = ()) -> str:
    """Write the Markdown table of a model's fields."""
    schema = model.model_json_schema()["properties"]
    lines = ["| key | type and default | meaning |", "| --- | --- | --- |"]
    for name in model.model_fields:
        if name not in without:
            said = meaning(model, name).replace("|", "\\|").replace("\n", " ")
            lines.append(f"| `{name}` | {words(schema[name])}; {default(model, name)} | {said} |")
    return "\n".join(lines)
