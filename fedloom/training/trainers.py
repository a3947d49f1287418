"""Choose how to train clients: one by one with plain or recorded steps, or side by side."""

from __future__ import annotations

from typing import Literal, Protocol

from fedloom.training.correction import reads_batch
from fedloom.training.fast_paths import reused
from fedloom.training.lanes import LaneTrainer, lane_trainer
from fedloom.training.local import SingleClientTrainer, client_tensors
from fedloom.training.recorded import RecordedTrainer
from fedloom.training.schedule import ClientResult, TrainingJob

LANES = 10  # fewer lanes do not pay for the cost of vmap
SMALL_MODEL = 256 * 1024  # bytes: above this, stacked weights leave the cache


class Trainer(Protocol):
    """A way to train clients. All ways give the same results."""

    def train(self, job: TrainingJob) -> list[ClientResult]:
        """Train all clients of a job: write their weights to `job.trained`, and return the rest in their order."""


def lanes(
    wanted: int | Literal["auto"],
    model_bytes: int = 0,
    cohort: int = 2 * LANES,
    batch_size: int | str | None = None,
    pooled: bool = False,
) -> int:
    """Return how many clients to train side by side; 1 means one after another, with recorded steps.

    This is the one rule that chooses. It reads sizes, never timings, because the choice decides the results' bits.
    It is applied before the first round, to choose what `auto` means, and to every job.

    Processor time of a round, in batches of ten (`python benchmarks/lanes.py`, 2026-11-16, one thread, AVX-512):

    | model | bytes | clients | one by one | ten side by side | ratio |
    | --- | --- | --- | --- | --- | --- |
    | digits_mlp | 9,640 | 100 | 55 ms | 35 ms | 0.54 |
    | mnist_2nn | 796,840 | 20 | 55 ms | 63 ms | 1.12 |
    | mnist_cnn | 6,653,480 | 20 | 673 ms | 672 ms | 1.01 |
    """
    if wanted == 1 or batch_size == "full" or pooled:
        return 1  # a full batch fills the machine by itself, and so does the one client that owns all examples
    if wanted != "auto":
        return wanted
    return LANES if model_bytes <= SMALL_MODEL and cohort >= 2 * LANES else 1


def trainer_for(job: TrainingJob) -> Trainer:
    """Return the trainer for a job; one of an earlier job, where that saves recording its steps again."""
    job.data.check_stacked(job.start, job.task.form)
    data, batch_size = job.data, job.training.batch_size
    if data.example_privacy is not None:
        from fedloom.privacy.dp.example_level import ExampleTrainer  # here, because most runs do not need it

        return ExampleTrainer(data.example_privacy)
    alone = data.ids == (data.federation.everyone,) or reads_batch(job.correct)
    alike = job.training.batch_sizes == {batch_size}  # lanes have one size
    if isinstance(batch_size, int) and alike and lanes(data.setup.group, batch_size=batch_size, pooled=alone) > 1:
        examples = (data.federation.x, data.federation.y)
        kinds = tuple((value.shape[1:], value.dtype) for value in examples)
        return reused(LaneTrainer, job, lambda: lane_trainer(job, batch_size), data.setup, kinds, data.federation.scale)
    if batch_size == "full" or not data.setup.replay:
        return SingleClientTrainer()
    task, training, correct = job.task, job.training, job.correct
    return reused(RecordedTrainer, job, lambda: RecordedTrainer(task, training, correct, client_tensors(job, 0)))
