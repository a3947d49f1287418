"""How fast each compression method encodes and decodes a change on one core, and how many bytes are left.

    python benchmarks/compression.py [--numbers 25000000]

The change is drawn from a normal distribution, times 0.01, beside weights of deviation 0.05 that `lossless` takes the
difference from. Every method is timed three times; the best counts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from fedloom.compression.method import Draws, form_of
from fedloom.compression.methods import METHODS
from fedloom.compression.methods.lossless import bits

WIDTH = 1000  # of the matrix that holds the numbers


def best(work: Callable[[], Any], times: int = 3) -> tuple[float, Any]:
    """Return the shortest of some times, and what the work gave."""
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        found = work()
        seconds.append(time.perf_counter() - began)
    return min(seconds), found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--numbers", type=int, default=25_000_000)
    count = parser.parse_args().numbers // WIDTH * WIDTH
    torch.set_num_threads(1)
    draws, generator = Draws(1, 2), torch.Generator().manual_seed(0)
    moved = 0.01 * torch.randn(count // WIDTH, WIDTH, generator=generator)
    start = 0.05 * torch.randn(count // WIDTH, WIDTH, generator=generator)
    form, megabytes = form_of({"w": moved}), 4 * count / 1e6
    print(f"{'method':10}{'encode MB/s':>14}{'decode MB/s':>14}{'bytes per 1,000 numbers':>26}")
    for name, kind in METHODS.items():
        method = kind()
        change = {"w": bits(start + moved) - bits(start)} if method.exact else {"w": moved}
        packing, (parts, _) = best(lambda method=method, change=change: method.pack(change, draws, {}))
        unpacking, _ = best(lambda method=method, parts=parts: method.unpack(parts, form, draws))
        taken = sum(part.numel() * part.element_size() for part in parts.values())
        print(f"{name:10}{megabytes / packing:14,.0f}{megabytes / unpacking:14,.0f}{1000 * taken / count:26,.1f}")


if __name__ == "__main__":
    main()
