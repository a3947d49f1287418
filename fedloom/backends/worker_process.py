"""A process that computes clients: `python -m fedloom.backends.worker_process FD PARENT`. It uses an inherited socket.

It is a new interpreter, not a fork and not `multiprocessing`: a script without a `__main__` guard and a notebook work,
and its environment is set before it multiplies matrices.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
import time
import traceback
from dataclasses import replace
from typing import Any


def serve(connection: socket.socket) -> None:
    """Answer until the parent closes the connection."""
    import torch

    from fedloom.backends import worker_messages
    from fedloom.backends.shared_memory import attach
    from fedloom.errors import FedloomError, TrainingError
    from fedloom.federation.work import Place
    from fedloom.machine import prepare_process
    from fedloom.user_code import said

    prepare_process()
    torch.set_grad_enabled(True)
    place: Place | None = None
    common: dict[str, Any] = {}
    broken: dict[str, tuple[str, Any]] = {}  # what could not be loaded, and why
    while True:
        head, *message = worker_messages.receive(connection)
        kind, ticket = head.decode().split()
        answer: tuple[str, Any] | None = None
        broken.pop(kind, None)
        try:
            payload = worker_messages.unpack(message)
            if kind == "surroundings":
                sys.path[:], environment = payload
                os.environ.update(environment)
            elif kind == "place":
                handle, task, setup = payload
                place = Place(attach(handle), task, setup)
            elif kind == "common":
                common = payload
            else:
                answer = next(iter(broken.values()), None) or ("done", replace(payload, **common).perform(place))
        except FedloomError as error:
            answer = ("failed", (error, traceback.format_exc()))
        except BaseException as error:  # the parent shows whatever a user's model raises
            answer = ("failed", (TrainingError(f"A worker process failed: {said(error)}"), traceback.format_exc()))
        if kind == "part":
            worker_messages.send(connection, [ticket.encode(), *worker_messages.pack(answer, by_value=False)])
        elif answer is not None:
            broken[kind] = answer  # reported when a part needs it


def end_with(parent: int) -> None:
    """End this process when its parent ends, whatever it is doing then."""
    died = getattr(ctypes.CDLL(None), "prctl", None) if sys.platform == "linux" else None
    if died is None or died(1, signal.SIGKILL) != 0:  # 1 is PR_SET_PDEATHSIG: the kernel kills it
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it ended before
        os._exit(0)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(0)


def main() -> None:
    """Serve over the socket whose number is the first argument, for the parent whose process is the second."""
    end_with(int(sys.argv[2]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which finishes the round first
    try:
        serve(socket.socket(fileno=int(sys.argv[1])))
    except (EOFError, ConnectionError):
        os._exit(0)  # the parent is gone or done: there is nothing to clean up, and torch takes a long time to exit


if __name__ == "__main__":
    main()
