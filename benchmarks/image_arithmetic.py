"""How fast one core trains and evaluates the CNN for natural images: plain, channels last, bfloat16, and both.

    python benchmarks/image_arithmetic.py

Milliseconds of processor time, the least of a few repetitions, so that other work on the machine matters little.
Memory is handled as in worker processes. Python reads such settings at its start, so the program starts itself again.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from itertools import product

import torch
from torch.nn.functional import cross_entropy

from fedloom.backends.vector import KEEP_MEMORY
from fedloom.models.natural_images_cnn import NaturalImagesCNN

ROWS, REPETITIONS = 32, 4


def milliseconds(work: Callable[[], object]) -> float:
    """Return the processor time of a piece of work."""
    times = []
    for _ in range(REPETITIONS):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return 1e3 * min(times)


def measure(layout: torch.memory_format, bfloat16: bool) -> tuple[float, float]:
    """Return how long a step and a forward pass take."""
    torch.manual_seed(1)
    x, y = torch.rand(ROWS, 3, 80, 80).to(memory_format=layout), torch.randint(8, (ROWS,))
    model = NaturalImagesCNN().to(memory_format=layout)
    parameters = list(model.parameters())

    def forward() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            return model(x).float()

    step = milliseconds(lambda: torch.autograd.grad(cross_entropy(forward(), y), parameters))
    with torch.no_grad():
        return step, milliseconds(forward)


def main() -> None:
    """Print a table."""
    torch.set_num_threads(1)
    print(f"{'layout':15} {'numbers':9} {'step, ms':>9} {'forward, ms':>12}   of {ROWS} images")
    layouts = {"plain": torch.contiguous_format, "channels last": torch.channels_last}
    for (name, layout), bfloat16 in product(layouts.items(), (False, True)):
        step, forward = measure(layout, bfloat16)
        print(f"{name:15} {'bfloat16' if bfloat16 else 'float32':9} {step:9.0f} {forward:12.0f}")


if __name__ == "__main__":
    if not KEEP_MEMORY.keys() <= os.environ.keys():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**KEEP_MEMORY, **os.environ})
    main()
