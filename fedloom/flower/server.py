"""The ServerApp: fedloom's engine, which sends the cohort's verbs as messages over Flower's Grid."""

from __future__ import annotations

import contextlib
import hashlib
import math
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.serverapp import Grid, ServerApp
from pydantic import ValidationError

from fedloom.errors import FedloomError, InputError
from fedloom.experiment import experiment_file
from fedloom.experiment.progress import Lines
from fedloom.flower.app import check_app
from fedloom.flower.messages import InvalidPayload, Payload
from fedloom.flower.paths import default_folder
from fedloom.network.coordinator.agent_pool import AgentPool, Call
from fedloom.network.coordinator.connected_agent import MISSED
from fedloom.network.coordinator.intake import Intake
from fedloom.network.coordinator.ledger import Ledger
from fedloom.network.coordinator.network_run import NetworkRun
from fedloom.network.coordinator.request_guard import RequestBody
from fedloom.network.protocol.messages import Failure, Hello
from fedloom.network.protocol.rejection import Rejected

POLL_SECONDS = 0.25  # between two checks for replies
NODE_POLL_SECONDS = 1.0  # between two checks for new and lost nodes
RETRY_SECONDS = 120.0  # until a node that failed to prepare is asked again
ABSENT_SECONDS = 30.0  # until a round stops waiting for a disconnected node, if its quorum allows
EXTRA_SECONDS = 5.0  # that a message outlives its round; then no node works on it any more


@dataclass(frozen=True)
class PendingMessage:
    """A message whose reply has not arrived."""

    node: int
    ask: str = ""  # empty for the first message, which asks for name and data
    clients: tuple[int, ...] = ()


class GridPool(AgentPool):
    """A pool whose agents are SuperNodes. Everything happens in the engine's thread while it waits."""

    def __init__(self, ledger: Ledger, tell: Callable[[str], None], deadline: float, grid: Grid) -> None:
        super().__init__(ledger, tell, deadline)
        self.grid, self.intake = grid, Intake(self)
        self.nodes: dict[str, int] = {}  # agent → Flower's number of its node
        self.connected: set[int] = set()  # nodes that are connected to the SuperLink
        self.introduced: set[int] = set()  # nodes that got the plan
        self.failed: dict[int, float] = {}  # node → when it failed to prepare
        self.sent: dict[str, PendingMessage] = {}  # by message number
        self.delivered: set[tuple[str, int]] = set()  # assignment and node
        self.rejections: dict[str, list[str]] = {}  # agent → why answers of its clients were rejected
        self._nodes_updated = 0.0

    # --- called by the engine

    def open(self, call: Call) -> None:
        super().open(call)
        self._nodes_updated = 0.0  # aggregation may have taken long: check the nodes again
        self._exchange()

    def finish(self, words: str) -> None:
        self.finished = words  # nodes wait for messages, so there is nothing to send

    def pause(self, seconds: float) -> None:
        time.sleep(min(seconds, POLL_SECONDS))
        self._exchange()

    def _exchange(self) -> None:
        if time.monotonic() - self._nodes_updated >= NODE_POLL_SECONDS:
            self._update_nodes()
            self._nodes_updated = time.monotonic()
        self._send_assignments()
        for reply in self.grid.pull_messages(list(self.sent)) if self.sent else ():
            sent = self.sent.pop(reply.metadata.reply_to_message_id, None)
            if sent is not None:
                self._receive(sent, reply)

    # --- nodes

    def _update_nodes(self) -> None:
        """Update the connected nodes, and send the plan to new ones."""
        now = time.monotonic()
        self.connected = set(self.grid.get_node_ids())
        self.introduced &= self.connected  # a node that comes back may have been restarted
        for node in [node for node, when in self.failed.items() if now - when > RETRY_SECONDS]:
            self.introduced.discard(node)
            del self.failed[node]
        for agent, node in self.nodes.items():  # the SuperLink's list is the only sign of life
            connection = self.agents[agent]
            connection.heartbeat = math.inf if node in self.connected else ABSENT_SECONDS / MISSED
            if node in self.connected:
                self.mark_seen(agent, connection.name)
        new = sorted(self.connected - self.introduced)
        if new:
            weights = {sha: path.read_bytes() for sha, path in self.initial_weights.items()}
            payload = Payload({"plan": self.run_plan}, weights)
            self._send([(PendingMessage(node), payload, "query", None) for node in new])
            self.introduced.update(new)

    def _add_node(self, node: int, payload: Payload) -> None:
        """Add a node that sent its name, key and data."""
        try:
            if "failure" in payload.header:
                raise InputError(str(payload.header["failure"])[:2000])
            hello = Hello.model_validate(payload.header.get("hello"))
            name, key = str(payload.header.get("name")), str(payload.header.get("key"))
            if not 0 < len(name) <= 64 or not name.isprintable() or len(bytes.fromhex(key)) != 32:
                raise InputError("its name or its key is not valid")
            token = hashlib.sha256(secrets.token_bytes(16)).hexdigest()
            self.ledger.invite(token)
            agent = self.ledger.enrol(token, name, key.lower())
            connection = self.mark_seen(agent, name)
            self.admit(connection, hello)
            self.nodes[agent] = node  # the newest counts: a restarted SuperNode may have another number
            self.delivered = {(ask, other) for ask, other in self.delivered if other != node}
        except (InputError, ValidationError, ValueError) as error:
            self.failed[node] = time.monotonic()
            self.log("denied", f"node {node} cannot take part: {_first_line(error)}")

    # --- assignments and answers

    def _send_assignments(self) -> None:
        call = self.call
        if call is None:
            return
        messages = []
        for agent in call.assignments:
            node, found = self.nodes.get(agent), self.next_assignment(agent)
            if node not in self.connected or found is None or (found[0].id, node) in self.delivered:
                continue
            assignment = found[0]
            header = {
                "run": self.run_plan["run"],
                "ask": assignment.model_dump(mode="json"),
                "rejected": self.rejections.pop(agent, []),
            }
            payload = Payload(header, {part.sha256: call.parcels[part.sha256].whole for part in assignment.parts})
            self.delivered.add((assignment.id, node))
            call.sent[agent] = call.sent.get(agent, 0) + payload.size
            kind = "train" if assignment.kind == "train" else "evaluate"
            pending = PendingMessage(node, assignment.id, tuple(one.client for one in assignment.clients))
            messages.append((pending, payload, kind, assignment.seconds))
        self._send(messages)

    def _send(self, messages: Sequence[tuple[PendingMessage, Payload, str, float | None]]) -> None:
        made = [
            Message(
                payload.to_record(),
                sent.node,
                kind,
                ttl=None if seconds is None else seconds + EXTRA_SECONDS,
                group_id=sent.ask,
            )
            for sent, payload, kind, seconds in messages
        ]
        for number, (sent, *_) in zip(self.grid.push_messages(made) if made else (), messages, strict=True):
            if number:
                self.sent[number] = sent

    def _receive(self, sent: PendingMessage, reply: Message) -> None:
        agent = next((agent for agent, node in self.nodes.items() if node == sent.node), None)
        try:
            if reply.has_error():
                raise InvalidPayload(f"its ClientApp failed: {reply.error.reason}")
            payload = Payload.from_record(reply.content)
        except InvalidPayload as why:
            payload = Payload({"failure": str(why)})
        if not sent.ask:
            self._add_node(sent.node, payload)
        elif agent is not None:
            self._handle_reply(agent, sent, payload)

    def _handle_reply(self, agent: str, sent: PendingMessage, payload: Payload) -> None:
        try:
            failures = [Failure.model_validate(one) for one in payload.header.get("failures", [])]
            if "failure" in payload.header:
                raise InvalidPayload(str(payload.header["failure"])[:2000])
        except (InvalidPayload, ValidationError, TypeError) as error:
            failures = [Failure(ask=sent.ask, clients=sent.clients, kind="error", message=str(error)[:2000])]
        for failure in failures:
            self.fail(agent, failure)
        for body in payload.bodies.values():
            arrived = RequestBody(self.ledger.updates, self.largest, signed=hashlib.sha256(body).hexdigest())
            try:
                arrived.add(body)
                found = self.intake.receive_now(agent, arrived)
                reasons = [f"client {one['client']}, {one['code']}: {one['message']}" for one in found if "code" in one]
                self.rejections.setdefault(agent, []).extend(reasons)
            except Rejected as why:
                refused = Failure(ask=sent.ask, clients=sent.clients, kind="refused", message=f"{why.code}: {why}")
                self.fail(agent, refused)
            finally:
                arrived.discard()


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "no reason given")


class FlowerRun(NetworkRun):
    """A run whose messages travel over Flower."""

    def __init__(
        self, experiment: experiment_file.Experiment, folder: Path, grid: Grid, tell: Callable[[str], None]
    ) -> None:
        check_app(experiment)
        self.grid = grid
        super().__init__(experiment, folder, tell)

    def _make_pool(self, deadline: float) -> AgentPool:
        return GridPool(self.ledger, self.tell, deadline, self.grid)

    @contextlib.contextmanager
    def _connected(self) -> Iterator[None]:
        self.tell("Without secure aggregation, the ServerApp can read each site's update, and so can the SuperLink.")
        yield


def server_app(app: Path) -> ServerApp:
    """Return the ServerApp of an app's folder."""
    made = ServerApp()

    @made.main()
    def main(grid: Grid, context: Context) -> None:
        run(app, grid, context.run_config)

    return made


def run(app: Path, grid: Grid, config: Any) -> None:
    """Run the app's experiment, or resume it."""

    def tell(text: str) -> None:
        print(text, flush=True)

    try:
        changes = {"rounds": config["rounds"]} if config.get("rounds") else {}
        experiment = experiment_file.load(app / "experiment.toml", changes)
        folder = Path(str(config.get("out") or default_folder() / "runs" / experiment.name)).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        flower_run = FlowerRun(experiment, folder, grid, tell)
        result = flower_run.run(Lines())
        for one in result.runs:
            rounds = f"{one.rounds} round" + ("" if one.rounds == 1 else "s")
            tell(f"{one.algorithm} (seed {one.seed}): {one.status} after {rounds}, {one.weights_sha256}")
        tell(f"Results: {folder}")
        tell(f"Report: {result.report()}")
    except FedloomError as error:
        tell(f"error: {error}")
        raise
