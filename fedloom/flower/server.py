"""The ServerApp: fedloom's engine, with the cohort's verbs as messages over Flower's Grid."""

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
from fedloom.flower.messages import Letter, NoLetter
from fedloom.flower.paths import default_folder
from fedloom.network.coordinator.calls import MISSED, Call, Hub
from fedloom.network.coordinator.http_api import welcome
from fedloom.network.coordinator.intake import Intake
from fedloom.network.coordinator.ledger import Ledger
from fedloom.network.coordinator.request_body import Body, TooLarge
from fedloom.network.coordinator.session import Session
from fedloom.network.coordinator.update_checks import Rejected
from fedloom.network.protocol.messages import Failure, Hello

PAUSE = 0.25  # seconds between two looks for answers
LOOK = 1.0  # and for nodes that came or went
AGAIN = 120.0  # a node that could not be made ready is asked again after this
AWAY = 30.0  # a node that is gone for so long is not waited for if the round can do without it
GRACE = 5.0  # a message lives this much longer than its round, so that nobody works on old ones


@dataclass(frozen=True)
class Sent:
    """A message that waits for its reply."""

    node: int
    ask: str = ""  # empty: it was asked who it is
    clients: tuple[int, ...] = ()


class GridHub(Hub):
    """A hub whose agents are SuperNodes. Everything happens in the engine's thread, while it waits."""

    def __init__(self, ledger: Ledger, tell: Callable[[str], None], deadline: float, grid: Grid) -> None:
        super().__init__(ledger, tell, deadline)
        self.grid, self.intake = grid, Intake(self)
        self.nodes: dict[str, int] = {}  # agent → Flower's number of its node
        self.here: set[int] = set()  # nodes that are connected to the SuperLink
        self.greeted: set[int] = set()  # those that were asked who they are
        self.failed: dict[int, float] = {}  # node → when it could not be made ready
        self.sent: dict[str, Sent] = {}  # message → what it asks
        self.told: set[tuple[str, int]] = set()  # ask and node
        self.verdicts: dict[str, list[str]] = {}  # agent → why answers of its clients did not count
        self._looked = 0.0

    # --- called by the engine

    def ask(self, call: Call) -> None:
        super().ask(call)
        self._looked = 0.0  # adding up may have taken long: who is there now?
        self._turn()

    def end(self, words: str) -> None:
        self.finished = words  # nodes wait for messages: there is nobody to be told

    def pause(self, seconds: float) -> None:
        time.sleep(min(seconds, PAUSE))
        self._turn()

    def _turn(self) -> None:
        if time.monotonic() - self._looked >= LOOK:
            self._look()
            self._looked = time.monotonic()
        self._send_asks()
        for reply in self.grid.pull_messages(list(self.sent)) if self.sent else ():
            sent = self.sent.pop(reply.metadata.reply_to_message_id, None)
            if sent is not None:
                self._take(sent, reply)

    # --- nodes

    def _look(self) -> None:
        """Who is connected to the SuperLink; new ones are told the plan."""
        now = time.monotonic()
        self.here = set(self.grid.get_node_ids())
        self.greeted &= self.here  # whoever leaves and comes back may have been restarted
        for node in [node for node, when in self.failed.items() if now - when > AGAIN]:
            self.greeted.discard(node)
            del self.failed[node]
        for agent, node in self.nodes.items():  # the SuperLink knows who is there: that is the only sign of life
            connection = self.connections[agent]
            connection.beat = math.inf if node in self.here else AWAY / MISSED
            if node in self.here:
                self.seen(agent, connection.name)
        new = sorted(self.here - self.greeted)
        if new:
            letter = Letter({"plan": self.offer}, {sha: path.read_bytes() for sha, path in self.lasting.items()})
            self._push([(Sent(node), letter, "query", None) for node in new])
            self.greeted.update(new)

    def _greet(self, node: int, letter: Letter) -> None:
        """A node said who it is and what it has."""
        try:
            if "failure" in letter.header:
                raise InputError(str(letter.header["failure"])[:2000])
            hello = Hello.model_validate(letter.header.get("hello"))
            name, key = str(letter.header.get("name")), str(letter.header.get("key"))
            if not 0 < len(name) <= 64 or not name.isprintable() or len(bytes.fromhex(key)) != 32:
                raise InputError("its name or its key is not valid")
            token = hashlib.sha256(secrets.token_bytes(16)).hexdigest()
            self.ledger.invite(token)
            agent = self.ledger.enrol(token, name, key.lower())
            connection = self.seen(agent, name)
            welcome(self, connection, hello)
            self.nodes[agent] = node  # the newest counts: a SuperNode that restarts may have another number
            self.told = {(ask, other) for ask, other in self.told if other != node}
        except (InputError, ValidationError, ValueError) as error:
            self.failed[node] = time.monotonic()
            self.log("denied", f"node {node} does not take part: {_first_line(error)}")

    # --- asks and answers

    def _send_asks(self) -> None:
        call = self.call
        if call is None:
            return
        messages = []
        for agent in call.asks:
            node, found = self.nodes.get(agent), self.next_ask(agent)
            if node not in self.here or found is None or (found[0].id, node) in self.told:
                continue
            ask = found[0]
            header = {
                "run": self.offer["run"],
                "ask": ask.model_dump(mode="json"),
                "rejected": self.verdicts.pop(agent, []),
            }
            letter = Letter(header, {part.sha256: call.parts[part.sha256].whole for part in ask.parts})
            self.told.add((ask.id, node))
            call.sent[agent] = call.sent.get(agent, 0) + letter.size
            kind = "train" if ask.kind == "train" else "evaluate"
            messages.append((Sent(node, ask.id, tuple(one.client for one in ask.clients)), letter, kind, ask.seconds))
        self._push(messages)

    def _push(self, messages: Sequence[tuple[Sent, Letter, str, float | None]]) -> None:
        made = [
            Message(
                letter.content(),
                sent.node,
                kind,
                ttl=None if seconds is None else seconds + GRACE,
                group_id=sent.ask,
            )
            for sent, letter, kind, seconds in messages
        ]
        for number, (sent, *_) in zip(self.grid.push_messages(made) if made else (), messages, strict=True):
            if number:
                self.sent[number] = sent

    def _take(self, sent: Sent, reply: Message) -> None:
        agent = next((agent for agent, node in self.nodes.items() if node == sent.node), None)
        try:
            if reply.has_error():
                raise NoLetter(f"its ClientApp failed: {reply.error.reason}")
            letter = Letter.read(reply.content)
        except NoLetter as why:
            letter = Letter({"failure": str(why)})
        if not sent.ask:
            self._greet(sent.node, letter)
        elif agent is not None:
            self._answered(agent, sent, letter)

    def _answered(self, agent: str, sent: Sent, letter: Letter) -> None:
        try:
            failures = [Failure.model_validate(one) for one in letter.header.get("failures", [])]
            if "failure" in letter.header:
                raise NoLetter(str(letter.header["failure"])[:2000])
        except (NoLetter, ValidationError, TypeError) as error:
            failures = [Failure(ask=sent.ask, clients=sent.clients, kind="error", message=str(error)[:2000])]
        for failure in failures:
            self.fail(agent, failure)
        for body in letter.bodies.values():
            arrived = Body(self.ledger.updates / f"{secrets.token_hex(8)}.part", self.largest)
            try:
                arrived.add(body)
                found = self.intake.receive_now(agent, arrived, hashlib.sha256(body).hexdigest())
                told = [f"client {one['client']}, {one['code']}: {one['message']}" for one in found if "code" in one]
                self.verdicts.setdefault(agent, []).extend(told)
            except TooLarge:
                self._refuse(agent, sent, f"too-large: an answer may have {self.largest} bytes")
            except Rejected as why:
                self._refuse(agent, sent, f"{why.code}: {why}")
            finally:
                arrived.discard()

    def _refuse(self, agent: str, sent: Sent, why: str) -> None:
        self.fail(agent, Failure(ask=sent.ask, clients=sent.clients, kind="refused", message=why))


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "it does not say why")


class Fleet(Session):
    """A session whose messages Flower carries."""

    def __init__(
        self, experiment: experiment_file.Experiment, folder: Path, grid: Grid, tell: Callable[[str], None]
    ) -> None:
        self.grid = grid
        super().__init__(experiment, folder, tell)

    def _hub(self, deadline: float) -> Hub:
        return GridHub(self.ledger, self.tell, deadline, self.grid)

    @contextlib.contextmanager
    def _carrying(self) -> Iterator[None]:
        self.tell("Without secure aggregation, the ServerApp can read each site's update, and so can the SuperLink.")
        yield


def server_app(app: Path) -> ServerApp:
    """The ServerApp of an app's folder."""
    made = ServerApp()

    @made.main()
    def main(grid: Grid, context: Context) -> None:
        run(app, grid, context.run_config)

    return made


def run(app: Path, grid: Grid, config: Any) -> None:
    """Run the app's experiment, or go on with it."""

    def tell(text: str) -> None:
        print(text, flush=True)

    try:
        changes = {"rounds": config["rounds"]} if config.get("rounds") else {}
        experiment = experiment_file.load(app / "experiment.toml", changes)
        folder = Path(str(config.get("out") or default_folder() / "runs" / experiment.name)).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        session = Fleet(experiment, folder, grid, tell)
        result = session.run(Lines())
        for one in result.runs:
            tell(f"{one.algorithm} (seed {one.seed}): {one.status} after {one.rounds} rounds, {one.weights_sha256}")
        tell(f"Results: {folder}")
        tell(f"Report: {result.report()}")
    except FedloomError as error:
        tell(f"error: {error}")
        raise
