"""Texts in JSON lines, by author or by role in a play.

A line is `{"user": "ann", "texts": ["…"]}` or `{"play": "hamlet", "role": "GHOST", "speeches": ["Mark me.", "…"]}`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fedloom.data.sources.next_word import NextWord, Text, author_name, field, json_objects, strings
from fedloom.record import Count

USUAL = ("texts", "comments", "body")  # names of the texts' field that are tried if you set none


class Texts(NextWord):
    """One line per author with a list of texts, or one line per text. Other fields are ignored."""

    user: str = "user"
    """The field with the author."""
    texts: str | None = None
    """The field with the text, or with a list of texts."""

    def read(self, path: Path) -> Iterator[tuple[str, list[Text]]]:
        for where, found in json_objects(path):
            author = author_name(field(found, self.user, where), where)
            name = self.texts or next((name for name in USUAL if name in found), USUAL[0])
            yield author, strings(field(found, name, where), where)


class Shakespeare(NextWord):
    """A client is a role in a play. Roles with only one speech are left out, as in LEAF."""

    min_texts: Count = 2
    """Leave out roles with fewer speeches."""

    def read(self, path: Path) -> Iterator[tuple[str, list[Text]]]:
        for where, found in json_objects(path):
            play, role = (author_name(field(found, name, where), where) for name in ("play", "role"))
            yield f"{play} {role}", strings(field(found, "speeches", where), where)
