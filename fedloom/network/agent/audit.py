"""The agent's audit log: a JSON line for every request that it answers, for the people responsible for the data."""

from __future__ import annotations

import json
import os
import threading
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from fedloom import faults
from fedloom.errors import StoreError


class Audit:
    """A file to which lines are only ever appended."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not path.exists():
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
        elif path.stat().st_size:  # a crash may have left half a line
            with open(path, "rb+") as file:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.write(b"\n")

    def write(self, event: str, **facts: Any) -> None:
        """Append one line."""
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        line = json.dumps({"time": now, "event": event, **facts}, ensure_ascii=False)
        try:
            with self._lock, open(self.path, "a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            raise StoreError(f"The audit log {self.path} cannot be written: {error}.") from error
        faults.point("audit.written")
