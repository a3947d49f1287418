"""The texts of results, which are in `templates`: the sentences of notes and cautions, and pages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2

from fedloom.files import read_toml

TEMPLATES = Path(__file__).parent / "templates"


@lru_cache(maxsize=1)
def sentences() -> dict[str, dict[str, str]]:
    """Return all sentences, by table and name."""
    return read_toml(TEMPLATES / "sentences.toml")


def say(table: str, name: str, **values: Any) -> str:
    """Return a sentence with its values filled in.

    >>> say("caution", "few_seeds", seeds=3, needed=6)
    '3 seeds: intervals rest on few numbers, and assume that differences between seeds are about normal.'
    """
    return sentences()[table][name].format(**values)


def first_three(names: Sequence[str]) -> str:
    """Return the first names of a list, and how many more there are.

    >>> first_three(["a", "b", "c", "d"])
    'a, b, c and 1 more'
    """
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def page(name: str, *, escape: bool = True, **filters: Any) -> jinja2.Template:
    """Return the template of a page, which may use these filters."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=escape, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    environment.filters.update(filters)
    return environment.get_template(name)
