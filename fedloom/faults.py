"""Named instants around fsyncs, renames and commits at which a test may kill the process, and a clock that it may move.

Inert unless the environment asks for it.
"""

from __future__ import annotations

import os
import signal
import time

# where a process may be killed, and by whom the instant is passed: the tests kill at each of them
COORDINATOR_POINTS = (
    "coordinator.ask",  # before the clients of a call are asked
    "update.received",  # an update is on the disk, but not accepted
    "ledger.accept",  # before accepted updates are committed
    "ledger.accepted",  # after that, before the agents are told
    "coordinator.aggregate",  # all updates are there, none is added up
    "coordinator.aggregated",  # added up, nothing is checkpointed
    "checkpoint.write",  # before a checkpoint's file is synced
    "checkpoint.rename",  # synced, not yet in its place
    "checkpoint.renamed",  # in its place, the folder is not synced
    "ledger.forget",  # before updates that were added up are deleted
)
AGENT_POINTS = (
    "agent.asked",  # an ask has arrived
    "agent.trained",  # before anything of the answer is kept
    "own.write",  # before a client's new state is synced
    "own.rename",  # synced, not yet in its place
    "own.renamed",  # in its place, the answer is not sent
    "agent.answered",  # the answer was accepted
    "audit.written",  # the audit log has a new line
)
VARIABLE = "FEDLOOM_KILL_AT"  # "NAME:N" kills this process when it passes the instant for the N-th time
CLOCK = "FEDLOOM_CLOCK"  # "3600@5" moves this process's clock by an hour after five seconds

_name, _, _number = os.environ.get(VARIABLE, "").partition(":")
_left = int(_number or 1)


_jump, _, _after = os.environ.get(CLOCK, "").partition("@")
_begun = time.monotonic()


def clock() -> float:
    """The time of day, which a test may move."""
    moved = float(_jump) if _jump and time.monotonic() - _begun >= float(_after or 0) else 0.0
    return time.time() + moved


def point(name: str) -> None:
    """An instant at which a test may kill this process."""
    global _left
    if name == _name:
        _left -= 1
        if _left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
