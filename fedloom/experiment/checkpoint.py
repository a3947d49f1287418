"""Checkpoints of one cell that survive a kill, a power cut and a damaged file. Nothing is pickled.

A checkpoint of round 12 is `round-000012.json`, the manifest, with the SHA-256 of every file it needs:
`state-000012.safetensors`, and `own-….safetensors` of this and earlier rounds. An own file holds only the clients that
changed since the checkpoint before, so that a million clients cost what changed. The state file says which version
of each client counts. The manifest is written last: a checkpoint without one does not exist.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedloom.engine import Snapshot
from fedloom.errors import InputError, StoreError
from fedloom.local import Groups
from fedloom.tree import Tree

FORMAT = 1
_NAMES = re.compile(r"(?:round-(\d+)\.json|(?:state|own)-\d+\.safetensors|.+\.part)")
_Versions = tuple[NDArray[np.int64], NDArray[np.int64]]  # clients in ascending order, and the round of each one's state


@dataclass(frozen=True)
class Checkpoint:
    """A run after some round, what the caller saved along with it, and what was wrong with later checkpoints."""

    snapshot: Snapshot
    extra: dict[str, Any]
    notes: list[str]


class _Damaged(Exception):
    """A checkpoint that must not be used, and why."""


def save(
    folder: str | Path,
    round: int,
    state: Groups,
    own: dict[int, Groups],
    extra: dict[str, Any] | None = None,
    keep: int = 2,
) -> None:
    """Write a checkpoint and delete what the newest `keep` of them do not need.

    `own` holds the clients that changed since the last checkpoint. Later checkpoints, and one of the same round, are
    replaced: whoever saves an earlier round has gone back. `extra` is anything that JSON can hold.
    """
    if keep < 1:
        raise InputError(f"At least one checkpoint must be kept. Got keep = {keep} instead.")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    base = next((manifest for manifest in _manifests(folder) if manifest["round"] < round), None)
    versions = _advance(_versions(folder, base), own, round)
    needed = {_own_name(int(number)) for number in np.unique(versions[1])}
    files = {name: digest for name, digest in base["files"].items() if name in needed} if base else {}
    json.dumps(extra)  # what cannot be written must fail before anything is
    if own:
        files[_own_name(round)] = _write_tensors(folder / _own_name(round), {str(c): groups for c, groups in own.items()})
    clients, rounds = (torch.from_numpy(column) for column in versions)
    name = f"state-{round:06d}.safetensors"
    # names of leaves have a slash, so that these two cannot be taken for leaves
    files[name] = _write_tensors(folder / name, state, own_clients=clients, own_rounds=rounds)
    content = {"format": FORMAT, "round": round, "state": name, "files": files, "extra": extra or {}}
    sealed = {**content, "sha256": _seal(content)}
    write_atomically(folder / f"round-{round:06d}.json", json.dumps(sealed, indent=1).encode())
    _tidy(folder, round, keep)
