"""Facts about this machine, and settings that a process needs before it multiplies its first matrices."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
