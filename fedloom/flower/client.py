"""The ClientApp. Flower starts a process for every message; this process passes the message to a running worker.

Without a worker it does the work itself: it loads torch, the model and the data, answers, and ends.
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
from fedloom.flower.messages import Payload
from fedloom.flower.paths import data_mark, state_folder, worker_address

WORKER_START_SECONDS = 120.0  # how long a worker may take to start


def client_app(app: Path) -> ClientApp:
    """Return the ClientApp of an app's folder."""
    made = ClientApp()

    def reply(message: Message, context: Context) -> Message:
        return Message(
            answer(app, Payload.from_record(message.content), context.node_config).to_record(), reply_to=message
        )

    for kind in (made.query, made.train, made.evaluate):
        kind()(reply)
    return made


def answer(app: Path, payload: Payload, config: Mapping[str, Any]) -> Payload:
    """Return this node's answer. An error in its settings is an answer too, which the ServerApp shows."""
    try:
        state = state_folder(config)
        end = time.monotonic() + WORKER_START_SECONDS
        result = _ask_worker(app, config, state, payload)
        while result is None:
            result = _answer_here(app, config, state, payload, waiting=time.monotonic() < end)
            result = result or _ask_worker(app, config, state, payload)
        return result
    except FedloomError as error:
        print(f"error: {error}", flush=True)
        return Payload({"failure": str(error)})


def _answer_here(app: Path, config: Mapping[str, Any], state: Path, payload: Payload, waiting: bool) -> Payload | None:
    """Return this process's own answer, or None while a worker that is still starting holds the node's state."""
    from fedloom.flower.worker import Worker, site_for
    from fedloom.network.agent.enrolment import locked_state

    with ExitStack() as stack:
        try:
            stack.enter_context(locked_state(state, seconds=0.5))
        except StoreError:
            if waiting:
                return None
            raise
        return Worker(site_for(app, config), state).answer(payload)


def _ask_worker(app: Path, config: Mapping[str, Any], state: Path, payload: Payload) -> Payload | None:
    """Return the answer of the worker of this node, or None if there is none."""
    address = worker_address(state)
    if address is None:
        return None
    try:
        with Client(address[0], family="AF_UNIX", authkey=address[1]) as connection:
            if address[2] != data_mark(app, config):
                raise InputError(
                    f"The worker with the state folder {state} was started for an app with other data: "
                    "stop it and start it for this app."
                )
            payload.send(connection)
            return Payload.receive(connection)
    except (OSError, EOFError, AuthenticationError):  # the worker ended, and this process can do the work too
        return None
