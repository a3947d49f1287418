"""The fault matrix: faults of every kind at seeded instants, with real processes over TLS. No bit may change.

    python -m tests.network.faults                    # everything, 20 instants each: about an hour
    python -m tests.network.faults --instants 3 cut   # some

A run survives if it ends by itself with the SHA-256 of an undisturbed run. Prints a table in Markdown, and fails if
one of the named instants was never reached.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fedloom.faults import AGENT_POINTS, COORDINATOR_POINTS
from tests.network.conftest import EXPERIMENT, Federation, serial_weights, wait_for, weights
from tests.network.proxy import Proxy

# SCAFFOLD: clients keep a control variate, so that a state that is lost or counted twice changes the result
VALUES: dict[str, Any] = {
    **EXPERIMENT,
    "rounds": 4,
    "train": {"epochs": 2},
    "cohort": {"deadline": "10m", "quorum": 1.0},
    "algorithm": {"scaffold": {}},
}


def finish(world: Federation, seconds: float = 600.0) -> None:
    """Until the run is over; whoever was killed is started again."""
    end = time.monotonic() + seconds
    killed = -signal.SIGKILL
    while time.monotonic() < end:
        assert world.coordinator is not None
        code = world.coordinator.poll()
        if code == 0:
            return
        if code == killed or (code == 1 and getattr(world, "forgiving", False) and "Traceback" not in world.log()):
            world.serve()
        elif code is not None:
            raise AssertionError(f"the coordinator ended with {code}: {world.log()[-2000:]}")
        for number, process in list(world.processes.items()):
            if process.poll() == killed:
                world.join(number)
        time.sleep(0.1)
    raise AssertionError(f"the run did not end: {world.log()[-2000:]}")


def begin(
    world: Federation, serve: dict[str, str] | None = None, agents: dict[int, dict[str, str]] | None = None
) -> None:
    world.serve(**(serve or {}))
    for number in range(world.agents):
        world.join(number, **(agents or {}).get(number, {}))


def rounds_done(world: Federation) -> int:
    """How many rounds are checkpointed."""
    folder = world.out / "cells" / "scaffold-1"
    found = [int(path.stem.split("-")[1]) for path in folder.glob("round-*.json")] if folder.is_dir() else []
    return max(found, default=0)


def at_some_instant(world: Federation, draws: random.Random) -> None:
    """Somewhere inside the run: after a drawn round, and a drawn moment later."""
    wanted = draws.randrange(0, int(world.values["rounds"]) - 1)
    wait_for(lambda: rounds_done(world) >= wanted and (wanted or (world.out / "run.db").exists()), 300)
    time.sleep(draws.uniform(0.0, 0.6))


def kill_coordinator(world: Federation, draws: random.Random) -> None:
    begin(world)
    at_some_instant(world, draws)
    assert world.coordinator is not None
    world.coordinator.kill()
    world.coordinator.wait()
    world.serve()


def kill_agent(world: Federation, draws: random.Random) -> None:
    begin(world)
    at_some_instant(world, draws)
    world.processes[draws.randrange(world.agents)].kill()


def kill_both(world: Federation, draws: random.Random) -> None:
    begin(world)
    at_some_instant(world, draws)
    assert world.coordinator is not None
    world.coordinator.kill()
    world.coordinator.wait()
    world.processes[0].kill()
    world.serve()


def _through_proxy(world: Federation, draws: random.Random, **faults: Any) -> Proxy:
    proxy = Proxy(world.port, seed=draws.randrange(1 << 30), **faults)
    world.serve()
    for number in range(world.agents):
        world.join(number, url=f"https://127.0.0.1:{proxy.port}")
    return proxy


def cut(world: Federation, draws: random.Random) -> None:
    proxy = _through_proxy(world, draws)
    at_some_instant(world, draws)
    proxy.cut(draws.uniform(0.5, 3.0))


def slow(world: Federation, draws: random.Random) -> None:
    _through_proxy(world, draws, delay=draws.uniform(0.02, 0.2))


def drop(world: Federation, draws: random.Random) -> None:
    _through_proxy(world, draws, drop=0.05)


def truncate(world: Federation, draws: random.Random) -> None:
    _through_proxy(world, draws, truncate=0.05)


def corrupt(world: Federation, draws: random.Random) -> None:
    _through_proxy(world, draws, corrupt=0.03)


def clock(world: Federation, draws: random.Random) -> None:
    """The clock of one agent or of the coordinator jumps by an hour, at the start or in the middle of the run."""
    jump, after = draws.choice(("-3600", "3600")), draws.choice((0.0, draws.uniform(3.0, 8.0)))
    who = draws.randrange(3)
    moved = {"FEDLOOM_CLOCK": f"{jump}@{after:.2f}"}
    begin(world, moved if who == 2 else {}, {who: moved} if who < 2 else {})


def replay(world: Federation, draws: random.Random) -> None:
    """Every piece of every connection is recorded, and whole connections are played again."""
    _through_proxy(world, draws, replay=0.2)


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


def disk_full_coordinator(world: Federation, draws: random.Random) -> None:
    world.disk = contextlib.ExitStack()  # type: ignore[attr-defined]
    world.disk.enter_context(small_disk(world.out, 8))  # type: ignore[attr-defined]
    begin(world)
    at_some_instant(world, draws)
    ballast = fill(world.out)
    time.sleep(draws.uniform(0.5, 4.0))
    ballast.unlink()
    world.forgiving = True  # type: ignore[attr-defined]  # it may stop with a clear message, and is then started again


def disk_full_agent(world: Federation, draws: random.Random) -> None:
    world.disk = contextlib.ExitStack()  # type: ignore[attr-defined]
    state = world.folder / "site-0-state"
    world.disk.enter_context(small_disk(state, 4))  # type: ignore[attr-defined]
    begin(world)
    at_some_instant(world, draws)
    ballast = fill(state)
    time.sleep(draws.uniform(0.5, 4.0))
    ballast.unlink()


def at_point(point: str) -> Callable[[Federation, random.Random], None]:
    def fault(world: Federation, draws: random.Random) -> None:
        variable = {"FEDLOOM_KILL_AT": f"{point}:{draws.randrange(1, 5)}"}
        if point in AGENT_POINTS:
            number = draws.randrange(world.agents)
            begin(world, agents={number: variable})
            world.victim = world.processes[number]  # type: ignore[attr-defined]
        else:
            begin(world, serve=variable)
            world.victim = world.coordinator  # type: ignore[attr-defined]

    return fault


FAULTS: dict[str, Callable[[Federation, random.Random], None]] = {
    "kill -9 coordinator": kill_coordinator,
    "kill -9 agent": kill_agent,
    "kill -9 both": kill_both,
    "cut": cut,
    "slow": slow,
    "drop": drop,
    "truncate": truncate,
    "corrupt": corrupt,
    "replay": replay,
    "clock": clock,
    "disk full, coordinator": disk_full_coordinator,
    "disk full, agent": disk_full_agent,
    **{f"kill at {point}": at_point(point) for point in (*COORDINATOR_POINTS, *AGENT_POINTS)},
}


def attempt(name: str, seed: int, expected: dict[str, str | None]) -> tuple[str, str]:
    """One fault at one instant: survived, lost, or not reached."""
    with tempfile.TemporaryDirectory(prefix="fedloom-fault-") as folder:
        world = Federation(Path(folder), VALUES, agents=2)
        try:
            FAULTS[name](world, random.Random(f"{name} {seed}"))
            finish(world)
            victim = getattr(world, "victim", None)
            if victim is not None and victim.poll() != -signal.SIGKILL:
                return "not reached", ""
            if weights(world.out) != expected:
                return "lost", f"another result: {weights(world.out)}"
            return "survived", ""
        except AssertionError as error:
            return "lost", str(error)
        finally:
            world.stop()
            if hasattr(world, "disk"):
                world.disk.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", help="parts of the faults' names")
    parser.add_argument("--instants", type=int, default=20)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    chosen = [name for name in FAULTS if not given.names or any(part in name for part in given.names)]
    with tempfile.TemporaryDirectory() as folder:
        expected = serial_weights(VALUES, Path(folder) / "serial")
    print("| fault | tried | survived | lost |\n| --- | --- | --- | --- |", flush=True)
    for name in chosen:
        found: list[tuple[str, str]] = []
        for seed in range(given.first, given.first + given.instants):
            found.append(attempt(name, seed, expected))
            if given.out:
                with open(given.out, "a") as file:
                    file.write(json.dumps({"fault": name, "seed": seed, "outcome": found[-1]}) + "\n")
        outcomes = [outcome for outcome, _ in found]
        reached = len(outcomes) - outcomes.count("not reached")
        print(f"| {name} | {reached} | {outcomes.count('survived')} | {outcomes.count('lost')} |", flush=True)
        for _, why in found:
            if why:
                print(f"  {why}", flush=True)
        assert reached, f"{name} was never reached"


if __name__ == "__main__":
    main()
