"""The fault matrix: faults of every kind at seeded instants, with real processes over TLS. No bit may change.

    python -m tests.network.faults --out counts.jsonl        # everything, at least 55 instants each: an hour
    python -m tests.network.faults --instants 3 cut          # some

Every run strikes several times. It survives if it ends by itself with the SHA-256 of an undisturbed run; then it has
survived all of its instants, else it has lost them all. With `--out`, runs that are in the file already are not made
again. Prints a table in Markdown, and fails if one of the named instants was never reached.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from fedloom.faults import CLOCK, VARIABLE
from tests.network.conftest import EXPERIMENT, Federation, audit, serial_weights, wait_for, weights
from tests.network.points import AGENT_POINTS, COORDINATOR_POINTS
from tests.network.proxy import Proxy

STRIKES = 15  # in one run
# SCAFFOLD: clients keep a control variate, so that a state that is lost or counted twice changes the result
VALUES: dict[str, Any] = {
    **EXPERIMENT,
    "rounds": 24,
    "train": {"epochs": 2},
    "evaluate": {"every": 6},
    "cohort": {"deadline": "10m", "quorum": 1.0},
    "algorithm": {"scaffold": {}},
}
SECURE_VALUES: dict[str, Any] = {
    **VALUES,
    "evaluate": {"splits": []},
    "cohort": {**VALUES["cohort"], "max_examples": 1000},
    "privacy": {"secure_aggregation": {"min_clients": 3, "range": 100.0}},
}
# clients are at work across rounds; a round over all of them has the bits of a round that waits, whatever fails
ASYNC_VALUES: dict[str, Any] = {**VALUES, "cohort": {"deadline": "10m", "mode": "async", "buffer": 4}}
# no sum is unmasked twice, and an agent that starts again has left its session: these cost rounds, so the bits differ
COSTS_ROUNDS = ("kill at secure.unmasked", "kill at secure.answer")
ASYNC_POINTS = ("ledger.start", "ledger.take", "ledger.taken")  # only asynchronous rounds pass them
TESTED_ELSEWHERE = {
    "privacy.charged": "only runs with differential privacy pass it (tests/privacy/dp/test_client_level.py)",
}


@dataclass
class Scene:
    """One run, what struck it, and how often."""

    world: Federation
    draws: random.Random
    struck: int = 0
    may_lose_rounds: bool = False  # the coordinator may end with the exit code of a run with abandoned rounds
    forgiving: bool = False  # the coordinator may stop with a clear message, and is then started again
    proxy: Proxy | None = None
    everything_counts: bool = False  # whether the proxy's faults are the instants
    again: Callable[[], dict[str, str]] = dict  # what a killed process is given when it is started again
    victim: str = ""  # "coordinator", "agent" or nobody
    disk: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def begin(self, serve: dict[str, str] | None = None, agents: dict[int, dict[str, str]] | None = None) -> None:
        self.world.serve(**(serve or {}))
        for number in range(self.world.agents):
            self.world.join(number, **(agents or {}).get(number, {}))

    def finish(self, seconds: float = 900.0) -> None:
        """Wait until the run is over, and start killed processes again."""
        world, end = self.world, time.monotonic() + seconds
        while time.monotonic() < end:
            assert world.coordinator is not None
            code = world.coordinator.poll()
            if code == 0 or (code == 4 and self.may_lose_rounds):
                return
            if code == -signal.SIGKILL:
                self.struck += self.victim == "coordinator"
                world.serve(**(self.again() if self.victim == "coordinator" else {}))
            elif code is not None:
                self.forgive(code)
            for number, process in list(world.processes.items()):
                code = process.poll()
                if code == -signal.SIGKILL:
                    self.struck += self.victim == "agent"
                    world.join(number, **(self.again() if self.victim == "agent" else {}))
                elif code is not None and world.coordinator.poll() is None:
                    said = (world.folder / f"site-{number}.txt").read_text(errors="replace")
                    raise AssertionError(f"an agent ended with {code}: {said[-2000:]}")
            time.sleep(0.1)
        raise AssertionError(f"the run did not end: {world.log()[-2000:]}")

    def forgive(self, code: int) -> None:
        """A coordinator that could not write may stop, with words; it is started again."""
        log = self.world.log()
        if not self.forgiving or code != 1 or "Traceback" in log:
            raise AssertionError(f"the coordinator ended with {code}: {log[-2000:]}")
        self.world.serve()

    def rounds_done(self) -> int:
        """How many rounds are checkpointed."""
        folder = self.world.out / "cells" / "scaffold-1"
        found = [int(path.stem.split("-")[1]) for path in folder.glob("round-*.json")] if folder.is_dir() else []
        return max(found, default=0)

    def instants(self) -> Iterator[None]:
        """Moments of the run: after drawn rounds, and a drawn moment later."""
        wanted = sorted(self.draws.randrange(0, int(self.world.values["rounds"]) - 1) for _ in range(STRIKES))
        for round in wanted:
            wait_for(lambda round=round: self._over() or (self.rounds_done() >= round and self._begun()), 400)
            time.sleep(self.draws.uniform(0.0, 0.4))
            if self._over():
                return
            self.struck += 1
            yield

    def _begun(self) -> bool:
        return (self.world.out / "run.db").exists()

    def _over(self) -> bool:
        code = self.world.coordinator.poll() if self.world.coordinator is not None else None
        if code == 1:
            self.forgive(code)
        return code == 0

    def kill_coordinator(self) -> None:
        assert self.world.coordinator is not None
        self.world.coordinator.kill()
        self.world.coordinator.wait()

    def kill_agent(self, number: int, **env: str) -> None:
        process = self.world.processes[number]
        process.kill()
        process.wait()
        self.world.join(number, **env)

    def through_proxy(self, **faults: Any) -> Proxy:
        self.proxy = Proxy(self.world.port, seed=self.draws.randrange(1 << 30), **faults)
        self.world.serve()
        for number in range(self.world.agents):
            self.world.join(number, url=f"https://127.0.0.1:{self.proxy.port}")
        return self.proxy


def kill_coordinator(scene: Scene) -> None:
    scene.begin()
    for _ in scene.instants():
        scene.kill_coordinator()
        scene.world.serve()


def kill_agent(scene: Scene) -> None:
    scene.begin()
    for _ in scene.instants():
        scene.kill_agent(scene.draws.randrange(scene.world.agents))


def kill_both(scene: Scene) -> None:
    scene.begin()
    for _ in scene.instants():
        scene.kill_coordinator()
        scene.kill_agent(scene.draws.randrange(scene.world.agents))
        scene.world.serve()


def cut(scene: Scene) -> None:
    proxy = scene.through_proxy()
    for _ in scene.instants():
        proxy.cut(scene.draws.uniform(0.3, 2.0))


def through(**faults: float) -> Callable[[Scene], None]:
    """A connection on which something happens all the time; every time it does is an instant."""

    def fault(scene: Scene) -> None:
        scene.through_proxy(**faults)
        scene.everything_counts = True

    return fault


def slow(scene: Scene) -> None:
    """Ten times what a round takes, for every piece."""
    proxy = scene.through_proxy()
    for _ in scene.instants():
        proxy.delay = scene.draws.uniform(0.05, 0.3)
        time.sleep(1.0)
        proxy.delay = 0.0


def clock(scene: Scene) -> None:
    """Clocks jump by an hour, each at its own time; again and again a process starts with another clock."""

    def moved() -> dict[str, str]:
        jump, after = scene.draws.choice(("-3600", "3600")), scene.draws.choice((0.0, scene.draws.uniform(0.1, 2.0)))
        return {CLOCK: f"{jump}@{after:.2f}"}

    scene.begin(moved(), {number: moved() for number in range(scene.world.agents)})
    for _ in scene.instants():
        number = scene.draws.randrange(-1, scene.world.agents)
        if number < 0:
            scene.kill_coordinator()
            scene.world.serve(**moved())
        else:
            scene.kill_agent(number, **moved())


@contextlib.contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def fill(folder: Path) -> Path:
    """Leave no room on a small disk."""
    ballast = folder / "ballast"
    with contextlib.suppress(OSError), open(ballast, "wb", buffering=0) as file:
        while True:
            file.write(b"0" * 4096)
    return ballast


def disk_full(whose: str) -> Callable[[Scene], None]:
    def fault(scene: Scene) -> None:
        at_coordinator = whose == "coordinator"
        folder = scene.world.out if at_coordinator else scene.world.folder / "site-0-state"
        scene.disk.enter_context(small_disk(folder, 8 if at_coordinator else 4))
        scene.forgiving = at_coordinator
        scene.begin()
        for _ in scene.instants():
            ballast = fill(folder)
            time.sleep(scene.draws.uniform(0.3, 2.0))
            ballast.unlink()

    return fault


def at_point(point: str) -> Callable[[Scene], None]:
    def fault(scene: Scene) -> None:
        def variable() -> dict[str, str]:
            return {VARIABLE: f"{point}:{scene.draws.randrange(1, 4)}"} if scene.struck < STRIKES else {}

        scene.again = variable
        scene.victim = "agent" if point in AGENT_POINTS else "coordinator"
        number = scene.draws.randrange(scene.world.agents)
        scene.begin(variable() if scene.victim == "coordinator" else {}, {number: variable()})

    return fault


ASYNC = "asynchronous: "  # the same faults in asynchronous rounds
FAULTS: dict[str, Callable[[Scene], None]] = {
    "kill -9 coordinator": kill_coordinator,
    "kill -9 agent": kill_agent,
    "kill -9 both": kill_both,
    "cut": cut,
    "slow": slow,
    "drop": through(drop=0.05),
    "truncate": through(truncate=0.03),
    "corrupt": through(corrupt=0.03),
    "replay": through(replay=0.2),
    "clock": clock,
    "disk full, coordinator": disk_full("coordinator"),
    "disk full, agent": disk_full("agent"),
    **{
        f"kill at {point}": at_point(point)
        for point in (*COORDINATOR_POINTS, *AGENT_POINTS)
        if point not in TESTED_ELSEWHERE and point not in ASYNC_POINTS
    },
    f"{ASYNC}kill -9 coordinator": kill_coordinator,
    f"{ASYNC}kill -9 agent": kill_agent,
    f"{ASYNC}kill -9 both": kill_both,
    f"{ASYNC}cut": cut,
    **{
        f"{ASYNC}kill at {point}": at_point(point)
        for point in (*ASYNC_POINTS, "ledger.accepted", "coordinator.aggregate", "checkpoint.rename", "ledger.forget")
    },
}


@lru_cache
def undisturbed(secure: bool) -> dict[str, str | None]:
    """The SHA-256 of the run by the serial backend."""
    with tempfile.TemporaryDirectory() as folder:
        return serial_weights(SECURE_VALUES if secure else VALUES, Path(folder) / "serial")


def attempt(name: str, seed: int) -> tuple[int, str]:
    """One run: how often the fault struck, and why it was lost (empty: it survived)."""
    secure = name.startswith("kill at secure.")
    expected = undisturbed(secure)
    with tempfile.TemporaryDirectory(prefix="fedloom-fault-") as folder:
        values = SECURE_VALUES if secure else ASYNC_VALUES if name.startswith(ASYNC) else VALUES
        world = Federation(Path(folder), values, agents=2)
        scene = Scene(world, random.Random(f"{name} {seed}"), may_lose_rounds=name in COSTS_ROUNDS)
        try:
            FAULTS[name](scene)
            scene.finish()
            found = weights(world.out)
            why = "" if found == expected else f"another result: {found}"
            if secure:
                why = exposed(world) or ("" if name in COSTS_ROUNDS else why)
        except AssertionError as error:
            why = str(error) or "what was waited for did not happen"
        finally:
            world.stop()
            scene.disk.close()
            if scene.proxy is not None:
                scene.struck += scene.proxy.faults if scene.everything_counts else 0
                scene.proxy.close()
        return scene.struck, why


def exposed(world: Federation) -> str:
    """Say which sum was unmasked twice, or which file of an agent has a key of a secure sum; nothing if all is well."""
    for number in range(world.agents):
        unmasked = [tuple(one) for line in audit(world.folder, number) for one in line.get("unmasked", ())]
        if len(set(unmasked)) < len(unmasked):
            return f"site {number} helped to unmask a sum twice: {unmasked}"
        for file in (world.folder / f"site-{number}-state").rglob("*"):
            if file.is_file() and any(word in file.read_bytes() for word in (b"mask_key", b"channel_key")):
                return f"{file} has a key of a secure sum"
    return ""


class Frozen:
    """Notices when this process stood still: a machine that stops everything for minutes is no fault of the run."""

    def __init__(self) -> None:
        self.longest = 0.0
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            before = time.monotonic()
            time.sleep(0.2)
            self.longest = max(self.longest, time.monotonic() - before)


def strike(name: str, seed: int, frozen: Frozen) -> dict[str, Any]:
    """One run for the record; it is made again if it was lost while everything stood still."""
    for _ in range(3):
        frozen.longest = 0.0
        struck, why = attempt(name, seed)
        if not why or frozen.longest < 5.0:
            break
    return {"fault": name, "seed": seed, "struck": struck, "why": why}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", help="parts of the faults' names")
    parser.add_argument("--instants", type=int, default=55)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    chosen = [name for name in FAULTS if not given.names or any(part in name for part in given.names)]
    known: list[dict[str, Any]] = []
    if given.out and given.out.exists():
        known = [json.loads(line) for line in given.out.read_text().splitlines()]
    frozen = Frozen()
    print("| fault | runs | tried | survived | lost |\n| --- | --- | --- | --- | --- |", flush=True)
    for name in chosen:
        found = [one for one in known if one["fault"] == name]
        seed = max((one["seed"] for one in found), default=-1)
        while sum(min(one["struck"], STRIKES) for one in found) < given.instants and len(found) < given.instants:
            seed += 1
            found.append(strike(name, seed, frozen))
            if given.out:
                with open(given.out, "a") as file:
                    file.write(json.dumps(found[-1]) + "\n")
        print(row(name, found), flush=True)
        for one in found:
            if one["why"]:
                print(f"  seed {one['seed']}: {one['why']}", flush=True)
        assert any(one["struck"] for one in found), f"{name} was never reached"


def row(name: str, found: list[dict[str, Any]]) -> str:
    tried = sum(one["struck"] for one in found)
    lost = sum(max(one["struck"], 1) for one in found if one["why"])
    return f"| {name} | {len(found)} | {tried} | {tried - lost} | {lost} |"


if __name__ == "__main__":
    main()
