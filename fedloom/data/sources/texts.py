"""Texts by author in JSON lines: `{"user": "ann", "texts": ["…", "…"]}` on each line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fedloom.data.sources.next_word import NextWord, Text, author_name, field, json_objects, strings

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
