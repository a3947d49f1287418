"""LEAF's JSON with numbers: `{"users": […], "num_samples": […], "user_data": {"ann": {"x": [[…]], "y": […]}}}`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from fedloom.data.federation import Dataset
from fedloom.data.sources.base import locate
from fedloom.data.sources.by_client import ByClient, Examples
from fedloom.errors import InputError


class Leaf(ByClient):
    """A JSON file of LEAF's, or a folder of them; folders `train` and `test` inside of it are a pair."""

    path: Path
    """A JSON file, or a folder of them."""

    def load(self, base: Path) -> Dataset:
        """Users in the order of files."""
        return self.assemble(read, *pair(locate(base, self.path)))


def pair(path: Path) -> tuple[list[Path], list[Path]]:
    """The files of the users' examples, and those of their test examples if they are apart."""
    if path.is_file():
        return [path], []
    train = path / "train" if (path / "train").is_dir() else path
    found, tested = sorted(train.glob("*.json")), sorted((path / "test").glob("*.json"))
    found = found or sorted((path / "all_data").glob("*.json"))
    if not found:
        raise InputError(f"There are no JSON files in {path}, nor in a folder train or all_data inside of it.")
    return found, tested if train != path else []


def read(file: Path) -> Iterator[tuple[str, Examples]]:
    """The users of a file with their examples."""
    try:
        content = json.loads(file.read_bytes())
    except ValueError as error:
        raise InputError(f"The file {file} is not whole JSON ({error}): fetch it again.") from None
    if (
        not isinstance(content, dict)
        or not all(isinstance(content.get(key), kind) for key, kind in _KEYS.items())
        or len(content["users"]) != len(content["num_samples"])
    ):
        raise InputError(
            f"The file {file} is not LEAF's: it must have lists 'users' and 'num_samples' of one length and a table "
            "'user_data'."
        )
    for user, count in zip(content["users"], content["num_samples"], strict=True):
        held = content["user_data"].get(user)
        if not isinstance(held, dict) or not isinstance(held.get("x"), list) or not isinstance(held.get("y"), list):
            raise InputError(f"The user '{user}' in {file} has no lists 'x' and 'y' in 'user_data'.")
        if not len(held["x"]) == len(held["y"]) == count:
            raise InputError(
                f"The user '{user}' in {file} has {len(held['x'])} examples and {len(held['y'])} labels, but "
                f"'num_samples' says {count}."
            )
        try:
            yield str(user), (np.array(held["x"], dtype=np.float32), np.array(held["y"]))
        except ValueError:
            raise InputError(
                f"The examples of user '{user}' in {file} must be lists of numbers of one length. For text, use "
                'source = "leaf_reddit".'
            ) from None


_KEYS = {"users": list, "num_samples": list, "user_data": dict}
