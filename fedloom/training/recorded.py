"""Train one client at a time with recorded steps: each step of `local.py` is recorded once, and then replayed.

See `tape.py` for how a step is recorded. A model that cannot be recorded is trained with plain steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fedloom import keys
from fedloom.task import Task
from fedloom.training import generators
from fedloom.training.correction import Correct, has_hooks
from fedloom.training.evaluation import batch
from fedloom.training.fast_paths import load_shared, must_agree, watched_step
from fedloom.training.local import StepTensors, client_step, step_on_rows, train_client
from fedloom.training.schedule import ClientResult, ClientSchedule, TrainingJob
from fedloom.training.settings import Training
from fedloom.training.tape import CannotRecord, Tape, recorded
from fedloom.tree import size

SMALL_BATCH, SMALL_MODEL = 32, 4_000_000  # examples in the last batch of an epoch, and bytes of a model
BYTES_AT_ONCE = 1_000_000  # prepare this much of an epoch at once: more would not fit the cache


class RecordedTrainer:
    """Trains one client after another in the same tensors, which never move, so that a recorded step fits them all."""

    def __init__(self, task: Task, training: Training, correct: Correct | None, tensors: StepTensors) -> None:
        self.task, self.training, self.correct, self.tensors = task, training, correct, tensors
        self.model_bytes = size({name: tensors.parameters[name] for name in task.trainable})
        self.tapes: dict[tuple[Any, ...], tuple[Tape | None, list[Tensor]]] = {}  # and their inputs, by shapes
        self.cannot_record = ""  # why the last attempt to record failed

    def train(self, job: TrainingJob) -> list[ClientResult]:
        """Train all clients of a job."""
        return [self._train_client(job, position) for position in range(len(job.data))]

    def _train_client(self, job: TrainingJob, position: int) -> ClientResult:
        load_shared(self.tensors.shared, job)
        try:
            return train_client(job, position, self.tensors, self._take_steps)
        except Exception:
            # a replayed failure shows some steps later: plain steps fail at the very step, and name it
            train_client(job, position, self.tensors)
            raise

    def _take_steps(self, job: TrainingJob, schedule: ClientSchedule, tensors: StepTensors) -> int:
        """Train on as many batches as fit the cache: replayed where the step is recorded, else one plain step each."""
        data, batch_size = job.data, schedule.batch_size
        example_bytes = max(data.federation.x[0].numel() * self.task.torch_dtype.itemsize, 1)
        rows = schedule.next_rows(max(BYTES_AT_ONCE // example_bytes // batch_size, 1))
        batches = torch.split(rows, batch_size)
        columns = [list(torch.split(part, batch_size)) for part in batch(data, rows, self.task)]
        if data.setup.masked:
            columns.append([schedule.dropout_key(ahead) for ahead in range(len(batches))])
        first = [column[0] for column in columns]
        tape, inputs = self.tape_for(first, lambda: _other_batch(job, schedule, first))
        watched = watched_step(data, schedule.position, schedule.total) - schedule.steps
        for ahead, values in enumerate(zip(*columns, strict=True)):
            if tape is None:
                step_on_rows(job, schedule, tensors, batches[ahead], ahead)
                continue
            if tensors.rate is not None:
                tensors.rate.fill_(schedule.rate(ahead))
            for target, value in zip(inputs, values):  # noqa: B905 (this loop runs hundreds of times a second)
                target.copy_(value)
            self._compare(tape, inputs) if ahead == watched else tape.replay()
        return len(batches)

    def _compare(self, tape: Tape, inputs: Sequence[Tensor]) -> None:
        """Take a step twice, replayed and plain. Raise if the results differ."""
        changing = self.tensors.changing()
        before = [leaf.clone() for leaf in changing]
        with self.task.python_state.fresh():
            self._step_on(self.tensors, *(value.clone() for value in inputs))
        plain = [leaf.clone() for leaf in changing]
        for leaf, was in zip(changing, before, strict=True):
            leaf.copy_(was)
        tape.replay()
        for was, wanted, leaf in zip(before, plain, changing, strict=True):
            # one by one: a long leaf must not hide a difference in another
            must_agree({0: was}, {0: wanted}, {0: leaf}, "the recorded step")

    def _step_on(self, tensors: StepTensors, x: Tensor, y: Tensor, *key: Tensor) -> None:
        # a model may change its input, and a correction may use the batch again
        passes = lambda: [(x.clone() if self.correct else x, y, key[0] if key else None)]  # noqa: E731
        client_step(self.task, self.training, self.correct, tensors, passes, len(y))

    def tape_for(self, given: Sequence[Tensor], other: Callable[[], Sequence[Tensor]]) -> tuple[Tape | None, Any]:
        """Return the recorded step for batches of these shapes and its inputs; None where steps are not recorded.

        A batch is examples, labels and, for models with dropout, a key. `other` returns another batch of these shapes.
        """
        if not self.records(len(given[0])):
            return None, []
        shapes = tuple(value.shape for value in given)
        if shapes not in self.tapes:
            inputs = [value.clone() for value in given]
            self.tapes[shapes] = self._record(inputs, other()), inputs
        return self.tapes[shapes]

    def _record(self, inputs: list[Tensor], other: Sequence[Tensor]) -> Tape | None:
        state, tensors = self.task.python_state, self.tensors
        try:
            if has_hooks(tensors.parameters.values()):
                raise CannotRecord("the model has hooks on its parameters")
            with state.fresh(), generators.lent():
                tape = recorded(self._step_on, (tensors, *inputs), inputs, tensors.changing, other)
                if state.changed():
                    raise CannotRecord("the model or the loss keeps something in Python from one call to the next")
            return tape
        except CannotRecord as reason:
            self.cannot_record = str(reason)
            return None

    def records(self, count: int) -> bool:
        """Whether steps on `count` examples are recorded. Every size needs its own tape, and tapes take memory.

        Whole batches are. The last batch of an epoch is only if it and the model are small.
        """
        return count in self.training.batch_sizes or (count <= SMALL_BATCH and self.model_bytes <= SMALL_MODEL)


def _other_batch(job: TrainingJob, schedule: ClientSchedule, like: Sequence[Tensor]) -> list[Tensor]:
    """Return another batch of the same size to try a recording on: rows drawn with repetition, some of them changed."""
    drawn = keys.hashes(job.data.key(schedule.position, "trial"), len(like[1])) * len(schedule.rows) >> 32
    x, y = batch(job.data, schedule.rows[torch.from_numpy(drawn)], job.task)
    if x.is_floating_point():
        x[: (len(x) + 1) // 2] *= 0.5
    return [x, y, *(key + 1 for key in like[2:])]
