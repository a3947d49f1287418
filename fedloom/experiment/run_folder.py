"""A run's folder: used by one process at a time, and for one experiment only. It can return to an earlier round."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tomli_w

from fedloom import files
from fedloom.algorithm import Algorithm
from fedloom.data.federation import Federation
from fedloom.errors import FRESH, OUT, FedloomError, InputError, StoreError, unknown
from fedloom.experiment import checkpoint
from fedloom.experiment.control import FILE
from fedloom.experiment.description import differences
from fedloom.experiment.plan import Plan
from fedloom.experiment.store import OWN_MODELS, Store
from fedloom.former_keys import FORMER_KEYS
from fedloom.privacy.dp.ledger import LEDGER
from fedloom.user_code import calls, fingerprint

DATA_OF_SEED = "data of seed "  # a fact
GLANCE = 0.5  # seconds to wait for a lock: another process may hold it just to see whether the run goes on
# What fedloom writes into a run's folder besides pictures. The database goes last, so that a removal that was cut short
# can be repeated.
WRITTEN = (
    *("cells", "network", "tables", "figures", "export", "experiment.toml", "report.html", "audit.json", FILE),
    *("run.db-wal", "run.db-shm", "run.db"),
)


@contextlib.contextmanager
def claimed(folder: Path, fresh: bool) -> Iterator[None]:
    """Hold the run folder for this process alone; `fresh` moves an old one aside and never deletes results.

    If a new run is refused before anything is computed, the folder is afterwards as it was before.
    """
    aside: Path | None = None
    if folder.exists() and not folder.is_dir():
        raise StoreError(f"{folder} is a file: a run needs a folder. Choose another with {OUT}.")
    if fresh and folder.exists() and any(folder.iterdir()):
        with locked(folder):  # no other process may be using it
            pass
        stamp = time.strftime("%Y%m%d-%H%M%S")
        names = (f"{folder.name}.{stamp}{suffix}" for suffix in ("", *(f"-{n}" for n in range(2, 1000))))
        aside = folder.rename(next(path for path in map(folder.with_name, names) if not path.exists()))
    if not (folder / "run.db").exists() and _has_checkpoints(folder):  # opening the store would make an empty one
        raise StoreError(
            f"{folder} has checkpoints, but no run.db that says of which experiment. Put it back, or use {FRESH} to "
            "start over (the old folder is kept beside it)."
        )
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    before = {path.name for path in folder.iterdir()} if folder.exists() else set()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise StoreError(f"The run's folder {folder} cannot be made: {error}.") from error
    try:
        with locked(folder):
            try:
                yield
            except Exception:
                check_there(folder)  # says more than what failed because of it
                raise
            check_there(folder)
    except InputError:
        if "run.db" not in before and not _has_results(folder):
            _delete(path for path in (*_written(folder), folder / ".lock") if path.name not in before)
            with contextlib.suppress(OSError):  # something else is in it
                for path in missing:
                    path.rmdir()
                if aside is not None:
                    aside.rename(folder)
        raise


def check_there(folder: Path) -> None:
    """Raise if a held folder was deleted or moved. Its lock is looked for: saving a checkpoint makes a folder again."""
    if not (folder / ".lock").exists():
        raise StoreError(
            f"The run's folder {folder} was deleted or moved while the run used it. Put it back to continue, or run "
            "again from the start."
        )


def locked(folder: Path) -> contextlib.AbstractContextManager[None]:
    """Hold a folder for this process alone."""
    return files.locked(
        folder, f"Another process is running in {folder}. Wait for it, or choose another folder with {OUT}.", GLANCE
    )


def remove(folder: Path) -> list[Path]:
    """Delete what fedloom wrote into a run's folder, and the folder if nothing else is in it; return what was kept."""
    if (folder / "network").is_dir():
        with locked(folder / "network"):  # no coordinator may be using it
            pass
    with locked(folder):
        with Store(folder, read_only=True) as store:
            pictures = [f"{row['metric']}.png" for row in store.rows("metrics")]
        _delete([*(folder / name for name in ("generations.png", *pictures)), *_written(folder)])
    (folder / ".lock").unlink(missing_ok=True)  # now, because some systems do not delete a file that is open
    kept = sorted(folder.iterdir())
    if not kept:
        folder.rmdir()
    return kept


def _written(folder: Path) -> list[Path]:
    """Return what fedloom writes into a run's folder besides pictures, whether it is there or not."""
    patterns = preprocessing_file(folder, "*").name, checkpoint.frozen_file(folder, "*").name
    found = [path for pattern in patterns for path in folder.glob(pattern)]
    return [*found, *(folder / name for name in WRITTEN)]


def _delete(paths: Iterable[Path]) -> None:
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def irreplaceable(folder: Path) -> dict[str, bool]:
    """What a run cannot be run again without → whether the folder has it."""
    spent = any((folder / "cells").rglob(LEDGER))
    return {"record of the ε that was spent": spent, "network's keys and agents": (folder / "network").is_dir()}


def preprocessing_file(folder: Path, seed: int | str) -> Path:
    """Return the file with the preprocessing of a seed's data."""
    return folder / f"preprocessing-{seed}.json"


def same_experiment(store: Store, folder: Path, plan: Plan, remote: bool = False) -> None:
    """Refuse to mix two experiments in one folder. More seeds are more cells, and the first seed stays the first."""
    done = max((cell["rounds_done"] for cell in store.cells()), default=0)
    known = store.fact("description")
    if not done:
        if not _has_checkpoints(folder):
            store.forget_all()  # an attempt that failed before its first round does not claim the folder
            known = None
        elif known is None:
            raise StoreError(
                f"{folder} has checkpoints, but its run.db does not say of which experiment. Use {FRESH} to start over "
                "(the old folder is kept beside it)."
            )
    described = _described(plan)
    remote = remote or bool(store.fact("network"))
    if known is not None:
        known = comparable(known, described, plan)
        had, wanted = known.get("seeds"), described.get("seeds")
        if not remote and isinstance(had, list) and isinstance(wanted, list) and wanted[: len(had)] == had:
            known["seeds"] = wanted
    if known is not None and known != described:
        changed = "\n  ".join(differences(known, described))
        advice = _about_seeds(had, remote) if isinstance(had, list) and known["seeds"] != wanted else ""
        raise InputError(
            f"{folder} holds another experiment. What differs:\n  {changed}\n{advice}"
            f"Use {FRESH} to start over (the old folder is kept beside it), or {OUT} for another folder."
        )
    if plan.rounds < done:
        raise InputError(
            f"{folder} was run for {done} rounds, more than the {plan.rounds} asked for now. Use {FRESH} to start over."
        )


def holds_another(folder: Path, plan: Plan) -> bool:
    """Whether a run of this plan in a folder would be refused because of the run that is there."""
    if not (folder / "run.db").is_file():
        return False
    try:
        with Store(folder, read_only=True) as store:
            if any(cell["rounds_done"] for cell in store.cells()):
                same_experiment(store, folder, plan)
    except FedloomError:
        return True
    return False


def _about_seeds(had: list[int], remote: bool) -> str:
    if remote:
        return "On a network, sites have agreed to these seeds: others need a run of their own.\n"
    seeds = ", ".join(map(str, had))
    return f"A run keeps its seeds, and more can follow them: seeds = [{seeds}, …].\n"


def record_experiment(store: Store, folder: Path, plan: Plan) -> None:
    """Record which experiment a folder holds, and for how many rounds."""
    store.set_fact("description", _described(plan))
    store.set_fact("rounds", plan.rounds)
    peers = [label for label, one in plan.algorithms.items() if calls(type(one), "exchange")]
    store.set_fact("peers", peers)  # the report says who saw what
    store.set_fact(OWN_MODELS, [label for label, one in plan.algorithms.items() if has_own_models(one)])
    if plan.resolved is not None:
        files.write_atomically(folder / "experiment.toml", tomli_w.dumps(dict(plan.resolved)).encode())


def has_own_models(algorithm: Algorithm) -> bool:
    """Whether clients use models of their own, and not one that all share."""
    return type(algorithm).model is not Algorithm.model


def check_same_data(store: Store, federation: Federation, seed: int, own_data: bool = False) -> None:
    """Refuse to continue with other data than the run began with.

    Unless every seed has its `own_data`, seeds share it, and earlier versions recorded it for the first of them only.
    """
    recorded = {key: value for key, value in store.facts().items() if key.startswith(DATA_OF_SEED)}
    first = None if own_data else next(iter(recorded.values()), None)
    if recorded.get(f"{DATA_OF_SEED}{seed}", first) not in (None, federation.fingerprint):
        where = f", in seed {seed}" if own_data else ""
        raise StoreError(
            f"The data has changed since this run began{where}. Restore it to continue, or use {FRESH} to start over "
            "with the new data."
        )


def _described(plan: Plan) -> Any:
    return json.loads(json.dumps(plan.description(), default=str))


def _has_results(folder: Path) -> bool:
    """Whether a run computed a round, or has what it cannot be run again without."""
    if _has_checkpoints(folder) or any(irreplaceable(folder).values()):
        return True
    if not (folder / "run.db").exists():
        return False
    with Store(folder, read_only=True) as store:
        return bool(store.rows("rounds"))


def _has_checkpoints(folder: Path) -> bool:
    return any((folder / "cells").glob("*/round-*.json"))


def comparable(known: Mapping[str, Any], described: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """Return what an earlier version recorded as this one would, so that its runs can be continued.

    Keys that changed nothing are left out, and hashes that it did not have are those of today.
    """
    known = {**{key: described[key] for key in ("values", "files") if key in described}, **known}
    known = _with_present_hashes(known, described, plan)
    if "algorithm" not in known or "algorithm" not in described:  # described by its caller in another way
        return known
    now = described["algorithm"]
    algorithms = {
        label: {k: v for k, v in fields.items() if k in now.get(label, {}) or FORMER_KEYS.get(k) != v}
        for label, fields in known["algorithm"].items()
    }
    return {**known, "algorithm": algorithms}


def _with_present_hashes(known: dict[str, Any], described: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """Replace the hashes that an earlier version made of whole files, with comments, where a file is still the same."""
    code, here = known.get("code"), plan.code_files()
    if not isinstance(code, Mapping) or not here:
        return known
    same = {name for name, file in here.items() if code.get(name) == fingerprint(file)}
    return {**known, "code": {**code, **{name: described["code"][name] for name in same}}}


def roll_back(folder: Path, round: int, cell: str | None = None) -> dict[str, int]:
    """Delete what came after a round, in one cell or in all that are beyond it; return how far each one was.

    Every such cell must have a whole checkpoint of the round, or nothing is changed. The caller holds the folder.
    """
    with Store(folder) as store:
        cells = {f"{row['label']}-{row['seed']}": row for row in store.cells()}
        if cell is not None and cell not in cells:
            raise unknown("cell", cell, cells)
        paths = {name: checkpoint.of_cell(folder, row["label"], row["seed"]) for name, row in cells.items()}
        done = {name: max(int(cells[name]["rounds_done"]), checkpoint.kept(path)[1]) for name, path in paths.items()}
        beyond = {name: done[name] for name in cells if cell in (None, name) and done[name] > round}
        if not beyond:
            raise InputError(
                f"Nothing came after round {round}: {', '.join(f'{n} has {done[n]}' for n in done)} rounds."
            )
        for name in beyond:
            usable = checkpoint.whole_rounds(paths[name])
            if round not in usable:
                rounds = ", ".join(map(str, usable)) or "none"
                raise InputError(
                    f"{name} has no checkpoint of round {round}. Kept: {rounds}. Set [run] keep_checkpoints to keep "
                    "more, or name another cell with --cell."
                )
        for name in beyond:
            checkpoint.forget_after(paths[name], round)
            store.forget_after(cells[name]["id"], round)
            store.set_status(cells[name]["id"], "waiting")  # what it ended with is gone
            store.set_status(cells[name]["id"], "stopped")
    return beyond
