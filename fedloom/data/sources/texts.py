"""Texts by author in JSON lines: `{"user": "ann", "texts": ["…", "…"]}` on each line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fedloom.data.sources.next_word import NextWord, Text, field, json_lines, name_of, strings

USUAL = ("texts", "comments", "body")  # what a list of texts is called, if nobody says


class Texts(NextWord):
    """A line for each author with a list of texts, or for each text; other fields are ignored."""

    user: str = "user"
    """The field with the author."""
    texts: str | None = None
    """The field with the text, or with a list of texts."""

    def read(self, path: Path) -> Iterator[tuple[str, list[Text]]]:
        for where, found in json_lines(path):
            author = name_of(field(found, self.user, where), where)
            column = self.texts or next((name for name in USUAL if name in found), USUAL[0])
            yield author, strings(field(found, column, where), where)
