"""Checkpoints of one cell that survive a kill, a power cut and damaged files. Nothing is pickled.

The checkpoint of round 12 is a manifest, `round-000012.json`, with the SHA-256 of every file it needs: the server's
state (`state-000012.safetensors`); what clients keep (`own-….safetensors` of this round and earlier ones: each holds
only the clients that changed since the checkpoint before it, so that a million clients cost what changed); and, where
clients keep something, which version of each counts (`versions-000012.safetensors`). The manifest is written last:
without it there is no checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedloom import files, tree
from fedloom.errors import InputError, StoreError
from fedloom.federation.engine import Snapshot
from fedloom.tree import Groups, Tree

FORMAT = 1
FROZEN = "frozen"  # in what is saved with a checkpoint: the SHA-256 of its model's frozen parameters
_KEEPING = threading.Lock()  # cells may run side by side
Versions = tuple[NDArray[np.int64], NDArray[np.int64]]  # clients, and the round of each one's state
_MANIFEST = re.compile(r"round-(\d+)\.json")
_OURS = re.compile(r"round-\d+\.json|(state|own|versions)-\d+\.safetensors|.+\.part")


@dataclass(frozen=True)
class Checkpoint:
    """A run after some round, what was saved with it, and why newer checkpoints were skipped."""

    snapshot: Snapshot
    extra: dict[str, Any]
    notes: list[str]

    def ends(self, rounds: int) -> bool:
        """Whether the cell has ended: all rounds are done, or its target is reached."""
        return self.snapshot.round >= rounds or bool(self.extra.get("reached"))


class _Damaged(Exception):
    """The reason why a checkpoint cannot be used."""


def of_cell(run: Path, label: str, seed: int) -> Path:
    """Return the folder with the checkpoints of a cell."""
    return run / "cells" / f"{label}-{seed}"


def save(
    folder: str | Path,
    round: int,
    state: Groups,
    own: Mapping[int, Groups],
    extra: Mapping[str, Any] | None = None,
    keep: int = 2,
    *,
    since: int | None = None,
) -> None:
    """Write a checkpoint, then delete what the newest `keep` of them do not need.

    `own` holds the clients that changed since the checkpoint of round `since` (0: since the beginning; without it, the
    newest one before this round). Checkpoints after `since` were abandoned, and are replaced.
    `extra` is anything that JSON can hold.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(folder, 1, {"model": {"w": torch.ones(2)}}, {7: {"bias": {"b": torch.zeros(())}}})
    ...     load(folder).snapshot
    Snapshot(round=1, state={'model': {'w': tensor([1., 1.])}}, own={7: {'bias': {'b': tensor(0.)}}})
    """
    folder = Path(folder)
    if keep < 1:
        raise InputError(f"At least one checkpoint must be kept. Got keep = {keep} instead.")
    content = {"format": FORMAT, "round": round, "files": {}, "extra": dict(extra or {})}
    json.dumps(content)  # fail before anything is changed
    try:
        folder.mkdir(parents=True, exist_ok=True)
        existing = _rounds(folder)
        if since is None:
            since = max((earlier for earlier in existing if earlier < round), default=0)
        base = _manifest(folder, since) if since else None
        clients, versions = _advance(_versions(folder, base), own, round)
        for abandoned in (number for number in existing if number > since):
            (folder / _name("round", abandoned)).unlink()
        written = {_name("state", round): _write(folder / _name("state", round), state)}
        if own:
            trees = {str(client): groups for client, groups in own.items()}
            written[_name("own", round)] = _write(folder / _name("own", round), trees)
        if len(clients):
            table = {"own": {"clients": torch.from_numpy(clients), "rounds": torch.from_numpy(versions)}}
            written[_name("versions", round)] = _write(folder / _name("versions", round), table)
        needed = [_name("own", int(number)) for number in np.unique(versions) if number != round]
        content["files"] = {**{name: base["files"][name] for name in needed if base}, **written}
        sealed = json.dumps({**content, "sha256": _seal(content)}, indent=1)
        files.write_atomically(folder / _name("round", round), sealed.encode(), "checkpoint")
        _tidy(folder, keep)
    except _Damaged as why:
        raise StoreError(
            f"The checkpoint of round {since} in {folder} is damaged ({why}), and that of round {round} builds on it. "
            "Run again to continue from an earlier one."
        ) from why
    except (OSError, SafetensorError) as error:
        raise StoreError(f"The checkpoint of round {round} cannot be written to {folder}: {error}.") from error


def keep_model(folder: str | Path, round: int, model: Tree) -> None:
    """Write the global model of a round to `models/round-….safetensors`, where it stays."""
    models = Path(folder) / "models"
    try:
        models.mkdir(parents=True, exist_ok=True)
        _write(models / f"round-{round:06d}.safetensors", model)
    except (OSError, SafetensorError) as error:
        raise StoreError(f"The model of round {round} cannot be kept in {models}: {error}.") from error


def frozen_file(run: Path, sha256: str) -> Path:
    """Return the file in a run's folder with frozen parameters, which all checkpoints with these have in common."""
    return run / f"frozen-{sha256[:16]}.safetensors"


def keep_frozen(run: Path, frozen: Tree, sha256: str) -> None:
    """Write frozen parameters to a run's folder, once for all its cells."""
    path = frozen_file(run, sha256)
    try:
        with _KEEPING:
            if not path.is_file():
                _write(path, frozen)
    except (OSError, SafetensorError) as error:
        raise StoreError(f"The model's frozen parameters cannot be kept in {run}: {error}.") from error


def load_frozen(run: Path, checkpoint: Checkpoint) -> Tree:
    """Return the frozen parameters that belong to the models of a checkpoint, if there are some."""
    sha256 = checkpoint.extra.get(FROZEN)
    if sha256 is None:
        return {}
    path = frozen_file(run, sha256)
    try:
        found: Tree = _read(path, depth=1)
    except (OSError, SafetensorError) as error:
        raise StoreError(f"The model's frozen parameters in {path} cannot be read: {error}.") from error
    if tree.sha256(found) != sha256:
        raise StoreError(f"{path} is damaged: it does not have the frozen parameters that the run trained with.")
    return found


def load(folder: str | Path, *, oldest: bool = False) -> Checkpoint | None:
    """Load the newest (or oldest) whole checkpoint, with a note about each damaged one before it; None without any."""
    folder = Path(folder)
    notes: list[str] = []
    try:
        for round in sorted(_rounds(folder), reverse=not oldest):
            try:
                manifest = _manifest(folder, round)
                return Checkpoint(_snapshot(folder, manifest), manifest["extra"], notes)
            except _Damaged as why:
                notes.append(f"The checkpoint of round {round} is damaged and was skipped: {why}.")
    except OSError as error:
        raise StoreError(f"The checkpoints in {folder} cannot be read: {error}.") from error
    if notes:
        raise StoreError(
            f"No checkpoint in {folder} can be used. {' '.join(notes)} Delete the folder to start from the beginning."
        )
    return None


def kept(folder: str | Path) -> tuple[int, int]:
    """Return the rounds of the oldest and the newest checkpoint without reading them; 0 if there is none."""
    rounds = _rounds(Path(folder)) or [0]
    return min(rounds), max(rounds)


def whole_rounds(folder: str | Path) -> list[int]:
    """Return the rounds of the checkpoints that can be used, in order."""
    folder, found = Path(folder), []
    for round in sorted(_rounds(folder)):
        with suppress(_Damaged):
            manifest = _manifest(folder, round)
            for name in manifest["files"]:
                _verify(folder, manifest, name)
            found.append(round)
    return found


def forget_after(folder: str | Path, round: int) -> None:
    """Delete the checkpoints and kept models after a round, the newest first."""
    folder = Path(folder)
    later = sorted((number for number in _rounds(folder) if number > round), reverse=True)
    models = [path for path in (folder / "models").glob("round-*.safetensors") if int(path.stem[6:]) > round]
    try:
        for path in (*(folder / _name("round", number) for number in later), *models):
            path.unlink()
        _tidy(folder, len(_rounds(folder)))
    except OSError as error:
        raise StoreError(f"The checkpoints in {folder} cannot be deleted: {error}.") from error


def _name(kind: str, round: int) -> str:
    return f"{kind}-{round:06d}.{'json' if kind == 'round' else 'safetensors'}"


def _rounds(folder: Path) -> list[int]:
    names = os.listdir(folder) if folder.is_dir() else []
    return [int(found[1]) for found in map(_MANIFEST.fullmatch, names) if found]


def _seal(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _manifest(folder: Path, round: int) -> dict[str, Any]:
    """Read the manifest of a round, and check that it is unchanged."""
    name = _name("round", round)
    try:
        content = json.loads((folder / name).read_bytes())
        seal, known = content.pop("sha256"), int(content["format"])
    except FileNotFoundError:
        raise _Damaged(f"{name} is missing") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise _Damaged(f"{name} cannot be read") from None
    if seal != _seal(content):
        raise _Damaged(f"the content of {name} does not have its SHA-256")
    if known > FORMAT:
        raise StoreError(
            f"{folder / name} has format {known}, and this fedloom knows formats up to {FORMAT}. "
            "A newer fedloom wrote it: update fedloom to use it."
        )
    return dict(content)


def _snapshot(folder: Path, manifest: Mapping[str, Any]) -> Snapshot:
    """Read what a manifest describes, and check that every file is unchanged."""
    for name in manifest["files"]:
        _verify(folder, manifest, name)
    own: dict[int, Groups] = {}
    clients, versions = _versions(folder, manifest)
    for number in np.unique(versions):
        wanted = {str(client) for client in clients[versions == number]}
        for client, groups in _read(folder / _name("own", int(number)), depth=3, branches=wanted).items():
            own[int(client)] = groups
    round = int(manifest["round"])
    return Snapshot(round, _read(folder / _name("state", round), depth=2), dict(sorted(own.items())))


def _versions(folder: Path, manifest: Mapping[str, Any] | None) -> Versions:
    """Return the clients that keep a state, and the round in which each one's was saved."""
    name = _name("versions", manifest["round"]) if manifest else ""
    if manifest is None or name not in manifest["files"]:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    _verify(folder, manifest, name)
    table = _read(folder / name, depth=2)["own"]
    return table["clients"].numpy(), table["rounds"].numpy()


def _advance(table: Versions, own: Collection[int], round: int) -> Versions:
    """Return the table of versions after a checkpoint in which some clients changed."""
    changed = np.fromiter(own, np.int64, len(own))
    same = ~np.isin(table[0], changed)
    return np.append(table[0][same], changed), np.append(table[1][same], np.full(len(changed), round, np.int64))


def _tidy(folder: Path, keep: int) -> None:
    """Delete the files that no kept checkpoint needs, and those that killed processes left."""
    needed: set[str] = set()
    for round in sorted(_rounds(folder), reverse=True):
        try:
            manifest = _manifest(folder, round)
        except _Damaged:
            continue
        needed |= {_name("round", round), *manifest["files"]}
        keep -= 1
        if not keep:
            break
    surplus = [name for name in os.listdir(folder) if _OURS.fullmatch(name) and name not in needed]
    for name in sorted(surplus, key=lambda name: not _MANIFEST.fullmatch(name)):  # manifests before their files
        (folder / name).unlink()


def _verify(folder: Path, manifest: Mapping[str, Any], name: str) -> None:
    try:
        if files.sha256(folder / name) != manifest["files"][name]:
            raise _Damaged(f"{name} does not have its SHA-256")
    except FileNotFoundError:
        raise _Damaged(f"{name} is missing") from None


def _write(path: Path, branches: Mapping[str, Any]) -> str:
    """Write nested trees and return the file's SHA-256. The order of leaves is kept: sums over them depend on it."""
    leaves = dict(_flatten(branches))
    tensors: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, leaf in leaves.items():
        if leaf is not None:
            leaf = leaf.detach().cpu()
            if leaf.dtype == torch.complex128:
                raise InputError(f"'{name}' is complex in double precision, which cannot be stored: use dtype float32.")
            # safetensors refuses two tensors that share memory, such as rows of a stack
            if leaf.untyped_storage().data_ptr() in storages or not leaf.is_contiguous():
                leaf = leaf.clone(memory_format=torch.contiguous_format)
            storages.add(leaf.untyped_storage().data_ptr())
            tensors[name] = leaf
    with files.replacing(path) as temporary:
        save_file(tensors, temporary, metadata={"order": json.dumps(list(leaves))})
        return files.sha256(temporary)


def _flatten(branches: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Tensor | None]]:
    """Yield the paths of all leaves; the path of a branch without leaves ends in a slash."""
    for name, value in branches.items():
        if isinstance(value, Tensor):
            yield above + name, value
        elif "/" in name:
            raise InputError(f"The name of a group of leaves must not have a slash. Got '{name}': rename it.")
        elif value:
            yield from _flatten(value, f"{above}{name}/")
        else:
            yield f"{above}{name}/", None


def _read(path: Path, depth: int, branches: Collection[str] | None = None) -> dict[str, Any]:
    """Read nested trees, or only some of the outermost branches."""
    found: dict[str, Any] = {}
    with safe_open(path, framework="pt") as file:
        for name in json.loads(file.metadata()["order"]):
            *above, leaf = name.split("/", depth - 1)
            if branches is not None and above[0] not in branches:
                continue
            branch = found
            for part in above:
                branch = branch.setdefault(part, {})
            if leaf:
                # copied, because mapped memory is aligned differently, which may change the bits of later arithmetic
                branch[leaf] = file.get_tensor(name).clone()
    return found
