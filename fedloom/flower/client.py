"""The ClientApp: Flower starts a process for every message, so it hands the message to a worker that is warm.

Without a worker the process does the work itself: it loads torch, the model and the data, answers, and is gone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedloom.errors import FedloomError, InputError, StoreError
from fedloom.flower.messages import Letter
from fedloom.flower.paths import data_mark, state_folder, worker_address

PATIENCE = 120.0  # seconds that a worker may take to get ready


def client_app(app: Path) -> ClientApp:
    """The ClientApp of an app's folder."""
    made = ClientApp()

    def reply(message: Message, context: Context) -> Message:
        return Message(answer(app, Letter.read(message.content), context.node_config).content(), reply_to=message)

    for kind in (made.query, made.train, made.evaluate):
        kind()(reply)
    return made


def answer(app: Path, letter: Letter, config: Mapping[str, Any]) -> Letter:
    """What this node answers; a mistake in its settings is an answer too, for the ServerApp to show."""
    try:
        state = state_folder(config)
        end = time.monotonic() + PATIENCE
        found = _by_worker(app, config, state, letter)
        while found is None:
            found = _alone(app, config, state, letter, waiting=time.monotonic() < end)
            found = found or _by_worker(app, config, state, letter)
        return found
    except FedloomError as error:
        print(f"error: {error}", flush=True)
        return Letter({"failure": str(error)})


def _alone(app: Path, config: Mapping[str, Any], state: Path, letter: Letter, waiting: bool) -> Letter | None:
    """The answer of this process; none while a worker holds the node's state and is not ready yet."""
    from fedloom.flower.worker import Worker, seat
    from fedloom.network.agent.enrolment import claimed

    with ExitStack() as stack:
        try:
            stack.enter_context(claimed(state, seconds=0.5))
        except StoreError:
            if waiting:
                return None
            raise
        return Worker(seat(app, config), state).answer(letter)


def _by_worker(app: Path, config: Mapping[str, Any], state: Path, letter: Letter) -> Letter | None:
    """The answer of the worker beside this node, if there is one."""
    address = worker_address(state)
    if address is None:
        return None
    try:
        with Client(address[0], family="AF_UNIX", authkey=address[1]) as connection:
            if address[2] != data_mark(app, config):
                raise InputError(
                    f"The worker with the state folder {state} was started for an app with other data: "
                    "end it and start it for this one."
                )
            letter.send(connection)
            return Letter.receive(connection)
    except (OSError, EOFError, AuthenticationError):  # it ended: this process can do the work too
        return None
