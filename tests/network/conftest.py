"""A coordinator inside the test's process, agents that only speak the protocol, and real processes over TLS."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tomli_w
import torch

from fedloom.algorithm import Update
from fedloom.experiment.experiment_file import parse
from fedloom.network.agent.agent import Agent
from fedloom.network.agent.connection import Connection
from fedloom.network.agent.policy import rehearsal, site_of
from fedloom.network.coordinator.agent_pool import AgentPool, Call
from fedloom.network.coordinator.http_api import make_app
from fedloom.network.coordinator.ledger import Ledger
from fedloom.network.coordinator.network_run import NetworkRun
from fedloom.network.coordinator.update_checks import Limits, check_measured, check_update
from fedloom.network.protocol.expected_update import ExpectedUpdate
from fedloom.network.protocol.messages import (
    AssignedClient,
    Assignment,
    ClientAnswer,
    ClientFacts,
    Heartbeat,
    Hello,
    write_answer,
)
from fedloom.network.protocol.signatures import Signer, Verifier
from fedloom.network.protocol.tensors import Parcel
from fedloom.network.protocol.token import Token
from tests.forked import Forked

MODEL = {"model": {"w": torch.zeros(3), "b": torch.zeros(2, dtype=torch.float64)}}
FORM = ExpectedUpdate({"model": {"w": ((3,), torch.float32), "b": ((2,), torch.float64)}}, {})
HELLO = Hello(
    versions={"torch": "2"},
    features=(4,),
    dtype="float32",
    classes=("a", "b"),
    clients=(ClientFacts(name="c", train=6, validation=2, test=2),),
    data_mark="m",
    setup={},
)

HEARTBEAT = Heartbeat().model_dump_json().encode()


def code(reply: Any) -> str:
    """The code with which the coordinator rejected a request."""
    return str(reply.json()["code"])


class Speaker:
    """An agent that only speaks the protocol."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.signer = Signer(world.folder / f"{name}.key")
        token = Token.new("")
        world.ledger.invite(token.digest)
        self.signer.agent = world.ledger.enrol(token.digest, name, self.signer.public)
        self.signer.session = world.verifier.session

    def send(self, method: str, path: str, body: bytes = b"", *, signs: bytes | None = None, **headers: str) -> Any:
        """A signed request; `signs` is what was signed, if it is not the body itself."""
        signed = self.signer.headers(method, path, hashlib.sha256(body if signs is None else signs).hexdigest())
        return self.world.client.request(method, path, content=body or None, headers={**signed, **headers})

    def connection(self) -> Connection:
        """What a real agent uses, without a port."""
        return in_process(self.world.client, self.signer)

    def hello(self, hello: Hello = HELLO) -> None:
        self.world.pool.admit(self.world.pool.mark_seen(self.signer.agent, self.name), hello)

    def answer(self, client: int = 0, ask: str = "ask", scale: float = 1.0, **changes: Any) -> Parcel:
        groups = {"model": {name: leaf[None] + scale for name, leaf in MODEL["model"].items()}}
        update = changes.pop("update", Update(groups, {"model": torch.tensor([2.0])}))
        return write_answer(ask, [ClientAnswer(client, update, **changes)])


class Requests:
    """Requests to an application in this process, from an address."""

    def __init__(self, app: Any, address: str = "127.0.0.1") -> None:
        self._loop = asyncio.new_event_loop()
        self._app, transport = app, httpx.ASGITransport(app, client=(address, 123))
        self._client = httpx.AsyncClient(transport=transport, base_url="http://coordinator")

    def request(self, method: str, path: str, **more: Any) -> httpx.Response:
        return self._loop.run_until_complete(self._client.request(method, path, **more))

    def get(self, path: str, **more: Any) -> httpx.Response:
        return self.request("GET", path, **more)

    def post(self, path: str, **more: Any) -> httpx.Response:
        return self.request("POST", path, **more)

    def hang_up(self, path: str, headers: dict[str, str], part: bytes) -> None:
        """A POST of which only a part arrives before the connection ends; httpx cannot do that in one process."""
        events = iter([{"type": "http.request", "body": part, "more_body": True}, {"type": "http.disconnect"}])

        async def receive() -> dict[str, Any]:
            return next(events)

        async def send(message: dict[str, Any]) -> None:
            pass

        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
        }
        self._loop.run_until_complete(self._app(scope, receive, send))

    def close(self) -> None:
        self._loop.run_until_complete(self._client.aclose())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()


def in_process(requests: Requests, signer: Signer) -> Connection:
    """An agent's connection to an application in this process."""

    def forward(request: httpx.Request) -> httpx.Response:
        path, content = request.url.raw_path.decode(), request.read()
        reply = requests.request(request.method, path, content=content or None, headers=dict(request.headers))
        return httpx.Response(reply.status_code, headers=reply.headers, stream=httpx.ByteStream(reply.content))

    connection = Connection("http://coordinator", signer, True)
    connection._client = httpx.Client(transport=httpx.MockTransport(forward))
    return connection


class WorkingPool(AgentPool):
    """A pool whose agents work while the engine waits, in the engine's thread."""

    working: tuple[Agent, ...] = ()

    def finish(self, words: str) -> None:
        self.finished = words  # nobody polls, so nobody need be told

    def pause(self, seconds: float) -> None:
        self.changed.release()  # answers are taken in by other threads
        try:
            for agent in self.working:
                if self.next_assignment(agent.signer.agent) is not None:
                    found = agent.next_assignment()
                    if not isinstance(found, str):
                        agent.carry_out(found)
        finally:
            self.changed.acquire()


class InProcessRun(NetworkRun):
    """A run with real agents in the test's process: the same code as over a network, without ports and waiting."""

    def __init__(self, folder: Path, values: dict[str, Any], *policies: dict[str, Any], **edits: Any) -> None:
        self.said: list[str] = []
        self.agents: list[Agent] = []
        experiment = parse({**values, "cohort": {"start_when": len(policies), "deadline": "5s", **edits}})
        clients, sites = values["data"]["partition"]["clients"], len(policies)
        self.tables = [rehearsal(experiment, f"site-{n}", range(n, clients, sites)) for n in range(sites)]
        for table, policy in zip(self.tables, policies, strict=True):
            table["policy"].update(policy)
        super().__init__(experiment, folder, self.said.append)

    def _make_pool(self, deadline: float) -> AgentPool:
        return WorkingPool(self.ledger, self.tell, deadline)

    def agent(self, number: int) -> Agent:
        """The agent of a site, ready to work; enrolled if it is new."""
        state = self.folder.parent / f"state-{number}"
        signer = Signer(state / "agent.key")
        token = Token.new("")
        self.ledger.invite(token.digest)
        signer.agent = self.ledger.enrol(token.digest, f"site-{number}", signer.public)
        site = site_of(self.tables[number], state / "site.toml")
        agent = Agent(site, state, tell=self.said.append, connection=in_process(self.requests, signer))
        agent.signer = signer
        agent.prepare(agent.connection.get("/v1/plan"))
        return agent

    @contextlib.contextmanager
    def _connected(self) -> Iterator[None]:
        self.requests = Requests(make_app(self.pool))
        try:
            assert isinstance(self.pool, WorkingPool)
            self.agents = [self.agent(number) for number in range(len(self.tables))]
            self.pool.working = tuple(self.agents)
            yield
        finally:
            self.requests.close()


class World:
    """A coordinator in this process, without a port."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said: list[str] = []
        self.ledger = Ledger(folder / "network")
        self.pool = AgentPool(self.ledger, self.said.append)
        self.verifier, self.operator = Verifier(), Token.new("")
        self.client = Requests(make_app(self.pool, b"", self.verifier, self.operator.digest))

    def elsewhere(self, address: str) -> Requests:
        """Requests from another address."""
        return Requests(self.client._app, address)

    def speaker(self, name: str = "kerry") -> Speaker:
        return Speaker(self, name)

    def open_call(self, *speakers: Speaker, clients: int = 1, limits: Limits = Limits(), seconds: float = 60.0) -> Call:
        """Ask every speaker for its clients: the first has 0 … clients − 1, the next those after them."""
        asks = {}
        for number, speaker in enumerate(speakers):
            numbers = range(number * clients, (number + 1) * clients)
            asked = tuple(AssignedClient(client=one, local=one) for one in numbers)
            asks[speaker.signer.agent] = Assignment(
                id="ask",
                kind="train",
                verb="reduce",
                label="fedavg",
                seed=1,
                round=1,
                attempt=1,
                cohort=len(speakers) * clients,
                population=len(speakers) * clients,
                clients=asked,
            )

        def check(ask: Assignment, answer: Any) -> None:
            check_update(answer, FORM, MODEL, limits)
            check_measured(answer.measured, ask.splits, {}, {})

        call = Call("a test", asks, {}, check, time.monotonic() + seconds, ledger_key=("fedavg-1", 1, 0, "digest"))
        self.pool.open(call)
        return call


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.client.close()
    made.ledger.close()


# --- real processes

EXPERIMENT: dict[str, Any] = {
    "name": "net",
    "rounds": 4,
    "data": {"source": "digits", "partition": {"name": "iid", "clients": 4}},
    "task": {"model": "digits_mlp"},
    "evaluate": {"every": 2},
    "algorithm": {"fedavg": {}},
    "run": {"backend": "serial"},
}


def write_toml(path: Path, values: dict[str, Any]) -> Path:
    path.write_text(tomli_w.dumps(values))
    return path


def start(*arguments: str | Path, cwd: Path, env: dict[str, str] | None = None, log: str = "log.txt") -> Forked:
    """A fedloom process; what it says goes to a file."""
    return Forked([str(one) for one in arguments], cwd, env or {}, cwd / log, cwd / log)


def wait_for(condition: Callable[[], Any], seconds: float = 300.0) -> Any:
    """What the condition gives as soon as it gives something."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = condition()
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError("what was waited for did not happen")


def said(folder: Path, pattern: str, log: str = "log.txt") -> re.Match[str] | None:
    path = folder / log
    return re.search(pattern, path.read_text(errors="replace")) if path.exists() else None


def weights(folder: Path) -> dict[str, str | None]:
    """The fingerprint of every cell of a run."""
    from fedloom.results.result import Result

    return {f"{run.algorithm}-{run.seed}": run.weights_sha256 for run in Result.read(folder).runs}


def serial_weights(values: dict[str, Any], folder: Path) -> dict[str, str | None]:
    """The same by the serial backend, in this process."""
    from fedloom.experiment.plan import Plan
    from fedloom.experiment.run import run_plan

    run_plan(Plan.of(parse(values)), folder)
    return weights(folder)


class Federation:
    """A coordinator's process and agents' processes that outlive it, all over TLS on this machine."""

    def __init__(self, folder: Path, values: dict[str, Any], agents: int = 2, port: int | None = None) -> None:
        self.folder, self.agents = folder, agents
        self.values = {**values, "cohort": {"start_when": agents, "deadline": "30s", **values.get("cohort", {})}}
        self.file = write_toml(folder / "experiment.toml", self.values)
        self.port = port or free_port()
        self.url = f"https://127.0.0.1:{self.port}"
        self.out = folder / "run"
        self.coordinator: Forked | None = None
        self.processes: dict[int, Forked] = {}

    def serve(self, **env: str) -> Forked:
        listen = f"127.0.0.1:{self.port}"
        self.coordinator = start("serve", self.file, "--listen", listen, "--out", self.out, cwd=self.folder, env=env)
        return self.coordinator

    def tokens(self) -> list[Path]:
        def made() -> list[Path] | None:
            found = sorted((self.out / "network" / "tokens").glob("*.token"))
            return found if len(found) >= self.agents else None

        found: list[Path] = wait_for(made)
        return found

    def site(self, number: int, compress: bool = False, **tables: Any) -> Path:
        clients = int(self.values["data"]["partition"]["clients"])
        hosts = list(range(number, clients, self.agents))
        site = {"name": f"site-{number}", "hosts": hosts, "compress": compress}
        values = {"site": site, "data": self.values["data"], **tables}
        return write_toml(self.folder / f"site-{number}.toml", values)

    def join(self, number: int, url: str | None = None, **env: str) -> Forked:
        site = self.folder / f"site-{number}.toml"
        if not site.exists():
            self.site(number)
        state = self.folder / f"site-{number}-state"
        token = [] if (state / "coordinator.json").exists() else ["--token-file", self.tokens()[number]]
        process = start(
            "join",
            url or self.url,
            "--site",
            site,
            "--wait",
            *token,
            cwd=self.folder,
            env=env,
            log=f"site-{number}.txt",
        )
        self.processes[number] = process
        return process

    def finish(self, seconds: float = 300.0) -> int:
        assert self.coordinator is not None
        return self.coordinator.wait(timeout=seconds)

    def stop(self) -> None:
        for process in [*self.processes.values(), *([self.coordinator] if self.coordinator else [])]:
            if process.poll() is None:
                process.kill()
            process.wait()

    def log(self) -> str:
        return (self.folder / "log.txt").read_text(errors="replace")


def free_port() -> int:
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Callable[..., Federation]]:
    made: list[Federation] = []

    def make(values: dict[str, Any] = EXPERIMENT, agents: int = 2) -> Federation:
        made.append(Federation(tmp_path, values, agents))
        return made[-1]

    yield make
    for one in made:
        one.stop()


def audit(folder: Path, number: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"site-{number}-state" / "audit.jsonl").read_text().splitlines()]
