"""Plays by role, in JSON lines: `{"play": "hamlet", "role": "GHOST", "speeches": ["Mark me.", "…"]}` on each line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fedloom.data.sources.next_word import NextWord, Text, author_name, field, json_objects, strings
from fedloom.record import Count


class Shakespeare(NextWord):
    """A client is a role in a play. Roles with only one speech are left out, as in LEAF."""

    min_texts: Count = 2
    """Leave out roles with fewer speeches."""

    def read(self, path: Path) -> Iterator[tuple[str, list[Text]]]:
        for where, found in json_objects(path):
            play, role = (author_name(field(found, name, where), where) for name in ("play", "role"))
            yield f"{play} {role}", strings(field(found, "speeches", where), where)
