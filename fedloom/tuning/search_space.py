"""The settings that a sweep tries: all combinations of lists of values, or random draws from lists and ranges."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedloom.errors import InputError
from fedloom.files import toml_value

Setting = dict[str, Any]
MOST = 10_000


@dataclass(frozen=True)
class Range:
    """Numbers between two ends, for random search."""

    low: float
    high: float
    log: bool

    def draw(self, share: float) -> float | int:
        """Return the number at this share of the way from low to high."""
        if self.log:
            return float(f"{self.low * (self.high / self.low) ** share:.4g}")
        if isinstance(self.low, int) and isinstance(self.high, int):
            return min(self.high, self.low + int(share * (self.high - self.low + 1)))
        return float(f"{self.low + share * (self.high - self.low):.4g}")


Choices = dict[str, "list[Any] | Range"]


def parse_over(texts: Sequence[str]) -> Choices:
    """Read `key=a,b,c` or, for random search, `key=low:high` or `key=low:high:log`.

    >>> parse_over(["train.optimizer=sgd,adam", "train.lr=0.1:1:log"])
    {'train.optimizer': ['sgd', 'adam'], 'train.lr': Range(low=0.1, high=1, log=True)}
    """
    found: Choices = {}
    for text in texts:
        key, equals, values = (part.strip() for part in text.partition("="))
        if not equals or not key or not values:
            raise InputError(f"--over {text}: write it as table.key=value,value,…, such as --over train.lr=0.01,0.1.")
        if key in found:
            raise InputError(f"--over has {key} twice.")
        found[key] = _range(text, values) or _values(text, values)
    return found


def _range(text: str, values: str) -> Range | None:
    parts = values.split(":")
    if len(parts) not in (2, 3) or not all(re.fullmatch(r"[-+\d.eE]+", part.strip()) for part in parts[:2]):
        return None
    log = len(parts) == 3
    try:
        low, high = (toml_value(part) for part in parts[:2])
    except ValueError:
        raise InputError(f"--over {text}: '{values}' is not a range of numbers.") from None
    if (log and parts[2].strip() != "log") or not low < high or (log and low <= 0):
        raise InputError(f"--over {text}: a range is low:high or low:high:log, with low below high (log: above 0).")
    return Range(low, high, log)


def _values(text: str, values: str) -> list[Any]:
    try:
        found: list[Any] = toml_value(f"[{values}]")
    except ValueError:
        if any(sign in values for sign in "[]{}\"'="):
            raise InputError(f"--over {text}: '{values}' is not a list of TOML values.") from None
        found = [_word(part.strip()) for part in values.split(",")]
    if len({json.dumps(value, default=str) for value in found}) != len(found):
        raise InputError(f"--over {text}: a value is repeated.")
    return found


def _word(text: str) -> Any:
    try:
        return toml_value(text)
    except ValueError:
        return text


def settings(choices: Choices, random: int | None = None, seed: int = 0) -> list[Setting]:
    """Return all combinations, or this many distinct random draws.

    >>> settings({"a": [1, 2], "b": ["x", "y"]})
    [{'a': 1, 'b': 'x'}, {'a': 1, 'b': 'y'}, {'a': 2, 'b': 'x'}, {'a': 2, 'b': 'y'}]
    """
    if random is None:
        ranges = [key for key, values in choices.items() if isinstance(values, Range)]
        if ranges:
            raise InputError(f"{ranges[0]} has a range: say with --random N how many settings to draw, or list values.")
        lists = [values for values in choices.values() if not isinstance(values, Range)]
        if math.prod(map(len, lists)) > MOST:
            raise InputError(f"That is {math.prod(map(len, lists)):,} settings, more than {MOST:,}. Use --random N.")
        return [dict(zip(choices, values, strict=True)) for values in itertools.product(*lists)]
    draws = np.random.default_rng(seed)
    found: dict[str, Setting] = {}
    for _ in range(100 * random):
        setting = {
            key: values.draw(float(draws.random()))
            if isinstance(values, Range)
            else values[draws.integers(len(values))]
            for key, values in choices.items()
        }
        found.setdefault(name(setting), setting)
        if len(found) == random:
            break
    return list(found.values())


def name(setting: Setting) -> str:
    """Write a setting in words.

    >>> name({"train.lr": 0.1, "train.optimizer": "adam"})
    'train.lr=0.1 train.optimizer=adam'
    """
    return " ".join(f"{key}={short(value)}" for key, value in setting.items())


def short(value: Any) -> str:
    """Write a value as you would type it."""
    return value if isinstance(value, str) else json.dumps(value, default=str)
