"""Reddit comments by author as LEAF stores them: `{"users": […], "user_data": {"ann": {"x": […], "y": […]}}}`.

LEAF has two forms: before its last step x holds comments as strings whose words have spaces between them; after it,
each comment is a list of pieces of ten words with the marks <BOS>, <EOS> and <PAD> among them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedloom.data.sources.next_word import NOT_TEXT, NextWord, Text, as_object, field, opened
from fedloom.errors import InputError

MARKS = ("<BOS>", "<EOS>", "<PAD>")
PARTS = ("train", "val", "test")  # LEAF's folders, in the order of time


class LeafReddit(NextWord):
    """A JSON file of LEAF's, or a folder of them; what an author wrote is put together again if it was split."""

    def read(self, path: Path) -> Iterator[tuple[str, list[Text]]]:
        for file in _files(path):
            try:
                with opened(file) as stream:
                    content = stream.read()
            except NOT_TEXT as error:
                raise InputError(f"The file {file} cannot be read: {error}.") from None
            users = field(as_object(content, f"The file {file}"), "user_data", f"The file {file}")
            if not isinstance(users, dict):
                raise InputError(f"The 'user_data' of {file} must be a table of users. Got {type(users).__name__}.")
            for user, held in users.items():
                where = f"The user '{user}' in {file}"
                if not isinstance(held, dict) or not isinstance(held.get("x"), list):
                    raise InputError(f"{where} has no list 'x' of comments.")
                yield user, [_text(comment, where) for comment in held["x"]]


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = [file for file in path.rglob("*.json*") if file.is_file()]
    if not found:
        raise InputError(f"There are no JSON files in {path}.")
    return sorted(found, key=lambda file: (file.parent.name in PARTS and PARTS.index(file.parent.name), str(file)))


def _text(comment: Any, where: str) -> Text:
    if isinstance(comment, str):
        return comment
    pieces: list[Any] = comment if isinstance(comment, list) else [None]
    if not all(isinstance(piece, list) and all(isinstance(word, str) for word in piece) for piece in pieces):
        raise InputError(f"{where} has a comment that is neither a string nor pieces of words: {str(comment)[:40]}.")
    return [word for piece in pieces for word in piece if word not in MARKS]
