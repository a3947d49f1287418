"""A run's folder: for one process at a time, and for one experiment."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tomli_w

from fedloom.errors import InputError, StoreError
from fedloom.experiment import checkpoint
from fedloom.experiment.experiment_file import differences
from fedloom.experiment.store import Store


@contextlib.contextmanager
def claimed(folder: Path, fresh: bool) -> Iterator[None]:
    """The run folder, for this process alone; `fresh` moves an old one aside, because results are never thrown away."""
    if folder.exists() and not folder.is_dir():
        raise StoreError(f"{folder} is a file: a run needs a folder. Choose another with --out.")
    if fresh and folder.exists() and any(folder.iterdir()):
        with locked(folder):  # nobody may be at work in there
            pass
        aside = folder.with_name(f"{folder.name}.{time.strftime('%Y%m%d-%H%M%S')}")
        number = 1
        while aside.exists():
            number += 1
            aside = aside.with_name(f"{folder.name}.{time.strftime('%Y%m%d-%H%M%S')}-{number}")
        folder.rename(aside)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"The run's folder {folder} cannot be made: {error}.") from error
    with locked(folder):
        yield


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder for this process alone."""
    try:
        import fcntl
    except ImportError:  # no such lock on this system: two runs in one folder are then the user's own risk
        yield
        return
    try:
        lock = open(folder / ".lock", "w")  # noqa: SIM115 (closed below)
    except OSError as error:
        raise StoreError(f"Nothing can be written to {folder}: {error}.") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise StoreError(
                f"Another process is running in {folder}. Wait for it, or choose another folder with --out."
            ) from None
        yield


def same_experiment(
    store: Store, folder: Path, description: Mapping[str, Any], rounds: int, resolved: Mapping[str, Any] | None
) -> None:
    """Refuse to mix two experiments in one folder; note down what this one is."""
    done = max((cell["rounds_done"] for cell in store.cells()), default=0)
    if not done:
        if any((folder / "cells").glob("*/round-*.json")):
            raise StoreError(
                f"{folder} has checkpoints, but its run.db knows nothing of them. Use --fresh to start anew."
            )
        store.forget_all()  # an attempt that failed before its first round does not claim the folder
    known = store.fact("description")
    described = json.loads(json.dumps(description, default=str))
    if known is not None and known != described:
        changed = "\n  ".join(differences(known, described))
        raise InputError(
            f"{folder} holds another experiment. What differs:\n  {changed}\n"
            "Use --fresh to start anew (the old folder is kept beside it), or --out for another folder."
        )
    if rounds < done:
        raise InputError(
            f"{folder} was run for {done} rounds, more than the {rounds} asked for now. Use --fresh to start anew."
        )
    store.set_fact("description", described)
    if resolved is not None:
        checkpoint.write_atomically(folder / "experiment.toml", tomli_w.dumps(dict(resolved)).encode())
