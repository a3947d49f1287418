"""The measuring side: processes that compute rounds on request, what else the machine is doing, medians and tables."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import select
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TICKS = os.sysconf("SC_CLK_TCK")


class Failed(Exception):
    """A measured system failed; the others continue."""


class System:
    """One measured process, which sleeps until it is asked to compute rounds."""

    def __init__(self, name: str, command: Sequence[str], log: Path, environment: dict[str, str] | None = None) -> None:
        self.name, self.log = name, log
        self.started: dict[int, str] = {}  # every descendant process seen so far, and when it began
        self.began = time.perf_counter()
        self._buffer = b""
        with open(log, "wb") as errors:
            self.process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **(environment or {})},
                start_new_session=True,  # Ctrl-C is for the parent, which then ends all of them
            )

    def ready(self, timeout: float = 600) -> dict[str, Any]:
        """Wait until everything is loaded, and return what the process reports about itself."""
        message = self._read(timeout)
        if "ready" not in message:
            raise Failed(f"{self.name} said {message} instead of being ready")
        return dict(message["ready"])

    def rounds(self, count: int, timeout: float = 1800) -> list[dict[str, Any]]:
        """Let it compute some rounds, and return one report each, with the seconds that it measured."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(f"go {count}\n".encode())
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None
        return [self._read(timeout) for _ in range(count)]

    def _read(self, timeout: float) -> dict[str, Any]:
        assert self.process.stdout is not None
        limit = time.monotonic() + timeout
        while b"\n" not in self._buffer:
            if not select.select([self.process.stdout], [], [], max(limit - time.monotonic(), 0))[0]:
                raise Failed(f"{self.name} did not answer within {timeout:.0f} s (log: {self.log})")
            found = os.read(self.process.stdout.fileno(), 65536)
            if not found:
                raise self._ended()
            self._buffer += found
        line, _, self._buffer = self._buffer.partition(b"\n")
        return dict(json.loads(line))

    def _ended(self) -> Failed:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return Failed(f"{self.name} ended with code {self.process.poll()}: {' '.join(lines[-1:])} (log: {self.log})")

    def tree(self) -> set[int]:
        """Return the process and its descendants that are still running."""
        for pid in descendants(self.process.pid):
            self.started.setdefault(pid, _birth(pid))
        return {pid for pid, birth in self.started.items() if birth and _birth(pid) == birth}

    def close(self) -> None:
        """Ask it to end, and end what is left of it: some simulators leave daemons behind."""
        self.tree()
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for pid in self.tree() - {self.process.pid}:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if self.process.stdout is not None:
            self.process.stdout.close()


def descendants(root: int) -> set[int]:
    """Return a process and its descendants (Linux)."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            children.setdefault(int(_stat(folder)[1]), []).append(int(folder.name))
    found, todo = set(), [root]
    while todo:
        pid = todo.pop()
        found.add(pid)
        todo.extend(children.get(pid, ()))
    return found


def _stat(folder: Path) -> list[str]:
    """The fields of /proc/PID/stat behind the command's name, which may hold anything."""
    return (folder / "stat").read_text().rpartition(")")[2].split()


def _birth(pid: int) -> str:
    """Return when a process began: ids are reused, so an id alone does not identify a process."""
    try:
        return _stat(Path(f"/proc/{pid}"))[19]
    except (OSError, IndexError):
        return ""


def cpu_seconds(pids: set[int]) -> float:
    """Return the processor time of some processes and of their ended children."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError):
            total += sum(int(field) for field in _stat(Path(f"/proc/{pid}"))[11:15])
    return total / TICKS


def memory_peak(pids: set[int]) -> int:
    """Bytes: the peaks of some processes, added up. Pages that they share count in each."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError):
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith("VmHWM"):
                    total += int(line.split()[1]) * 1024
    return total


def busy_seconds() -> tuple[float, float]:
    """Processor time that all processes of this machine used, and that the host used for others, since its start."""
    try:
        fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    except (OSError, ValueError):
        return 0.0, 0.0
    user, nice, system, _idle, _waiting, interrupt, soft, stolen = fields
    return (user + nice + system + interrupt + soft) / TICKS, stolen / TICKS


@dataclass
class Watch:
    """How busy the machine was with things that are not measured, as a fraction of all its cores."""

    pids: set[int]

    def __enter__(self) -> Watch:
        self._before = (time.perf_counter(), *busy_seconds(), cpu_seconds(self.pids))
        return self

    def __exit__(self, *failure: object) -> None:
        began, busy, stolen, own = self._before
        now_busy, now_stolen = busy_seconds()
        cores = (time.perf_counter() - began) * (os.cpu_count() or 1)
        self.cpu = cpu_seconds(self.pids) - own
        self.own = self.cpu / cores
        self.others = max((now_busy - busy) / cores - self.own, 0.0)
        self.stolen = (now_stolen - stolen) / cores


def wait_for_calm(share: float | None, patience: float = 60) -> None:
    """Wait until other processes use at most this fraction of the machine, up to a time limit."""
    limit = time.monotonic() + patience
    while share is not None and time.monotonic() < limit:
        busy = busy_seconds()[0]
        time.sleep(0.5)
        if (busy_seconds()[0] - busy) / (0.5 * (os.cpu_count() or 1)) <= share:
            return


def machine() -> dict[str, Any]:
    """Cores, processor and caches: what timings depend on."""
    name, caches = platform.processor(), {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    for cache in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        with contextlib.suppress(OSError):
            level, kind, size = ((cache / field).read_text().strip() for field in ("level", "type", "size"))
            caches[f"L{level}{'' if kind == 'Unified' else kind[0].lower()}"] = size
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cores": os.cpu_count(),
        "cpu": name,
        "caches": caches,
        "memory_gb": round(memory / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "when": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def describe_machine(facts: dict[str, Any]) -> str:
    """One line about the machine."""
    caches = ", ".join(f"{level} {size}" for level, size in facts["caches"].items())
    return f"{facts['cores']} cores, {facts['cpu']}, {caches}; {facts['memory_gb']} GB; {facts['when']}"


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """Median, quartiles and extremes."""
    if not seconds:
        return {}
    quartiles = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else [seconds[0]] * 3
    return {
        "median": statistics.median(seconds),
        "q1": quartiles[0],
        "q3": quartiles[2],
        "least": min(seconds),
        "most": max(seconds),
        "count": len(seconds),
    }


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)


def short(seconds: float) -> str:
    """Format seconds with three significant digits."""
    return f"{seconds:.4g}" if seconds < 1 else f"{seconds:.3g}"


def write(name: str, text: str, facts: dict[str, Any], out: Path) -> None:
    """Write a result as Markdown and JSON."""
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.md").write_text(text + "\n")
    (out / f"{name}.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(f"written: {out / name}.md and .json", file=sys.stderr)


class Ticker:
    """One line of progress on stderr: rewritten in a terminal, every ten seconds elsewhere."""

    def __init__(self) -> None:
        self._last = 0.0

    def say(self, text: str, always: bool = False) -> None:
        """Show the current state."""
        if sys.stderr.isatty():
            print(f"\r\x1b[2K{text}", end="\n" if always else "", file=sys.stderr, flush=True)
        elif always or time.monotonic() - self._last >= 10:
            self._last = time.monotonic()
            print(text, file=sys.stderr, flush=True)
