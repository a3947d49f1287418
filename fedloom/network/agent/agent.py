"""The agent: a long-lived process where the data lives. It polls for work, does what its site allows, and answers."""

from __future__ import annotations

import contextlib
import hashlib
import random
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fedloom import faults, machine
from fedloom.errors import FedloomError, InputError, StoreError, Unwanted
from fedloom.experiment.description import identity
from fedloom.network.agent.assignment_runner import AssignmentRunner
from fedloom.network.agent.audit_log import AuditLog
from fedloom.network.agent.connection import Connection
from fedloom.network.agent.disclosure import answer_facts, assignment_facts, error_summary
from fedloom.network.agent.enrolment import registered, repin
from fedloom.network.agent.loaded_experiment import load_experiment
from fedloom.network.agent.parcel_cache import NoRoom, ParcelCache
from fedloom.network.agent.policy import Refused, Site, trust
from fedloom.network.agent.privacy_ledger import SPENDING, SitePrivacy
from fedloom.network.agent.questions import Questions
from fedloom.network.agent.secure_sessions import PinnedKeys, SecureSessions, fingerprint
from fedloom.network.agent.state_versions import StateVersions
from fedloom.network.agent.unsigned_requests import NEVER_REACHED, NotConnected, Unreachable, tls
from fedloom.network.protocol.messages import (
    AssignedClient,
    Assignment,
    ClientAnswer,
    Failure,
    Heartbeat,
    write_answer,
)
from fedloom.network.protocol.rejection import Rejected
from fedloom.network.protocol.signatures import Signer
from fedloom.network.protocol.verbs import SECURE_KINDS
from fedloom.results.safe_text import plain

PATIENCE = 120.0  # seconds that an agent tries to reach its coordinator, unless it runs with --wait
TWICE_PATIENCE = 30.0  # seconds that an agent waits for another process with its key to end
DISK_PATIENCE = 20.0  # seconds that a full disk may hold up a round: then this site is left out of it


class Agent:
    """The process of one site."""

    def __init__(
        self,
        site: Site,
        state: Path,
        *,
        wait: bool = False,
        tell: Callable[[str], None] = print,
        connection: Connection | None = None,  # instead of one to a coordinator's port
    ) -> None:
        self.site, self.state, self.wait, self.tell = site, state, wait, tell
        self.signer, self.pins = Signer(state / "agent.key"), ""
        self.connection = connection or self._connect()
        self.heartbeat_connection = connection or self._connect()
        self.audit = AuditLog(state / "audit.jsonl", self.signer)
        self.parcels = ParcelCache(state / "tensors")
        self.runner: AssignmentRunner | None = None
        self.doing = "idle"
        self.heartbeat_seconds = 3.0
        self.finished = ""  # why there is no more work
        self._finished_heartbeat = ""  # the same, as the last heartbeat's reply says
        self._asked = self._unwanted = ""  # ids of assignments: the current one, and one whose round is closed
        self._full_since: dict[str, float] = {}  # since when some kind of file could not be written
        self._stop = threading.Event()

    def _connect(self) -> Connection:
        known = registered(self.state)
        self.signer.agent, self.pins = known["agent"], known["authority"]
        return Connection(known["url"], self.signer, tls(known["authority"]), self.site.table.compress)

    def run(self) -> str:
        """Work until the coordinator says that the run is over, through restarts of either side; return its words."""
        machine.prepare_process()
        pulse = threading.Thread(target=self._heartbeats, daemon=True)
        pulse.start()
        silent_since: float | None = None
        pause, advice = 0.1, NEVER_REACHED
        try:
            while not self.finished:
                try:
                    self._finished_heartbeat = ""
                    plan, advice = self.connection.get("/v1/plan"), ""
                    self.prepare(plan)
                    if silent_since is not None:
                        self.tell("The coordinator answers again.")
                    silent_since, pause = None, 0.1
                    self._work()
                    if self.finished and self.wait:
                        self.tell(f"{self.finished} Waiting for more work.")
                        self.finished = ""
                        self._stop.wait(5.0)
                except (Unreachable, StoreError) as error:
                    if self._finished_heartbeat and not self.wait:
                        self.finished = self._finished_heartbeat
                        break
                    if silent_since is None:
                        silent_since = time.monotonic()
                        hint = advice if isinstance(error, NotConnected) else ""
                        self.tell(f"{error}{hint} Trying again …")
                    if isinstance(error, StoreError) and time.monotonic() - silent_since > DISK_PATIENCE:
                        with contextlib.suppress(Unreachable):
                            self._decline("error", "its disk cannot be written")
                    if not self.wait and time.monotonic() - silent_since > PATIENCE:
                        raise
                    self._stop.wait(pause * random.uniform(0.5, 1.0))
                    pause = min(pause * 1.5, 3.0)
                except Rejected as error:
                    if error.code == "twice":  # a process that was killed counts as lost after some heartbeats
                        silent_since = silent_since or time.monotonic()
                        if time.monotonic() - silent_since < TWICE_PATIENCE:
                            self._stop.wait(1.0)
                            continue
                    if error.code != "hello":
                        raise InputError(f"The coordinator rejects this agent ({error.code}): {error}") from None
        finally:
            self._stop.set()
            pulse.join(timeout=5.0)  # a thread at work while the process ends would crash it
            self.connection.close()
        return self.finished

    # --- getting ready

    def prepare(self, run_plan: Mapping[str, Any]) -> None:
        """Refuse the coordinator's plan, or load what it needs and say hello."""
        before = self.runner
        if before is None or {**before.experiment.run_plan, "data": None} != {**run_plan, "data": None}:
            self.doing = "getting ready"
            self.runner = self._load(run_plan)
        assert self.runner is not None
        hello = self.runner.experiment.hello
        left = ["versions", "names of clients and classes", "shape of the data", "hash of how rows are prepared"]
        left += ["mark of the data", "how it computes", "fewest clients in a sum", "withheld metrics"]
        left += ["sizes of the splits"] if self.runner.experiment.plan.privacy.secure_aggregation is None else []
        left += ["SCORES AND LABELS OF SINGLE EXAMPLES, with every measurement"] if hello.sends_scores else []
        self._log("hello", run=run_plan["run"], left=left, clients=len(hello.clients))
        self.heartbeat_seconds = float(self.connection.post("/v1/hello", hello)["beat"])
        self.doing = "idle"

    def _load(self, run_plan: Mapping[str, Any]) -> AssignmentRunner:
        try:
            fetch = partial(self.parcels.fetch, self.connection)
            spending = self.state / SPENDING
            loaded = load_experiment(run_plan, self.site, fetch, self.signer.mark, self.tell, spending)
        except Refused as why:
            raise self._stay_out("refused", str(why), why.told) from None
        except (Unreachable, Rejected):
            raise
        except FedloomError as error:
            self.tell(f"error: {error}")
            message = "its data or model could not be loaded; its own console says why"
            raise self._stay_out("error", message, message) from None
        replaced = bool(registered(self.state).get("replaced"))
        states = StateVersions(self.state / "own" / str(run_plan["run"]), replaced)
        run, policy = str(run_plan["run"]), self.site.policy
        questions = Questions(run, loaded.plan, policy.max_evaluations, self.audit.events())
        pins = PinnedKeys(self.state / "peers.json", policy.peers)
        sessions = SecureSessions(run, loaded.plan, policy, self.signer, pins)
        sessions.recall(self.audit.events())
        self.tell(trust(loaded.plan.privacy, policy, len(loaded.plan.algorithms)))
        if not loaded.plan.privacy.hides_metrics:
            self.tell(f"Each client here is measured at most {questions.most} times in this run, on one split each.")
        if loaded.plan.privacy.secure_aggregation is not None:
            self.tell(f"The fingerprint of this site, for [policy] peers of others: {fingerprint(self.signer.public)}")
        announced = identity({"plan": loaded.plan.resolved, "sources": run_plan["sources"]})
        privacy = SitePrivacy(spending, run, loaded.plan, policy, announced)
        return AssignmentRunner(loaded, policy, self.parcels, states, questions, sessions, privacy, self._go_on)

    def _stay_out(self, kind: Any, why: str, told: str) -> InputError:
        """Tell the coordinator that this site does not take part; return the error to raise."""
        self._log("refused", why=why)
        self._decline(kind, told)
        return InputError(f"This site does not take part: {why}.")

    def _decline(self, kind: Any, why: str) -> None:
        self.connection.post("/v1/failures", Failure(kind=kind, message=why))

    # --- work

    def _work(self) -> None:
        while not self._stop.is_set():
            found = self.next_assignment()
            if isinstance(found, str):
                if found:
                    self.finished = found
                    return
                continue
            faults.point("agent.asked")
            self.carry_out(found)

    def next_assignment(self) -> Assignment | str:
        """Wait for work. A string means that the run is over, an empty one: ask again."""
        try:
            found = self.parcels.next_assignment(self.connection)
        except NoRoom as error:
            if not self._may_wait("tensors", error):
                self._report(error.assignment, error.assignment.clients, "error", str(error))
            return ""
        self._full_since.pop("tensors", None)
        return found

    def carry_out(self, assignment: Assignment) -> None:
        """Do an assignment, or report why not. Clients train one after another, each with its own answer."""
        self.doing = f"{assignment.kind} in round {assignment.round} of {assignment.label}"
        self._asked, self._unwanted = assignment.id, ""
        runner, end = self.runner, time.monotonic() + assignment.seconds
        assert runner is not None

        def write(attempt: Callable[[], None]) -> None:
            self._retry(attempt, "state", end - time.monotonic())

        def train(one: AssignedClient) -> bool:
            return self._attempt(assignment, (one,), partial(runner.train, assignment, one, write))

        if assignment.kind in SECURE_KINDS:
            self._attempt(assignment, assignment.clients, partial(runner.secure, assignment))
        elif assignment.kind != "train":
            self._attempt(assignment, assignment.clients, partial(runner.evaluate, assignment))
        elif not all(train(one) for one in assignment.clients):
            label = plain(assignment.label)
            self.tell(f"Round {assignment.round} of {label} ended before all clients here had answered.")
        self.doing, self._asked = "idle", ""

    def _go_on(self) -> None:
        """Raise `Unwanted` if the coordinator has closed the round that this agent works for."""
        if self._unwanted and self._unwanted == self._asked:
            raise Unwanted("the coordinator has closed the round")

    def _attempt(
        self, assignment: Assignment, clients: Sequence[AssignedClient], work: Callable[[], list[ClientAnswer]]
    ) -> bool:
        """Make an answer and send it; return False if the coordinator no longer waits for it."""
        try:
            self._go_on()
            return self._send(assignment, clients, work())
        except Unwanted:
            return False
        except Refused as why:
            self._report(assignment, clients, "refused", str(why), why.told)
        except (Unreachable, Rejected):
            raise
        except Exception as error:  # both sides see what a model or a full disk raises
            self.tell(f"error: {error if isinstance(error, FedloomError) else traceback.format_exc()}")
            self._report(assignment, clients, "error", error_summary(error))
        return True

    def _report(
        self, assignment: Assignment, clients: Sequence[AssignedClient], kind: Any, message: str, told: str = ""
    ) -> None:
        """Say here why clients do not answer, and tell the coordinator the same, or less."""
        numbers = tuple(one.client for one in clients)
        self.tell(f"{kind}: {message}")
        with contextlib.suppress(StoreError):  # a disk that stays full must not keep the coordinator waiting
            self._retry(lambda: self.audit.write(kind, **assignment_facts(assignment), why=message), "audit", 5.0)
        failure = Failure(ask=assignment.id, clients=numbers, kind=kind, message=(told or message)[:20_000])
        self.connection.post("/v1/failures", failure)

    def _retry(self, write: Callable[[], None], what: str, seconds: float = DISK_PATIENCE) -> None:
        """Write something; if the disk is full, try again until the time is up."""
        end = time.monotonic() + seconds
        while True:
            try:
                write()
                self._full_since.pop(what, None)
                return
            except StoreError as error:
                if time.monotonic() > end or not self._may_wait(what, error):
                    raise

    def _may_wait(self, what: str, error: StoreError) -> bool:
        """Wait a moment for a full disk; return False without waiting if it has been full for a long time."""
        if time.monotonic() - self._full_since.setdefault(what, time.monotonic()) > DISK_PATIENCE:
            return False
        self.tell(f"{error} Trying again …")
        self._stop.wait(1.0)
        return True

    def _log(self, event: str, **facts: Any) -> None:
        self._retry(lambda: self.audit.write(event, **facts), "audit")

    def _send(self, assignment: Assignment, clients: Sequence[AssignedClient], answers: list[ClientAnswer]) -> bool:
        """Send an answer until the coordinator accepts or rejects it; return False if it came too late."""
        parcel = write_answer(assignment.id, answers)
        assert self.runner is not None
        questions = self.runner.questions
        asked = assignment.model_copy(update={"clients": tuple(clients)})
        facts = answer_facts(asked, answers, parcel) | self.runner.sessions.facts(asked)
        # nothing leaves before its line is in the audit log
        self._retry(lambda: self.audit.write("answered", run=questions.run, **facts), "audit", assignment.seconds)
        questions.note(facts)
        pause = 0.1
        end = time.monotonic() + max(assignment.seconds, 1.0)
        while True:
            try:
                results = self.connection.post("/v1/answers", parcel)["results"]
                break
            except Unreachable:
                if time.monotonic() > end or self._finished_heartbeat:
                    raise
                self._stop.wait(pause)
                pause = min(pause * 1.5, 3.0)
            except Rejected as error:
                if error.status == 401 or error.code == "hello":
                    raise
                self._report(
                    assignment, clients, "error", f"the coordinator rejects the answer ({error.code}: {error})"
                )
                return True
        for result in results:
            if result["status"] != "accepted":
                why = plain(f"{result['code']}: {result['message']}")
                self._log("rejected", **assignment_facts(assignment), clients=[result["client"]], why=why)
                self.tell(f"The coordinator rejected the answer of client {result['client']} ({why})")
        faults.point("agent.answered")
        return all(result.get("code") != "late" for result in results)

    # --- heartbeats

    def _heartbeats(self) -> None:
        while not self._stop.wait(self.heartbeat_seconds):
            # the main thread notices a failure by itself and reports it
            with contextlib.suppress(FedloomError, OSError):
                self.send_heartbeat()

    def send_heartbeat(self) -> None:
        """Say what this agent is doing; learn whether its work is still wanted, and which certificates to trust."""
        asked = self._asked  # before the request: the reply is about this assignment, or a later one
        pins = hashlib.sha256(self.pins.encode()).hexdigest() if self.pins else ""
        reply = self.heartbeat_connection.post("/v1/heartbeat", Heartbeat(doing=self.doing[:200], pins=pins))
        self._finished_heartbeat = plain(reply["finished"])
        self._unwanted = asked if asked and reply.get("ask") != asked else ""
        announced = str(reply.get("trust", ""))
        if self.pins and announced not in ("", self.pins):  # the next certificate comes before it is used
            repin(self.state, announced)
            self.connection, self.heartbeat_connection = self._connect(), self._connect()
