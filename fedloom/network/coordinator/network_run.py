"""One experiment whose clients are on other machines. A subclass decides how messages travel."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from fedloom import machine
from fedloom.aggregation.outliers import MANY
from fedloom.algorithms import LocalOnly
from fedloom.backends.protocol import Backend
from fedloom.data.federation import Federation
from fedloom.errors import InputError, QuorumError
from fedloom.experiment import checkpoint
from fedloom.experiment.checks import check_agreed, check_served, check_target
from fedloom.experiment.experiment_file import Experiment
from fedloom.experiment.plan import Plan
from fedloom.experiment.progress import Progress
from fedloom.experiment.run import run_plan
from fedloom.federation.sampling import widened
from fedloom.federation.work import Place
from fedloom.network.coordinator.agent_pool import AgentPool
from fedloom.network.coordinator.backend import NetworkBackend
from fedloom.network.coordinator.connected_agent import ConnectedAgent
from fedloom.network.coordinator.network_folder import initial_weights, open_ledger
from fedloom.network.coordinator.roster import Roster
from fedloom.network.protocol.code_fingerprint import code_hashes
from fedloom.network.protocol.expected_update import synthetic_place
from fedloom.network.protocol.messages import DataFormat, Hello
from fedloom.network.protocol.tensors import PROTOCOL, Parcel
from fedloom.privacy.protection import check_plan
from fedloom.privacy.words import unmeasured
from fedloom.record import seconds
from fedloom.results.result import Result
from fedloom.task import Task


class NetworkRun:
    """Runs an experiment, from the first agent to the last round."""

    def __init__(self, experiment: Experiment, folder: Path, tell: Callable[[str], None] = print) -> None:
        if experiment.system is not None:
            raise InputError("[system] is for simulations: clients on a network take the time they take. Leave it out.")
        self.experiment, notes = federated(experiment)
        for note in notes:
            tell(note)
        self.folder, self.tell = folder, tell
        self.plan = Plan.of(self.experiment, served=True)
        check_plan(self.plan.privacy, self.plan.cohort, self.plan.algorithms)
        _check_masked_noise(self.plan)
        if self.experiment.data.server != "none":
            check_served(self.plan)
        elif not self.experiment.has_data:
            check_agreed(self.plan)
        else:  # the file's data is for rehearsals, and need not be on this machine
            check_target(self.plan.evaluate, self.plan.task(self.plan.seeds[0]))
        self.network = folder / "network"
        self._held = ExitStack()
        self.ledger = open_ledger(self.network, self._held)
        self.attempt = self.ledger.next_attempt()
        self.pool = self._make_pool(seconds(self.experiment.cohort.deadline))
        self.pool.max_clients = self.experiment.cohort.max_clients
        self.pool.check_data = self._template = lru_cache(maxsize=1)(self._try_model)
        fixed = {label: one.needs_all_from_start for label, one in self.experiment.algorithm.items()}
        fixed |= {"[privacy]": "it is accounted for them"} if self.experiment.privacy.on else {}
        self.pool.no_late_joiners = "; ".join(
            f"{label} needs all clients from the start: {why}" for label, why in fixed.items() if why
        )
        self._told = ""  # why agents that are ready do not suffice

    # --- how messages travel

    def _make_pool(self, deadline: float) -> AgentPool:
        return AgentPool(self.ledger, self.tell, deadline)

    def _connected(self) -> AbstractContextManager[object]:
        """Return a context in which agents can reach this process."""
        raise NotImplementedError

    def _check_agents(self) -> None:
        """Raise an error if the awaited agents can no longer come."""

    # --- before the first round

    def _try_model(self, data: DataFormat) -> Place:
        """Try the experiment's model on made-up examples; raise `InputError` if it does not take them."""
        with machine.computing():
            return synthetic_place(data, replace(self.plan.task(self.experiment.seeds[0])))

    def _agreeing(self, wanted: int | tuple[str, ...]) -> list[ConnectedAgent]:
        """Return the agents to begin with; none if too few are ready, or too few whose data have the same format.

        No agent decides for the others: the format that most of them have counts.
        """
        ready = sorted(self.pool.ready(), key=lambda one: one.name)
        wished = [one for one in ready if isinstance(wanted, int) or one.name in wanted]
        needed = wanted if isinstance(wanted, int) else len(wanted)
        groups: dict[tuple[DataFormat, bool], list[ConnectedAgent]] = {}
        for one in wished:
            assert one.hello is not None
            groups.setdefault((one.hello.data_format, bool(one.hello.numbers)), []).append(one)
        found = max(map(_numbered, groups.values()), key=len, default=[])
        if len(found) >= needed:
            return found
        if len(wished) >= needed:
            formats: dict[DataFormat, list[str]] = {}
            for (data_format, _), some in groups.items():
                formats.setdefault(data_format, []).extend(one.name for one in some)
            why = _who_differs(formats)
            names = ", ".join(one.name for one in wished)
            self._tell_once(
                f"Waiting for agents whose data and [site] hosts fit together. These are ready: {names}.{why}"
            )
        return []

    def _tell_once(self, text: str) -> None:
        if self._told != text:
            self._told = text
            self.pool.log("note", text[:2000])

    def _publish_plan(self) -> None:
        """Publish what agents must know: names, fields and hashes of code, and initial weights by their SHA-256."""
        values = {**self.experiment.resolved(), "data": {"seed": self.experiment.data.seed}}
        values.pop("run")
        initial = {}
        for seed in self.experiment.seeds:
            task = self.plan.task(seed)
            parcel = Parcel({}, task.whole(task.initial()))
            self.pool.initial_weights[parcel.sha256] = initial_weights(self.network, parcel)
            initial[str(seed)] = parcel.sha256
            # every site builds the same model, whatever its own labels are
            values["task"] = {**values["task"], "args": dict(task.args)}
        run_id = self.ledger.fact("run") or secrets.token_hex(8)
        self.ledger.set_fact("run", run_id)
        facts = machine.facts()
        self.pool.run_plan = {
            "protocol": PROTOCOL,
            "run": run_id,
            "experiment": values,
            "initial": initial,
            "sources": code_hashes(self.experiment),
            "versions": {name: facts[name] for name in ("fedloom", "torch", "python", "cpu_capability")},
            "data": self.ledger.fact("data"),
            "shape": self._shape(),
            "privacy": {
                "secure_aggregation": self.plan.privacy.secure_aggregation is not None,
                "epsilon": self.plan.privacy.dp.epsilon if self.plan.privacy.dp is not None else None,
            },
        }

    def _shape(self) -> list[int] | None:
        """Return the shape of an example, if a file of the coordinator says it before any agent does."""
        agreed = self.plan.agreed()
        if agreed is not None:
            return list(agreed.shape)
        is_here = self.experiment.data.server != "none"
        return list(self.plan.federation(self.experiment.seeds[0]).x.shape[1:]) if is_here else None

    def _start_when(self) -> int | tuple[str, ...]:
        return self.experiment.cohort.start_when

    def _wait_for_agents(self, should_stop: Callable[[], bool]) -> None:
        """Wait for the agents that the experiment needs; a continued run waits for all agents that were in it."""
        before = {row["agent"] for row in self.ledger.clients()}
        if before and self._is_done():
            return
        wanted, deadline = self._start_when(), self.experiment.cohort.deadline
        words = f"{wanted} agent(s)" if isinstance(wanted, int) else ", ".join(wanted)
        self.pool.stage = f"waiting for {'the agents to come back' if before else words}"

        def here() -> bool:
            if should_stop():  # there is no round whose end could be waited for
                raise KeyboardInterrupt
            self._check_agents()
            ready = self.pool.ready()
            if before and self.experiment.cohort.mode == "async":  # the others come when they like
                return bool(ready)
            if before:
                return before - self.ledger.revoked() <= {one.agent for one in ready}
            return bool(self._agreeing(wanted))

        if not before:
            self.tell(f"Waiting for {words} …")
            while not self.ledger.clients():  # an agent may change its mind in between
                self.pool.wait_until(here)
                self._fix_clients(wanted)
            return
        back = [row for row in self.ledger.agents() if row["agent"] in before and not row["revoked"]]
        self.tell(f"Waiting for the agents to come back: {', '.join(row['name'] for row in back)} …")
        for row in self.ledger.agents():
            if row["agent"] in before:
                self.pool.expect(row["agent"], row["name"])
        if not self.pool.wait_until(here, seconds(deadline)) and not self.pool.ready():
            raise QuorumError(
                f"None of the agents came back within {deadline}. Start them again, and serve the same file to "
                "continue."
            )

    def _is_done(self) -> bool:
        """Return whether every cell has ended: then no agent need come back."""
        cells = [(label, seed) for label in self.experiment.algorithm for seed in self.experiment.seeds]
        found = [checkpoint.load(checkpoint.of_cell(self.folder, *cell)) for cell in cells]
        return all(one is not None and one.ends(self.experiment.rounds) for one in found)

    def _fix_clients(self, wanted: int | tuple[str, ...]) -> None:
        """Fix which clients take part and their numbers: in the order of the agents' names, or as in a rehearsal."""
        with self.pool.admitting:
            agents = self._agreeing(wanted)
            rows: list[tuple[int, str, int, str]] = []
            for one in agents:
                assert one.hello is not None
                rows += one.hello.numbered(one.agent, len(rows))
                self.ledger.set_fact("data", one.hello.message())
            if rows:
                self.ledger.add_clients(rows)
                agent, hosted = Counter(row[1] for row in rows).most_common(1)[0]
                if 2 * hosted > len(rows) >= MANY:
                    where = f"{self.pool.agents[agent].name} hosts {hosted} of {len(rows)} clients"
                    self.pool.log("note", f"{where}: the median that outliers are compared with is its own")

    # --- the run

    def _roster(self, clients: int) -> Roster:
        """Return the first clients of the run, as many as a round has."""
        hellos = {row["agent"]: Hello.model_validate_json(row["hello"]) for row in self.ledger.agents() if row["hello"]}
        server = None if self.experiment.data.server == "none" else self.plan.federation(self.experiment.seeds[0])
        setup = self._template(DataFormat.model_validate(self.ledger.fact("data"))).setup
        roster = Roster.of(self.ledger.clients()[:clients], hellos, server, setup)
        agreed = self.plan.agreed()
        used = None if agreed is None else agreed.as_used(roster.data_format.prepared)
        if agreed is not None and used is None:
            self._tell_once(
                "The sites do not prepare rows by [data] preprocessing, so `fedloom predict` cannot do it here."
            )
        if server is not None and server.preprocessing.sha256 == roster.data_format.prepared != "":
            used = server.preprocessing  # nobody agreed on it, and all prepare rows alike, such as by known bounds
        return roster if used is None else replace(roster, preprocessing=used)

    def run(self, progress: Progress, should_stop: Callable[[], bool] = lambda: False) -> Result:
        """Wait for agents, then run all cells."""
        try:
            self._publish_plan()
            with self._connected():
                return self._run(progress, should_stop)
        finally:
            self.ledger.close()
            self._held.close()

    def _run(self, progress: Progress, should_stop: Callable[[], bool]) -> Result:
        try:
            self._wait_for_agents(should_stop)
            self.pool.run_plan["data"] = self.ledger.fact("data")
            sampling = self.experiment.cohort
            roster = self._roster(sum(not row["late"] for row in self.ledger.clients()))
            sampling.check(roster.clients)
            same_sizes = self.experiment.data.seed != "run"

            def connect(federation: Federation, task: Task) -> Backend:
                return NetworkBackend(
                    self.pool,
                    roster,
                    task,
                    sampling,
                    self.attempt,
                    same_sizes,
                    self._roster,
                    self.experiment.compress,
                    self.plan.privacy.hides_metrics,
                )

            plan = replace(self.plan, federation=lambda seed: roster, cohort=widened(sampling))
            result = run_plan(plan, self.folder, connect=connect, progress=progress, should_stop=should_stop)
            for label in plan.algorithms:
                for seed in plan.seeds:
                    self.ledger.forget_closed(label, seed, checkpoint.of_cell(self.folder, label, seed))
            if result.finished:
                self.pool.finish("The run is finished.")
            return result
        except BaseException as error:
            # after an interruption, agents wait for the next start
            if not isinstance(error, (KeyboardInterrupt, SystemExit)):
                self.pool.finish("The run ended with an error; the coordinator's console shows it.")
            raise


def _numbered(agents: list[ConnectedAgent]) -> list[ConnectedAgent]:
    """Leave out agents whose clients have numbers that no rehearsal of this size has; none, if a number is missing."""
    hellos = {one.agent: one.hello for one in agents if one.hello is not None}
    total = sum(len(hello.clients) for hello in hellos.values())
    fitting = [one for one in agents if max(hellos[one.agent].numbers, default=-1) < total]
    if len(fitting) < len(agents):
        return _numbered(fitting)
    numbers = sum(len(hello.numbers) for hello in hellos.values())
    return agents if numbers in (0, total) else []


def _who_differs(formats: Mapping[DataFormat, Sequence[str]]) -> str:
    """Say which agents have another data format than most others have; without a most common one, they all differ."""
    (usual, most), *others = sorted(formats.items(), key=lambda item: -len(item[1]))
    here, said = ", ".join(most), ""
    is_odd = bool(others) and len(others[0][1]) < len(most)
    for other, some in others:
        there = ", ".join(some)
        who = f"{there} differ{'s' * (len(some) == 1)} from {here}" if is_odd else f"{here} and {there} differ"
        said += f" {who}. {usual.differences(other, f'at {here}', f'at {there}')}."
    return said


def _check_masked_noise(plan: Plan) -> None:
    """Refuse clients that send nothing where agents wait for a clip and charge for noise: they would refuse to work."""
    privacy = plan.privacy
    silent = [label for label, one in plan.algorithms.items() if isinstance(one, LocalOnly)]
    if silent and privacy.secure_aggregation is not None and privacy.dp is not None and not privacy.has_local_noise:
        raise InputError(
            f"[privacy] secure_aggregation with dp masks noisy changes, and the clients of {', '.join(silent)} send "
            "none: their agents would refuse to train. Leave it out, or serve it without dp."
        )


def federated(experiment: Experiment) -> tuple[Experiment, list[str]]:
    """Return the experiment without what needs all data in one place, and notes on what was left out."""
    notes = []
    pooled = [label for label, algorithm in experiment.algorithm.items() if algorithm.pooled]
    if pooled:
        notes.append(f"{', '.join(pooled)}: left out on a network, because it needs all data in one place.")
        left = {label: one for label, one in experiment.algorithm.items() if label not in pooled}
        if not left:
            raise InputError("There is nothing to serve: the pooled baseline needs all data in one place.")
        experiment = experiment.model_copy(update={"algorithm": left})
    privacy = experiment.privacy
    if privacy.secure_aggregation is not None and not privacy.has_distributed_noise and len(experiment.algorithm) > 1:
        notes.append(
            f"{', '.join(experiment.algorithm)} begin with the same weights. If a client is missing from one of their "
            "first sums, their difference can be close to its update: serve each algorithm with its own seed."
        )
    if experiment.evaluate.universal:
        notes.append("evaluate.universal: left out on a network, because no machine holds all test data.")
        evaluate = experiment.evaluate.model_copy(update={"universal": False})
        experiment = experiment.model_copy(update={"evaluate": evaluate})
    if experiment.privacy.hides_metrics and (experiment.evaluate.splits or experiment.evaluate.epochs):
        notes.append(
            "evaluate.splits: left out on a network with [privacy], because each client's numbers would leave without "
            "mask and noise. The server evaluates on its own data, if it has some."
        )
        evaluate = experiment.evaluate.model_copy(update={"splits": (), "epochs": False})
        experiment = experiment.model_copy(update={"evaluate": evaluate})
    held = _held_by_server(experiment)
    notes += [f"Caution: {text}" for text in unmeasured(experiment.privacy, bool(held))]
    at_clients = [split for split in experiment.evaluate.server or () if split not in held]
    if experiment.privacy.hides_metrics and at_clients:
        notes.append(
            f"evaluate.server: {', '.join(at_clients)} left out on a network with [privacy], because the server does "
            "not hold it, and each client's numbers would leave."
        )
        kept = tuple(split for split in experiment.evaluate.server or () if split in held)
        evaluate = experiment.evaluate.model_copy(update={"server": kept})
        experiment = experiment.model_copy(update={"evaluate": evaluate})
    return experiment, notes


def _held_by_server(experiment: Experiment) -> Collection[str]:
    """Return the splits of which the server holds examples itself."""
    server = experiment.data.server
    if isinstance(server, Mapping):
        return server.keys()
    return () if server == "none" else ("test",)
