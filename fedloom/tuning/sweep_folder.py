"""A sweep's folder as `fedloom list` sees it: while it runs, after it was stopped, and when it is done."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from fedloom.errors import StoreError
from fedloom.files import is_locked, json_text, locked, write_atomically

FILE = "sweep.json"


@dataclass(frozen=True)
class ListedSweep:
    """What a list says about a sweep."""

    name: str
    folder: str
    status: str  # done, running or interrupted
    over: list[str]  # the keys that vary
    settings: int  # settings of algorithms that were tried; 0 before the end
    started: str | None
    finished: str | None
    best: str


@contextmanager
def running(folder: Path, over: Sequence[str], fresh: bool = False) -> Iterator[None]:
    """Hold a folder for one sweep. What an earlier sweep found there stays until this one writes its own.

    If this one continues a finished sweep and finds the same, it computed nothing, and the earlier dates stay.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder, f"Another sweep is running in {folder}. Wait for it, or choose another folder with --out."):
        earlier = _content(folder)
        _write(folder, {**earlier, "over": list(over), "started": _now(), "finished": None})
        yield
        now = _content(folder)
        dates = {key: earlier.get(key) for key in ("started", "finished")}
        if not fresh and dates["finished"] and now["finished"] and {**now, **dates} == earlier:
            _write(folder, earlier)


def finish(folder: Path, found: Mapping[str, Any], best: str) -> None:
    """Write what a sweep found."""
    start = {key: value for key, value in _content(folder).items() if key in ("over", "started")}
    _write(folder, {**start, "finished": _now(), "best": best, **found})


def read(folder: Path) -> ListedSweep:
    """Read what a list says about a sweep, from files of earlier versions too: they were written at its end."""
    known = _content(folder)
    written = datetime.fromtimestamp((folder / FILE).stat().st_mtime, timezone.utc).isoformat()
    tried, finished = known.get("tried") or [], known.get("finished", written)
    over = known.get("over") or dict.fromkeys(key for one in tried for key in one.get("setting", ()))
    status = "done" if finished else "running" if is_locked(folder) else "interrupted"
    found = {"settings": len(tried), "best": known.get("best") or ""} if finished else {"settings": 0, "best": ""}
    started = known.get("started")
    return ListedSweep(folder.resolve().name, str(folder), status, [*over], started=started, finished=finished, **found)


def is_sweep(folder: Path) -> bool:
    """Whether a folder holds a sweep, finished or not."""
    return (folder / FILE).is_file()


def remove(folder: Path) -> list[Path]:
    """Delete a sweep: its tables, its figure and all settings that it tried; return what was kept."""
    with locked(folder, f"A sweep is running in {folder}. Stop it first."):
        shutil.rmtree(folder / "settings", ignore_errors=True)
        for path in folder.glob("sweep.*"):
            path.unlink()
    (folder / ".lock").unlink(missing_ok=True)  # now, because some systems do not delete a file that is open
    kept = sorted(folder.iterdir())
    if not kept:
        folder.rmdir()
    return kept


def _content(folder: Path) -> dict[str, Any]:
    path = folder / FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise StoreError(f"{path} cannot be read: {error}.") from error
    if not isinstance(content, dict):
        raise StoreError(f"{path} does not describe a sweep.")
    return content


def _write(folder: Path, content: Mapping[str, Any]) -> None:
    write_atomically(folder / FILE, json_text(content, indent=1).encode())


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
