"""The sentences of notes and cautions, which are in `templates/sentences.toml`."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from fedloom.files import read_toml


@lru_cache(maxsize=1)
def sentences() -> dict[str, dict[str, str]]:
    """Return all sentences, by table and name."""
    return read_toml(Path(__file__).parent / "templates" / "sentences.toml")


def say(table: str, name: str, **values: Any) -> str:
    """Return a sentence with its values filled in.

    >>> say("caution", "few_seeds", seeds=3, needed=6)
    '3 seeds: intervals are wide, and they assume that differences between seeds are about normal.'
    """
    return sentences()[table][name].format(**values)
