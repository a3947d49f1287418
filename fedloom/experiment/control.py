"""A wish for a running experiment, to pause or to stop: a file in the run's folder, which it obeys between rounds.

Anybody who may write to the folder can write the file, also by hand: `{"wish": "pause"}` in `control.json`. A run that
is stopped deletes the file, so that the next start continues. A pause lasts until the file is gone, also through a
restart, and the run says so.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from fedloom import files
from fedloom.errors import InputError
from fedloom.experiment.progress import Progress
from fedloom.experiment.store import no_run
from fedloom.results.safe_text import visible

FILE = "control.json"
PAUSED = "paused"  # the fact that says after which round the run waits
GLANCE = 0.2  # seconds between two looks at the file during a pause
_WRITING = threading.Lock()
Wish = Literal["pause", "stop", "continue"]


def write_wish(folder: Path, wish: Wish) -> None:
    """Ask the run in a folder to pause, to stop, or to continue."""
    if not (folder / "run.db").is_file():
        raise InputError(no_run(folder))
    path = folder / FILE
    if wish == "continue":
        path.unlink(missing_ok=True)
        return
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    with _WRITING:
        files.write_atomically(path, json.dumps({"wish": wish, "time": now}).encode())


def read_control(folder: Path) -> dict[str, Any]:
    """Return the wish for a run and when it was made, and whether a process is there to obey it."""
    wish, when = _read(folder / FILE)
    return {"wish": wish, "time": when, "running": files.is_locked(folder)}


def _read(path: Path) -> tuple[str, str]:
    """Return the wish in a file, or why it is none, and when it was made."""
    try:
        found = json.loads(path.read_bytes())
        wish, when = (str(found.get(key, "")) for key in ("wish", "time"))
    except FileNotFoundError:
        return "", ""
    except (OSError, ValueError, AttributeError):
        return "unreadable", ""
    return (wish if wish in ("pause", "stop") else "unreadable"), visible(when[:40])


class Control:
    """Obeys the file of one run; all cells of the run share it."""

    def __init__(self, folder: Path, progress: Progress, sleep: Callable[[float], None] = time.sleep) -> None:
        self.path, self.progress, self._sleep = folder / FILE, progress, sleep
        self._lock = threading.Lock()
        self._told = ""
        self._stopped = False

    def begin(self) -> None:
        """Say what a file means that an earlier process, or somebody since then, has left."""
        wish, when = _read(self.path)
        if wish == "stop":
            self.path.unlink(missing_ok=True)
            self._tell(f"Ignored the wish to stop in {self.path}{_since(when)}: it was made before this start.")
        elif wish == "unreadable":
            self._tell(f"{self.path} has no wish that fedloom knows. It is ignored; delete it.")

    def stops(self) -> bool:
        """Return whether the run shall stop; the file is deleted, so that the next start continues."""
        if self._stopped:  # every cell hears of it
            return True
        wish, when = _read(self.path)
        if wish == "stop":
            with self._lock:
                if not self._stopped:
                    self._stopped = True
                    self.path.unlink(missing_ok=True)
                    self.progress.note(f"Stopping after this round, as {self.path} asked{_since(when)}.")
        elif wish == "unreadable":
            self._tell(f"{self.path} has no wish that fedloom knows. It is ignored; delete it.")
        return self._stopped

    @property
    def pauses(self) -> bool:
        """Whether the run shall pause."""
        return _read(self.path)[0] == "pause"

    def hold(self, should_stop: Callable[[], bool]) -> bool:
        """Wait as long as the run shall pause; return whether it shall go on, and not stop."""
        if not self.pauses:
            return True
        when = _read(self.path)[1]
        self._tell(f"Paused by {self.path}{_since(when)}. Press Continue on the page, or delete the file, to go on.")
        while self.pauses:
            if should_stop():
                return False
            self._sleep(GLANCE)
        if should_stop():
            return False
        self._tell("Continued.")
        return True

    def _tell(self, text: str) -> None:
        """Say something once, also if several cells run side by side."""
        with self._lock:
            if self._told != text:
                self._told = text
                self.progress.note(text)


def _since(when: str) -> str:
    return f" ({when})" if when else ""
