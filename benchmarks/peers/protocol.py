"""How a benchmarked process talks to the one that measures: lines on stdin and stdout, standard library only.

The parent writes `go N`; the process computes N rounds and answers with one JSON object per round. Between two requests
it sleeps in a read, so that the system that is measured meanwhile has the machine to itself.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


class Line:
    """The connection to the parent. Make it before importing anything that may print."""

    def __init__(self) -> None:
        # libraries may print anything: their stdout becomes stderr, and only we write to the real one
        self._out = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self._wanted = 0
        self._began = 0.0

    def ready(self, **facts: Any) -> None:
        """Say that everything is loaded, and what it is."""
        self._say({"ready": facts})

    def wait(self) -> bool:
        """Sleep until the next round is wanted; false when there will be no more. Starts the clock."""
        while self._wanted == 0:
            order = sys.stdin.readline().split()
            if len(order) != 2 or order[0] != "go":
                return False
            self._wanted = int(order[1])
        self._wanted -= 1
        self._began = time.perf_counter()
        return True

    def done(self, **facts: Any) -> None:
        """Stop the clock and report the round."""
        self._say({"seconds": time.perf_counter() - self._began, **facts})

    def _say(self, message: dict[str, Any]) -> None:
        print(json.dumps(message), file=self._out, flush=True)
