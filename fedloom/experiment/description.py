"""What decides the result of an experiment: its fingerprint, and what differs between two."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any


def keeps_clients(data: Mapping[str, Any]) -> bool:
    """Whether all seeds have the same clients, by a `[data]` table, even if each seed splits their examples again.

    >>> [keeps_clients({"seed": "run", "partition": name}) for name in ("natural", {"name": "dirichlet"})]
    [True, False]
    """
    partition = data.get("partition")
    name = partition.get("name") if isinstance(partition, Mapping) else partition
    whole = data.get("clients") is None and data.get("server", "none") == "none"  # nobody is left out
    return data.get("seed") not in (None, "run") or (name in (None, "natural") and whole)


def identity(description: Mapping[str, Any]) -> str:
    """Return the fingerprint of an experiment's description."""
    if description.get("files") == {}:  # which earlier versions left out
        description = {key: value for key, value in description.items() if key != "files"}
    return hashlib.sha256(json.dumps(description, sort_keys=True, default=str).encode()).hexdigest()


def differences(old: Any, new: Any, place: str = "") -> list[str]:
    """List what changed between two descriptions, a line each.

    >>> differences({"train": {"lr": 0.1}}, {"train": {"lr": 0.2}})
    ['train.lr: 0.1 → 0.2']
    >>> differences({"code": {"net.py:Net": "a1" * 32}}, {"code": {"net.py:Net": "b2" * 32}})
    ['the file net.py has changed']
    >>> differences({"system": {"files": {"traces.csv": "a1" * 32}}}, {"system": {"files": {"traces.csv": "b2" * 32}}})
    ['the file traces.csv has changed']
    >>> differences({"files": {"old.txt": "a1" * 32}}, {"files": {"new.txt": "b2" * 32}})
    ['the file new.txt is new, or newly named', 'the file old.txt is gone, or no longer named']
    """
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        lines = []
        for key in sorted({*old, *new}):
            inner = f"{place}.{key}" if place else str(key)
            if key not in old or key not in new:
                if place == "files":
                    what = "new, or newly named" if key in new else "gone, or no longer named"
                    lines.append(f"the file {key} is {what}")
                    continue
                value = new.get(key, old.get(key))
                what = "" if _are_hashes(value) else f" {short(value)}"
                lines.append(f"{inner}: {'added' if key in new else 'removed'}{what}")
            else:
                lines.extend(differences(old[key], new[key], inner))
        lines = list(dict.fromkeys(lines))  # several classes may be in one file
        return lines if place else _causes(lines)
    if old == new or json.dumps(old, default=str) == json.dumps(new, default=str):  # nan equals nothing, not even nan
        return []
    if _are_hashes(old) and _are_hashes(new):
        # a Python program has one list of "code", and "values" that it uses
        table, _, name = place.removeprefix("system.").partition(".")
        file = f"the file {name.rpartition(':')[0] or name}" if name else "your code"
        used = "the model's args" if name == "args" else f"the code of {name}"
        shown = {"code": file, "files": f"the file {name}", "values": f"a value in {used}"}.get(table, place)
        return [f"{shown} has changed"]
    return [f"{place}: {short(old)} → {short(new)}"]


def _causes(lines: list[str]) -> list[str]:
    """Leave out what follows from other lines: code decides its values, and a model its initial weights."""
    of_model = "a value in the code of model has changed"
    follow = {"task.init has changed"} if of_model in lines else set()
    if "your code has changed" in lines:
        follow |= {line for line in lines if line.startswith("a value in the code of ")}
    return [line for line in lines if line not in follow]


def _are_hashes(value: Any) -> bool:
    """Whether a value is a hash, which says nothing to people, or a list with one."""
    if isinstance(value, list):
        return any(map(_are_hashes, value))
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def short(value: Any) -> str:
    """Return a value as JSON, cut off if it is long."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "…"
