"""`fedloom flower worker`: a long-lived process beside a SuperNode that keeps torch, the model and the data loaded.

It is the agent of `fedloom join`, with the same policy, audit log and state folder. Only its link differs: it reads
requests from a payload and writes answers into one.
"""

from __future__ import annotations

import json
import secrets
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import AuthenticationError
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from fedloom import machine
from fedloom.errors import FedloomError, InputError
from fedloom.experiment import experiment_file
from fedloom.experiment.plan import Plan
from fedloom.files import write_private
from fedloom.flower.messages import Payload
from fedloom.flower.paths import ADDRESS, partition
from fedloom.network.agent.agent import Agent
from fedloom.network.agent.connection import Connection
from fedloom.network.agent.disclosure import error_summary
from fedloom.network.agent.policy import Site, load_site, rehearsal, site_of
from fedloom.network.protocol.messages import Failure, Hello
from fedloom.network.protocol.tensors import Parcel


def site_for(app: Path, config: Mapping[str, Any]) -> Site:
    """Return the site of a node: the one of its file, or in a rehearsal some clients of the app's experiment."""
    if config.get("site"):
        return load_site(Path(str(config["site"])).expanduser())
    part = partition(config)
    if part is None:
        raise InputError("Give a site's file, or partition-id and num-partitions for a rehearsal.")
    number, count = part
    experiment = experiment_file.load(app / "experiment.toml")
    clients = Plan.of(experiment).federation(experiment.seeds[0]).clients
    if count > clients:
        raise InputError(f"num-partitions={count}: the experiment's data has only {clients} clients to host.")
    name = f"partition-{number}"
    return site_of(rehearsal(experiment, name, range(number, clients, count)), app / name)


class PayloadConnection(Connection):
    """An agent's connection that reads and writes payloads instead of HTTP."""

    def __init__(self) -> None:
        self.reset(Payload({}))

    def reset(self, payload: Payload) -> None:
        self.payload = payload
        self.hello: Hello | None = None
        self.answers: list[bytes] = []
        self.failures: list[Failure] = []

    def close(self) -> None:
        """Do nothing: there is no connection."""

    def post(self, path: str, message: BaseModel | Parcel) -> Any:
        if isinstance(message, Hello):
            self.hello = message
        elif isinstance(message, Parcel):
            self.answers.append(message.whole)
        elif isinstance(message, Failure):
            self.failures.append(message)
        return {"beat": 1.0, "results": []}

    @contextmanager
    def stream(self, path: str) -> Iterator[Any]:
        """Yield what the coordinator would send: an assignment with its tensors, or initial weights."""
        if path.startswith("/v1/work"):
            ask = self.payload.header["ask"]
            needed = {part["sha256"]: self.payload.bodies[part["sha256"]] for part in ask["parts"]}
            header = json.dumps({**ask, "missing": list(needed)}).encode()
            yield _Reply([len(header).to_bytes(4, "little"), header, *needed.values()])
        else:
            yield _Reply([self.payload.bodies[path.rpartition("/")[2]]])


class _Reply:
    """The parts of an HTTP reply that an agent reads."""

    status_code = 200

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces
        self.headers = {"content-length": str(sum(len(piece) for piece in pieces))}

    def iter_raw(self) -> Iterator[bytes]:
        return iter(self.pieces)


class Worker:
    """Answers payloads with the data of one site."""

    def __init__(self, site: Site, state: Path, tell: Callable[[str], None] = print) -> None:
        self.site, self.state = site, state
        self.connection = PayloadConnection()
        self.agent = Agent(site, state, tell=tell, connection=self.connection)

    def answer(self, payload: Payload) -> Payload:
        """Return this site's answer to a plan or to an assignment."""
        self.connection.reset(payload)
        try:
            with machine.computing():
                if "plan" in payload.header:
                    return self._hello(payload.header["plan"])
                self._perform(payload)
        except Exception as error:  # models, data and disks raise all kinds; both sides show them
            if not isinstance(error, FedloomError):
                self.agent.tell(f"error: {traceback.format_exc()}")
            return Payload({"failure": error_summary(error)})
        failures = [failure.model_dump(mode="json") for failure in self.connection.failures]
        return Payload(
            {"failures": failures}, {str(number): body for number, body in enumerate(self.connection.answers)}
        )

    def _perform(self, payload: Payload) -> None:
        for why in payload.header.get("rejected", []):
            self.agent.tell(f"The ServerApp rejected an answer ({why})")
            self.agent.audit.write("rejected", why=why)
        self._prepare_run(str(payload.header["run"]))
        assignment = self.agent.parcels.next_assignment(self.connection)
        assert not isinstance(assignment, str)
        self.agent.carry_out(assignment)
        assert self.agent.runner is not None
        self.agent.runner.states.remember()

    def _hello(self, offer: Mapping[str, Any]) -> Payload:
        self.agent.prepare(offer)
        assert self.connection.hello is not None
        write_private(self._plan_file(str(offer["run"])), json.dumps(offer).encode())
        hello = self.connection.hello.model_dump(mode="json")
        return Payload({"hello": hello, "name": self.site.name, "key": self.agent.signer.public})

    def _prepare_run(self, run: str) -> None:
        """Prepare this run. A process that just started reads the plan from its disk."""
        runner = self.agent.runner
        if runner is not None and runner.experiment.run_plan["run"] == run:
            return
        try:
            offer = json.loads(self._plan_file(run).read_text())
        except (OSError, ValueError):
            raise InputError(
                f"{self.site.name} got work of an unknown run: its state folder {self.state} was moved or deleted."
            ) from None
        self.agent.prepare(offer)

    def _plan_file(self, run: str) -> Path:
        if not run.isalnum():
            raise InputError("The run has no valid name.")
        return self.state / "plans" / f"{run}.json"


def serve(worker: Worker, tell: Callable[[str], None], data: str = "") -> None:
    """Answer ClientApps of this machine and user, one after the other, until the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="fedloom-"))  # a short path: sockets allow about a hundred characters
    secret = secrets.token_bytes(32)
    try:
        with Listener(str(folder / "worker"), family="AF_UNIX", authkey=secret) as listener:
            address = {"socket": str(folder / "worker"), "secret": secret.hex(), "data": data}
            write_private(worker.state / ADDRESS, json.dumps(address).encode())
            tell(f"Ready for the SuperNode of {worker.site.name}; state in {worker.state}.")
            while True:
                try:
                    with listener.accept() as connection:
                        worker.answer(Payload.receive(connection)).send(connection)
                except (OSError, EOFError, AuthenticationError, ValueError) as error:
                    tell(f"A ClientApp disconnected: {type(error).__name__}.")
    finally:
        (worker.state / ADDRESS).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
