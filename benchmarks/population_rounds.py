"""Rounds in a large federation, on request: clients with 1 to 20 examples of 32 one-byte features each, 100 a round."""

from __future__ import annotations

import argparse
import os
import resource
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))

from harness import memory_peak
from protocol import Line
from settings import add_settings, settings

MOST, FEATURES, CLASSES, COHORT = 20, 32, 10, 100


def main() -> None:
    """Build the federation, say what that cost, and run until the parent ends the run."""
    line = Line()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=1_000_000)
    add_settings(parser)
    options = parser.parse_args()

    import numpy as np
    from fedloom_work import NOTHING, Reference, setup_for

    import fedloom as fl
    from fedloom.backends.vector import Vector
    from fedloom.machine import cores

    random = np.random.default_rng(0)
    owner = np.repeat(np.arange(options.clients), random.integers(1, MOST + 1, options.clients))
    x = random.integers(0, 256, (len(owner), FEATURES), dtype=np.uint8)
    y = random.integers(0, CLASSES, len(owner))
    arrays = peak()
    began = time.perf_counter()
    federation = fl.Federation.from_arrays(x, y, client=owner, split=(1, 0, 0))
    built = time.perf_counter() - began
    after = peak()
    del x, y, owner
    task = fl.Task("mlp", args={"features": FEATURES, "hidden": [32], "classes": CLASSES})
    work = Reference(federation, task, fl.FedAvg(lr=0.01, batch_size=10), fl.Sampling(count=COHORT))
    chosen = settings(options)
    setup = setup_for(work, chosen["group"])
    began = time.perf_counter()
    backend = Vector(federation, task, setup, options.workers or cores())
    shared = time.perf_counter() - began
    records = fl.fit(
        federation, task, work.algorithm, 10**9, sampling=work.sampling, evaluation=NOTHING, backend=backend
    )
    line.ready(
        clients=options.clients,
        examples=len(federation.y),
        build_seconds=built,
        share_seconds=shared,
        memory_of_arrays=arrays,
        memory_after_build=after,
        group=setup.group,
    )
    while line.wait():
        next(records)
        line.done()
    backend.close()


def peak() -> int:
    """Bytes that this process has used at most. (Linux's getrusage would count what its parent used before, too.)"""
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return memory_peak({os.getpid()})


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # handing back gigabytes one object at a time takes longer than the benchmark
