"""LEAF's JSON with numbers: `{"users": […], "num_samples": […], "user_data": {"ann": {"x": [[…]], "y": […]}}}`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from fedloom.data.federation import Dataset
from fedloom.data.sources.archive import readable
from fedloom.data.sources.base import locate
from fedloom.data.sources.by_client import ByClient, Client
from fedloom.errors import InputError

KEYS = {"users": list, "num_samples": list, "user_data": dict}


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
