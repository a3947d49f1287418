"""Reddit comments by author as LEAF stores them: `{"users": […], "user_data": {"ann": {"x": […], "y": […]}}}`.

LEAF has two forms. Before its last step, x holds comments as strings whose words have spaces between them. After it,
each comment is a list of pieces of ten words, with the marks <BOS>, <EOS> and <PAD> among them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedloom.data.sources.next_word import NextWord, Text, field, json_objects
from fedloom.errors import InputError

MARKS = ("<BOS>", "<EOS>", "<PAD>")
SPLITS = ("train", "val", "test")  # LEAF's folders, in the order of time


class LeafReddit(NextWord):
    """A JSON file in LEAF's format, or a folder of such files. An author's comments in several files are joined."""

    def read(self, path: Path) -> Iterator[tuple[str, list[Text]]]:
        for file in _files(path):
            for where, content in json_objects(file, by_line=False):
                users = field(content, "user_data", where)
                if not isinstance(users, dict):
                    raise InputError(f"The 'user_data' of {file} must be a table of users. Got {type(users).__name__}.")
                for user, examples in users.items():
                    if not isinstance(examples, dict) or not isinstance(examples.get("x"), list):
                        raise InputError(f"The user '{user}' in {file} has no list 'x' of comments.")
                    yield user, [_text(comment, f"The user '{user}' in {file}") for comment in examples["x"]]


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = [file for file in path.rglob("*.json*") if file.is_file()]
    if not found:
        raise InputError(f"There are no JSON files in {path}.")
    return sorted(found, key=lambda file: (file.parent.name in SPLITS and SPLITS.index(file.parent.name), str(file)))


def _text(comment: Any, where: str) -> Text:
    if isinstance(comment, str):
        return comment
    pieces: list[Any] = comment if isinstance(comment, list) else [None]
    if not all(isinstance(piece, list) and all(isinstance(word, str) for word in piece) for piece in pieces):
        raise InputError(f"{where} has a comment that is neither a string nor pieces of words: {str(comment)[:40]}.")
    return [word for piece in pieces for word in piece if word not in MARKS]
