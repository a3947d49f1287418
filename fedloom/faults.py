"""Named points around fsyncs, renames and commits where a test can kill the process, and a clock that it can move.

Nothing happens unless environment variables ask for it.
"""

from __future__ import annotations

import os
import signal
import time

VARIABLE = "FEDLOOM_KILL_AT"  # "NAME:N" kills this process when it passes the point for the N-th time
CLOCK = "FEDLOOM_CLOCK"  # "3600@5" moves this process's clock by an hour after five seconds

_name, _, _number = os.environ.get(VARIABLE, "").partition(":")
_left = int(_number or 1)
_jump, _, _after = os.environ.get(CLOCK, "").partition("@")
_begun = time.monotonic()


def clock() -> float:
    """Return the time of day, which a test can move."""
    moved = float(_jump) if _jump and time.monotonic() - _begun >= float(_after or 0) else 0.0
    return time.time() + moved


def point(name: str) -> None:
    """Mark a point where a test can kill this process."""
    global _left
    if name == _name:
        _left -= 1
        if _left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
