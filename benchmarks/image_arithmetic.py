"""How fast one core trains and evaluates a published CNN: plain, channels last, bfloat16, and both.

    python benchmarks/image_arithmetic.py
    python benchmarks/image_arithmetic.py --model mnist_cnn --rows 10

Milliseconds of processor time, the least of a few repetitions, so that other work on the machine matters little.
Memory is handled as in worker processes. Python reads such settings at its start, so the program starts itself again.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from itertools import product

import torch
from torch.nn.functional import cross_entropy

from fedloom.backends.vector import KEEP_MEMORY
from fedloom.models.mnist_cnn import MnistCNN
from fedloom.models.natural_images_cnn import NaturalImagesCNN

MODELS = {"natural_images_cnn": NaturalImagesCNN, "mnist_cnn": MnistCNN}
REPETITIONS = 4


def milliseconds(work: Callable[[], object]) -> float:
    """Return the processor time of a piece of work."""
    times = []
    for _ in range(REPETITIONS):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return 1e3 * min(times)


def measure(name: str, rows: int, layout: torch.memory_format, bfloat16: bool) -> tuple[float, float]:
    """Return how long a step and a forward pass take."""
    torch.manual_seed(1)
    model = MODELS[name]().to(memory_format=layout)
    x, y = torch.rand(rows, *model.inputs).to(memory_format=layout), torch.randint(8, (rows,))
    parameters = list(model.parameters())

    def forward() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            return model(x).float()

    step = milliseconds(lambda: torch.autograd.grad(cross_entropy(forward(), y), parameters))
    with torch.no_grad():
        return step, milliseconds(forward)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="natural_images_cnn")
    parser.add_argument("--rows", type=int, default=32, help="images in a batch (default: 32)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'layout':15} {'numbers':9} {'step, ms':>9} {'forward, ms':>12}   of {options.rows} images")
    layouts = {"plain": torch.contiguous_format, "channels last": torch.channels_last}
    for (name, layout), bfloat16 in product(layouts.items(), (False, True)):
        step, forward = measure(options.model, options.rows, layout, bfloat16)
        print(f"{name:15} {'bfloat16' if bfloat16 else 'float32':9} {step:9.1f} {forward:12.1f}")


if __name__ == "__main__":
    if not KEEP_MEMORY.keys() <= os.environ.keys():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**KEEP_MEMORY, **os.environ})
    main()
