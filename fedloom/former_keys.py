"""Keys that algorithms had in earlier versions: names the new home of each, or drops it where it had no effect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from fedloom.errors import InputError

FORMER_KEYS = {"metric": "accuracy", "scores": "post", "share": "weights"}  # of FedAvg, and their defaults


def without_former_keys(algorithm: type[BaseModel], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return an algorithm's values without former keys; raise `InputError` for one that would have an effect."""
    name, known = algorithm.__name__, algorithm.model_fields
    # files that an earlier version wrote have every key: with these values, they never had an effect
    former = {key for key, value in FORMER_KEYS.items() if key not in known and values.get(key) == value}
    given = {key: value for key, value in values.items() if key not in former}
    moved = [key for key in FORMER_KEYS if key in given and key not in known]
    moved += ["weights"] if str(given.get("weights")) in ("score", "within_std") else []
    if "share" in moved:
        raise InputError(f"{name} has no 'share': clients send their weights. Leave it out.")
    if moved:
        raise InputError(
            f"{name} does not weigh clients by their scores (got {moved[-1]} = {given[moved[-1]]!r}). Use "
            'name = "evaluation_weighted" instead of weights = "score", and name = "selective" instead of '
            'weights = "within_std"; both have the keys metric and scores.'
        )
    return given
