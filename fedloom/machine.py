"""Facts about this machine, and settings that a process needs before it multiplies its first matrices."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from fedloom.errors import InputError


def prepare_environment() -> None:
    """Fix MKL's code path: otherwise a client's bits depend on the lane it is in and on how its memory is aligned.

    MKL reads this once, at its first product, so it is set when fedloom is imported. It costs nothing measurable. A
    value that you have set stays.
    """
    flags = ""
    if platform.machine() in ("x86_64", "AMD64") and Path("/proc/cpuinfo").exists():
        flags = Path("/proc/cpuinfo").read_text()
    os.environ.setdefault("MKL_CBWR", "AVX512" if "avx512f" in flags else "AVX2")


def has_worker_processes() -> bool:
    """Whether the vector backend can start workers here: not on Windows."""
    return os.name == "posix"


def prepare_process() -> None:
    """Use one torch thread and no denormal numbers, in a process that only computes clients."""
    import torch

    torch.set_num_threads(1)
    torch.set_flush_denormal(True)


_before: list[int] = []  # torch's threads before the outermost `computing`


@contextmanager
def computing() -> Iterator[None]:
    """Use the settings of `prepare_process` for a while, in a process that also does other work."""
    import torch

    _before.append(torch.get_num_threads())
    prepare_process()
    try:
        yield
    finally:
        threads = _before.pop()
        if not _before:
            torch.set_num_threads(threads)
            torch.set_flush_denormal(False)


def cores() -> int:
    """Return the number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


WORKER_BYTES = (
    250_000_000  # that a worker process takes before it has work: 160 MB of its own were measured, and more later
)
WORKERS_PER_CORE = 8  # more would only wait for each other


def free_memory() -> int | None:
    """Return the bytes of memory that new processes can use, also inside a container; None if the system hides it."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        pages = os.sysconf_names.get("SC_PHYS_PAGES") if hasattr(os, "sysconf_names") else None
        return None if pages is None else os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and used.is_file() and limit.read_text().strip().isdecimal():
        free = min(free, int(limit.read_text()) - int(used.read_text()))
    return max(free, 0)


def worker_count(wanted: int | Literal["auto"]) -> int:
    """Return how many worker processes to start. Raise if they are more than this machine can hold."""
    free = free_memory()
    most = WORKERS_PER_CORE * cores()
    most = most if free is None else min(most, max(free // WORKER_BYTES, 1))
    if wanted == "auto":
        return min(cores(), most)
    if wanted > most:
        memory = "" if free is None else f" and {free / 1e9:.1f} GB of free memory"
        raise InputError(
            f"[run] workers = {wanted} is more than this machine can hold: its {cores()} cores{memory} are enough for "
            f'{most}, at {WORKERS_PER_CORE} per core and {WORKER_BYTES // 1_000_000} MB each. "auto" starts '
            f"{min(cores(), most)}."
        )
    return wanted


def device(wanted: str) -> str:
    """Return the device to use. `auto` is a GPU if there is one."""
    import torch

    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=wanted)
    except Exception as error:
        raise InputError(f'[run] device = "{wanted}" cannot be used here: {str(error).splitlines()[0]}') from None
    return wanted


def facts() -> dict[str, Any]:
    """Return what the bits of a result depend on. It is recorded with every run."""
    import numpy
    import torch

    from fedloom import __version__

    return {
        "fedloom": __version__,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "mkl_cbwr": os.environ.get("MKL_CBWR", ""),
        "cores": cores(),
    }
