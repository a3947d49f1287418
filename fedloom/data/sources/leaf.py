"""The files of LEAF: numbers by user, FEMNIST, and Reddit's comments.

A file with numbers is `{"users": […], "num_samples": […], "user_data": {"ann": {"x": [[…]], "y": […]}}}`. Comments have
two forms. Before LEAF's last step, x holds comments as strings whose words have spaces between them. After it, each
comment is a list of pieces of ten words, with the marks <BOS>, <EOS> and <PAD> among them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.data.federation import Dataset
from fedloom.data.sources import hdf5
from fedloom.data.sources.archive import readable
from fedloom.data.sources.base import Source, locate, locate_or_cached
from fedloom.data.sources.by_client import ByClient, Client
from fedloom.data.sources.next_word import NextWord, Text, field, json_objects
from fedloom.errors import InputError

KEYS = {"users": list, "num_samples": list, "user_data": dict}
CLASSES = tuple("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
TRAIN, TEST = "fed_emnist_train.h5", "fed_emnist_test.h5"
MARKS = ("<BOS>", "<EOS>", "<PAD>")
SPLITS = ("train", "val", "test")  # LEAF's folders, in the order of time


class Leaf(ByClient):
    """A JSON file in LEAF's format, or a folder of such files, or a folder with the folders `train` and `test`."""

    path: Path
    """A JSON file, or a folder of them."""

    def load(self, base: Path) -> Dataset:
        """Read the users in the order of the files."""
        return self.assemble(read, *train_and_test(locate(base, self.path)))


def train_and_test(path: Path) -> tuple[list[Path], list[Path]]:
    """Return the files with the users' examples, and the files with their test examples if these are separate."""
    if path.is_file():
        return [path], []
    in_folders = (path / "train").is_dir()
    train = sorted((path / "train" if in_folders else path).glob("*.json")) or sorted(path.glob("all_data/*.json"))
    if not train:
        raise InputError(f"There are no JSON files in {path}, nor in a folder train or all_data inside it.")
    return train, sorted(path.glob("test/*.json")) if in_folders else []


def read(file: Path) -> Iterator[Client]:
    """Yield the users of a file with their examples."""
    with readable(f"The file {file} is not complete JSON", errors=(ValueError,)):
        content = json.loads(file.read_bytes())
    if (
        not isinstance(content, dict)
        or not all(isinstance(content.get(key), kind) for key, kind in KEYS.items())
        or len(content["users"]) != len(content["num_samples"])
    ):
        raise InputError(
            f"The file {file} is not in LEAF's format: it must have lists 'users' and 'num_samples' of one length and "
            "a table 'user_data'."
        )
    for user, count in zip(content["users"], content["num_samples"], strict=True):
        examples = content["user_data"].get(user)
        x, y = (examples.get("x"), examples.get("y")) if isinstance(examples, dict) else (None, None)
        if not isinstance(x, list) or not isinstance(y, list):
            raise InputError(f"The user '{user}' in {file} has no lists 'x' and 'y' in 'user_data'.")
        if not len(x) == len(y) == count:
            raise InputError(
                f"The user '{user}' in {file} has {len(x)} examples and {len(y)} labels, but 'num_samples' is {count}."
            )
        try:
            yield str(user), np.array(x, dtype=np.float32), np.array(y)
        except ValueError:
            raise InputError(
                f"The examples of user '{user}' in {file} must be lists of numbers of one length. For text, use "
                'source = "leaf_reddit".'
            ) from None


class Femnist(Source):
    """Images of 28 × 28, dark on white, in 62 classes (Caldas et al. 2018); a client is a writer.

    `path` is a folder with LEAF's files or TensorFlow Federated's files, or one of LEAF's files. Separate test examples
    become the official test set, or with `join` they join the others.
    """

    path: Path | None = None
    """A folder with LEAF's or TensorFlow Federated's files, or one of LEAF's files. By default, what `fedloom data get
    femnist` downloaded.
    """
    join: bool = False
    """Add the test examples to the others instead of keeping them as the official test set."""

    def load(self, base: Path) -> Dataset:
        """Read the writers with their names."""
        path = locate_or_cached(base, self.path, "femnist")
        images = Leaf(path=path, shape=(1, 28, 28), classes=len(CLASSES), join=self.join)
        if (path / TRAIN).is_file():
            test = [path / TEST] if (path / TEST).is_file() else []
            loaded = images.assemble(partial(hdf5.read, x="pixels", y="label"), [path / TRAIN], test)
        elif path.suffix in (".h5", ".hdf5"):
            raise InputError(f"{path} is one file: set 'path' to the folder that has {TRAIN} and {TEST}.")
        else:
            loaded = images.assemble(read, *train_and_test(path))
        return replace(loaded, classes=CLASSES)


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
