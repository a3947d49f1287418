"""The agent: a long-lived process where the data lives. It asks for work, does what its site allows, and answers."""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fedloom import faults, machine
from fedloom.errors import FedloomError, InputError, StoreError
from fedloom.network.agent.audit import Audit
from fedloom.network.agent.client_state import Versions
from fedloom.network.agent.connection import Denied, Link, Unreachable
from fedloom.network.agent.descriptions import about, check_form, short_traceback, summary
from fedloom.network.agent.perform import Performer
from fedloom.network.agent.policy import Refusal, Site
from fedloom.network.agent.preparation import prepare
from fedloom.network.agent.tensor_cache import Parts
from fedloom.network.protocol.identity import Signer, pinned
from fedloom.network.protocol.messages import Ask, Asked, Beat, Failure, Outgoing

PATIENCE = 120.0  # seconds that an agent tries to reach its coordinator, unless it was told to wait


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
        self.performer: Performer | None = None
        self.doing = "idle"
        self.beat = 3.0
        self.finished = ""  # why there is no more work
        self._heard = ""  # the same, heard while the main thread was busy
        self._stop = threading.Event()

    def _connect(self) -> Link:
        known = json.loads((self.state / "coordinator.json").read_text())
        self.signer.agent = known["agent"]
        verify: Any = pinned(known["authority"].encode()) if known["authority"] else True
        return Link(known["url"], self.signer, verify, pack=self.site.table.compress)

    def run(self) -> str:
        """Work until the coordinator says that it is done, and in which words; through restarts of either side."""
        machine.prepare_process()
        pulse = threading.Thread(target=self._heartbeats, daemon=True)
        pulse.start()
        silent_since: float | None = None
        pause = 0.1
        try:
            while not self.finished:
                try:
                    self._heard = ""
                    self.prepare(self.link.get("/v1/plan"))
                    silent_since, pause = None, 0.1
                    self._work()
                    if self.finished and self.wait:
                        self.tell(f"{self.finished} Waiting for more work.")
                        self.finished = ""
                        self._stop.wait(5.0)
                except (Unreachable, StoreError) as error:
                    if self._heard and not self.wait:
                        self.finished = self._heard
                        break
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
            pulse.join(timeout=5.0)  # a thread that is in the middle of something when the process ends would crash it
            self.link.close()
        return self.finished

    # --- getting ready

    def prepare(self, offer: Mapping[str, Any]) -> None:
        """Look at the plan, refuse it or load what it needs, and say hello."""
        before = self.performer
        if before is None or {**before.prepared.offer, "data": None} != {**offer, "data": None}:
            self.doing = "getting ready"
            self.performer = self._ready(offer)
        assert self.performer is not None
        hello = self.performer.prepared.hello
        self.beat = float(self.link.post("/v1/hello", hello)["beat"])
        left = ["versions", "shape of the data", "sizes of the splits"]
        self._log("hello", run=offer["run"], left=left, clients=len(hello.clients))
        self.doing = "idle"

    def _ready(self, offer: Mapping[str, Any]) -> Performer:
        try:
            check_form(offer)
            made = prepare(offer, self.site, lambda sha: self.parts.fetch(self.link, sha), self.signer.mark, self.tell)
        except Refusal as why:
            raise self._refusal("refused", str(why)) from None
        except (Unreachable, Denied):
            raise
        except FedloomError as error:
            self.tell(f"error: {error}")
            message = "its data or model could not be made ready; its own console says why"
            raise self._refusal("error", message) from None
        versions = Versions(self.state / "own" / str(offer["run"]))
        return Performer(made, self.site.policy, self.site.table.device, self.parts, versions)

    def _refusal(self, kind: Any, why: str) -> InputError:
        """What to raise when this site stays out; the coordinator is told."""
        self._log("refused", why=why)
        self.link.post("/v1/failures", Failure(kind=kind, message=why))
        return InputError(f"This site does not take part: {why}.")

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
        """Do what is asked, or say why not. Clients train one after another, and each answers for itself."""
        self.doing = f"{ask.kind} in round {ask.round} of {ask.label}"
        performer, end = self.performer, time.monotonic() + ask.seconds
        assert performer is not None

        def write(attempt: Callable[[], None]) -> None:
            self._patiently(attempt, end - time.monotonic())

        if ask.kind != "train":
            self._attempt(ask, ask.clients, partial(performer.examine, ask))
        elif not all(self._attempt(ask, (one,), partial(performer.train, ask, one, write)) for one in ask.clients):
            self.tell(f"Round {ask.round} of {ask.label} was closed before all clients here had answered.")
        self.doing = "idle"

    def _attempt(self, ask: Ask, clients: Sequence[Asked], work: Callable[[], Outgoing]) -> bool:
        """Make an answer and send it; false when nobody waits for this ask any more."""
        try:
            return self._answer(ask, clients, work())
        except Refusal as why:
            self._report(ask, clients, "refused", str(why))
        except (Unreachable, Denied):
            raise
        except Exception as error:  # whatever a model or a full disk raises is shown on both sides
            self.tell(f"error: {error if isinstance(error, FedloomError) else traceback.format_exc()}")
            self._report(ask, clients, "error", short_traceback(error))
        return True

    def _report(self, ask: Ask, clients: Sequence[Asked], kind: Any, message: str) -> None:
        numbers = tuple(one.client for one in clients)
        self.tell(f"{kind}: {message}")
        with contextlib.suppress(StoreError):  # a disk that stays full must not keep the coordinator waiting
            self._patiently(lambda: self.audit.write(kind, **about(ask), why=message), 5.0)
        self.link.post("/v1/failures", Failure(ask=ask.id, clients=numbers, kind=kind, message=message[:20_000]))

    def _patiently(self, write: Callable[[], None], seconds: float = 60.0) -> None:
        """Write something; a full disk is given some time, in a round the time that is left of it."""
        end = time.monotonic() + seconds
        while True:
            try:
                return write()
            except StoreError as error:
                if time.monotonic() > end:
                    raise
                self.tell(f"{error} Trying again …")
                self._stop.wait(1.0)

    def _log(self, event: str, **facts: Any) -> None:
        self._patiently(lambda: self.audit.write(event, **facts))

    def _answer(self, ask: Ask, asked: Sequence[Asked], outgoing: Outgoing) -> bool:
        """Send an answer until the coordinator has it or says why not; false if it came too late."""
        parcel = outgoing.parcel()
        clients = [result.client for result in outgoing.results]
        left = summary(parcel.tensors, outgoing)
        facts = {**about(ask), "clients": clients, "left": left, "bytes": parcel.size, "sha256": parcel.sha256}
        self._patiently(lambda: self.audit.write("answered", **facts), ask.seconds)  # nothing leaves without its line
        pause = 0.1
        end = time.monotonic() + max(ask.seconds, 1.0)
        while True:
            try:
                results = self.link.post("/v1/answers", parcel)["results"]
                break
            except Unreachable:
                if time.monotonic() > end or self._heard:
                    raise
                self._stop.wait(pause)
                pause = min(pause * 1.5, 3.0)
            except Denied as error:
                if error.status == 401 or error.code == "hello":
                    raise
                self._report(ask, asked, "error", f"the coordinator does not take the answer ({error.code}: {error})")
                return True
        for result in results:
            if result["status"] != "accepted":
                why = f"{result['code']}: {result['message']}"
                self._log("rejected", **about(ask), clients=[result["client"]], why=why)
                self.tell(f"The coordinator rejected the answer of client {result['client']} ({why})")
        faults.point("agent.answered")
        return all(result.get("code") != "late" for result in results)

    # --- signs of life

    def _heartbeats(self) -> None:
        while not self._stop.wait(self.beat):
            # a failure is no news: the main thread finds out by itself, and says so
            with contextlib.suppress(FedloomError, OSError):
                self._heard = self.beats.post("/v1/heartbeat", Beat(doing=self.doing[:200]))["finished"]
