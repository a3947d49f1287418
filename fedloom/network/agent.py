"""The agent: a long-lived process where the data lives. It asks for work, does what its site allows, and answers."""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedloom import faults, machine, tree
from fedloom.algorithm import Algorithm, Update
from fedloom.clients import Clients, Setup
from fedloom.course import blame
from fedloom.data.federation import Federation
from fedloom.errors import FedloomError, InputError, StoreError
from fedloom.evaluation import Measured, evaluate
from fedloom.experiment.plan import Plan
from fedloom.experiment.spec import parse
from fedloom.local import Groups
from fedloom.network.audit import Audit
from fedloom.network.hosted import Hosted, data_facts
from fedloom.network.identity import Signer, pinned
from fedloom.network.link import Denied, Link, Unreachable
from fedloom.network.messages import (
    Ask,
    Asked,
    Beat,
    Failure,
    Hello,
    Outgoing,
)
from fedloom.network.own import Versions
from fedloom.network.parts import Parts
from fedloom.network.policy import Refusal, Site
from fedloom.network.sources import source_hashes
from fedloom.network.telling import about, bare, check_form, describe, short, short_traceback, summary
from fedloom.network.wire import PROTOCOL
from fedloom.probe import probe
from fedloom.task import Task
from fedloom.work import ClientWork, Place

PATIENCE = 120.0  # seconds that an agent tries to reach its coordinator, unless it was told to wait


@dataclass
class Prepared:
    """An experiment made ready: data loaded, model built and tried, all of it kept while the agent lives."""

    offer: Mapping[str, Any]
    plan: Plan
    initial: dict[int, Path]
    hello: Hello

    def __post_init__(self) -> None:
        self._places: dict[tuple[int, tuple[tuple[int, int], ...]], Place] = {}
        self._tasks: dict[int, tuple[Task, Setup, Federation]] = {}
        self._kept: dict[tuple[str, int], Groups] = {}

    def algorithm(self, label: str) -> Algorithm:
        found = self.plan.experiment.algorithm.get(label)
        if found is None:
            raise InputError(f"There is no algorithm '{label}' in the plan.")
        return found

    def initial_own(self, label: str, seed: int, task: Task) -> Groups:
        """What a client keeps before it first takes part."""
        if (label, seed) not in self._kept:
            self._kept = {(label, seed): self.algorithm(label).init_own(task, task.initial())}
        return self._kept[label, seed]

    def place(self, seed: int, clients: tuple[Asked, ...], population: int, device: str) -> Place:
        """Our data under the run's numbers."""
        if seed not in self._tasks:
            task = replace(self.plan.task(seed), init=str(self.initial[seed]))
            federation = self.plan.federation(seed)
            setup = probe(federation, task).setup(group=1, device=machine.device(device))
            self._tasks = {seed: (task, setup, federation)}
            self._places = {}
        task, setup, federation = self._tasks[seed]
        numbers = tuple((one.client, one.local) for one in clients)
        if numbers not in {key[1] for key in self._places}:
            for _, local in numbers:
                if local >= federation.clients:
                    raise InputError(f"There is no client {local} here.")
            self._places = {
                (seed, numbers): Place(Hosted.of(federation, dict(numbers), population), task, setup),
            }
        return self._places[seed, numbers]


class Agent:
    """One site's process."""

    def __init__(
        self,
        site: Site,
        state: Path,
        *,
        wait: bool = False,
        tell: Callable[[str], None] = print,
        link: Link | None = None,  # something else than a coordinator's port that takes what is sent
    ) -> None:
        self.site, self.state, self.wait, self.tell = site, state, wait, tell
        self.signer = Signer(state / "agent.key")
        self.link = self.beats = link or self._connect()
        if link is None:
            self.beats = self._connect()
        self.audit = Audit(state / "audit.jsonl")
        self.parts = Parts(state / "tensors")
        self.prepared: Prepared | None = None
        self.doing = "idle"
        self.beat = 3.0
        self.finished = ""
        self._stop = threading.Event()

    def _connect(self) -> Link:
        known = json.loads((self.state / "coordinator.json").read_text())
        self.signer.agent = known["agent"]
        verify: Any = pinned(known["authority"].encode()) if known["authority"] else True
        return Link(known["url"], self.signer, verify)

    def run(self) -> None:
        """Work until the coordinator says that it is done; through restarts of either side."""
        machine.prepare_process()
        threading.Thread(target=self._heartbeats, daemon=True).start()
        silent_since: float | None = None
        pause = 0.1
        try:
            while not self.finished:
                try:
                    self.prepare(self.link.get("/v1/plan"))
                    silent_since, pause = None, 0.1
                    self._work()
                    if self.finished and self.wait:
                        self.tell(f"{self.finished} Waiting for more work.")
                        self.finished = ""
                        self._stop.wait(5.0)
                except Unreachable as error:
                    if silent_since is None:
                        silent_since = time.monotonic()
                        self.tell(f"{error} Trying again …")
                    if not self.wait and time.monotonic() - silent_since > PATIENCE:
                        raise
                    self._stop.wait(pause * random.uniform(0.5, 1.0))
                    pause = min(pause * 1.5, 3.0)
                except Denied as error:
                    if error.code != "hello":
                        raise InputError(f"The coordinator refuses this agent ({error.code}): {error}") from None
        finally:
            self._stop.set()
            self.link.close()

    # --- getting ready

    def prepare(self, offer: Mapping[str, Any]) -> None:
        """Look at the plan, refuse it or load what it needs, and say hello."""
        if self.prepared is None or {**self.prepared.offer, "data": None} != {**offer, "data": None}:
            self.doing = "getting ready"
            try:
                check_form(offer)
                self.prepared = self._ready(offer)
                self.versions = Versions(self.state / "own" / str(offer["run"]))
            except Refusal as why:
                self._refuse("refused", str(why))
            except (Unreachable, Denied):
                raise
            except FedloomError as error:
                self.tell(f"error: {error}")
                self._refuse("error", "its data or model could not be made ready; its own console says why")
        assert self.prepared is not None
        hello = self.prepared.hello
        self.beat = float(self.link.post("/v1/hello", hello)["beat"])
        self.audit.write(
            "hello",
            run=offer["run"],
            left=["versions", "shape of the data", "sizes of the splits"],
            clients=len(hello.clients),
        )
        self.doing = "idle"

    def _refuse(self, kind: Any, why: str) -> None:
        self.audit.write("refused", why=why)
        self.link.post("/v1/failures", Failure(kind=kind, message=why))
        raise InputError(f"This site does not take part: {why}.")

    def _ready(self, offer: Mapping[str, Any]) -> Prepared:
        if offer.get("protocol") != PROTOCOL:
            raise Refusal(f"the coordinator speaks protocol {offer.get('protocol')}, and this agent speaks {PROTOCOL}")
        values = dict(offer["experiment"])
        self.site.policy.check_offer(values, offer.get("privacy") or {})
        values["task"] = {**values["task"], "init": "torch"}  # the coordinator sends the initial weights
        values["data"] = self.site.data
        experiment = parse(values, self.site.base)
        theirs, ours = offer["sources"], source_hashes(experiment)
        different = [name for name in ours if theirs.get(name) != ours[name]]
        if different:
            raise Refusal(f"the installed code is not the coordinator's: {', '.join(different)} differ")
        if offer["versions"].get("torch") != machine.facts()["torch"]:
            self.tell(
                f"Note: torch {offer['versions'].get('torch')} there, {machine.facts()['torch']} here: bits may differ."
            )
        plan = Plan(experiment)
        seed = experiment.seeds[0]
        initial = {int(seed): self.parts.fetch(self.link, sha) for seed, sha in offer["initial"].items()}
        federation = plan.federation(seed)
        facts = data_facts(federation)
        if offer.get("data") and offer["data"] != facts:
            raise Refusal(f"the data does not fit: the run has {short(offer['data'])}, and here is {short(facts)}")
        task = replace(plan.task(seed), init=str(initial[seed]))
        setup = probe(federation, task).setup(group=1, device=machine.device(self.site.table.device))
        hello = describe(self.site, federation, setup, self.signer.mark(federation.fingerprint))
        self.site.policy.check_examples({one.name: one.train for one in hello.clients})
        self.tell(
            f"Ready: {len(hello.clients)} client(s), a model of {task.parameters:,} parameters. Without secure "
            "aggregation, the coordinator can read each client's update."
        )
        return Prepared(dict(offer), plan, initial, hello)

    # --- work

    def _work(self) -> None:
        while not self._stop.is_set():
            found = self.parts.next_ask(self.link)
            if isinstance(found, str):
                if found:
                    self.finished = found
                    return
                continue
            faults.point("agent.asked")
            self.obey(found)

    def obey(self, ask: Ask) -> None:
        """Do what is asked, or say why not."""
        self.doing = f"{ask.kind} in round {ask.round} of {ask.label}"
        try:
            self._carry_out(ask)
        except Refusal as why:
            self._report(ask, "refused", str(why))
        except (Unreachable, Denied):
            raise
        except Exception as error:  # whatever a model or a full disk raises is shown on both sides
            self.tell(f"error: {error if isinstance(error, FedloomError) else traceback.format_exc()}")
            self._report(ask, "error", short_traceback(error))
        self.doing = "idle"

    def _report(self, ask: Ask, kind: Any, message: str) -> None:
        clients = tuple(one.client for one in ask.clients)
        self.audit.write(kind, **about(ask), why=message)
        self.tell(f"{kind}: {message}")
        self.link.post("/v1/failures", Failure(ask=ask.id, clients=clients, kind=kind, message=message[:20_000]))

    def _carry_out(self, ask: Ask) -> None:
        assert self.prepared is not None
        self.site.policy.check_ask(ask.verb, ask.cohort)
        place = self.prepared.place(ask.seed, ask.clients, ask.population, self.site.table.device)
        algorithm = self.prepared.algorithm(ask.label)
        versions, cell = self.versions, f"{ask.label}-{ask.seed}"
        initial = self.prepared.initial_own(ask.label, ask.seed, place.task)
        if ask.kind == "train":
            for number, one in enumerate(ask.clients):
                self._train(ask, number, one, place, algorithm, versions, cell, initial)
            return
        shared, outgoing = self.parts.groups(ask, "shared"), Outgoing(ask.id)
        for one in ask.clients:
            own = versions.load(cell, one.client, one.ticket, initial) if one.ticket else {}
            model = shared["model"] if ask.method == "given" else algorithm.model(place.task, shared, own)
            if ask.kind == "fingerprint":
                outgoing.add(one.client, sha256=tree.sha256(model))
            else:
                outgoing.add(one.client, measured=self._measure(ask, one, place, model))
        self._answer(ask, outgoing)

    def _measure(self, ask: Ask, one: Asked, place: Place, model: tree.Tree) -> dict[str, Measured]:
        data = Clients(place.federation, (one.client,), setup=place.setup, round=ask.round)
        try:
            on_device = tree.to(model, place.setup.device)
            found: dict[str, Measured] = {s: evaluate(place.task, on_device, data, 0, s) for s in ask.splits}
        except Exception as error:
            raise blame(error, "evaluation", data, 0) from error
        return self._may_leave(found, place.task)

    def _train(
        self,
        ask: Ask,
        number: int,
        one: Asked,
        place: Place,
        algorithm: Algorithm,
        versions: Versions,
        cell: str,
        initial: Groups,
    ) -> None:
        """One client runs one method of the algorithm, keeps what it keeps, and answers."""
        own: Groups = {}
        if one.ticket is not None:
            versions.prune(cell, one.client, one.ticket, ask.durable)
            own = versions.load(cell, one.client, one.ticket, initial)
        peers, graph = self.parts.peers(ask, one)
        work = ClientWork(
            algorithm,
            self._method(algorithm, ask.method),
            self.parts.groups(ask, "shared"),
            (one.client,),
            {group: {name: leaf[None] for name, leaf in leaves.items()} for group, leaves in own.items()},
            ask.seed,
            ask.round,
            ask.call,
            "stack",
            self.parts.private(ask, number),
            peers,
            graph,
            ask.splits,
            False,
            ask.watch_epochs,
        )
        outcome = work.perform(place)
        faults.point("agent.trained")
        ticket = None
        if one.ticket is not None:
            ticket = (ask.round, ask.attempt, ask.call)
            kept = {group: tree.row(stacked, 0) for group, stacked in outcome.own.items()}
            self._patiently(ask, lambda: versions.save(cell, one.client, ticket, kept))
        outgoing = Outgoing(ask.id)
        (report,) = outcome.reports
        names = {"loss": True, **{metric.name: metric.is_mean for metric in place.task.measures}}
        history = tuple(
            {name: value for name, value in epoch.items() if self.site.policy.may_leave(bare(name, names), True)}
            for epoch in report.history
        )
        outgoing.add(
            one.client,
            update=Update(outcome.stack, outcome.weights, outcome.public),
            ticket=ticket,
            history=history,
            measured=self._may_leave(report.post_fit, place.task),
        )
        self._answer(ask, outgoing)

    def _patiently(self, ask: Ask, write: Callable[[], None]) -> None:
        """Write something; a full disk is given the time that the round has."""
        end = time.monotonic() + ask.seconds
        while True:
            try:
                return write()
            except (OSError, StoreError) as error:
                if time.monotonic() > end:
                    raise
                self.tell(f"{error} Trying again …")
                self._stop.wait(1.0)

    def _method(self, algorithm: Algorithm, name: str) -> str:
        """A method that clients may be asked to run: one of the algorithm's own, by a public name."""
        if name.startswith("_") or name in dir(Algorithm) or not callable(getattr(type(algorithm), name, None)):
            raise Refusal(f"{type(algorithm).__name__} has no method '{name}' for clients")
        return name

    def _may_leave(self, measured: Mapping[str, Measured], task: Task) -> dict[str, Measured]:
        """Measurements without what the policy keeps here."""
        means = {"loss": True, **{metric.name: metric.is_mean for metric in task.measures}}
        allowed = {name for name, is_mean in means.items() if self.site.policy.may_leave(name, is_mean)}
        told = {}
        for where, found in measured.items():
            sums = {name: value if name in allowed else float("nan") for name, value in found.sums.items()}
            scores = {name: value for name, value in found.scores.items() if name in allowed}
            told[where] = Measured(found.count, sums, scores, found.targets if scores else None)
        return told

    def _answer(self, ask: Ask, outgoing: Outgoing) -> None:
        """Send an answer until the coordinator has it or says why not."""
        parcel = outgoing.parcel()
        clients = [result.client for result in outgoing.results]
        left = summary(parcel.tensors, outgoing)
        facts = {**about(ask), "clients": clients, "left": left, "bytes": parcel.size, "sha256": parcel.sha256}
        self._patiently(ask, lambda: self.audit.write("answered", **facts))  # nothing leaves without its line
        pause = 0.1
        end = time.monotonic() + max(ask.seconds, 1.0)
        while True:
            try:
                results = self.link.post("/v1/answers", parcel)["results"]
                break
            except Unreachable:
                if time.monotonic() > end:
                    raise
                self._stop.wait(pause)
                pause = min(pause * 1.5, 3.0)
            except Denied as error:
                if error.status == 401 or error.code == "hello":
                    raise
                results = [{"client": clients, "status": "rejected", "code": error.code, "message": str(error)}]
                break
        for result in results:
            if result["status"] != "accepted":
                why = f"{result['code']}: {result['message']}"
                self.audit.write("rejected", **about(ask), clients=[result["client"]], why=why)
                self.tell(f"The coordinator rejected the answer of client {result['client']} ({why})")
        faults.point("agent.answered")

    # --- signs of life

    def _heartbeats(self) -> None:
        while not self._stop.wait(self.beat):
            # a failure is no news: the main thread finds out by itself, and says so
            with contextlib.suppress(FedloomError, OSError):
                self.beats.post("/v1/heartbeat", Beat(doing=self.doing[:200]))
