"""Which steps are recorded."""

from fedloom.task import Task
from fedloom.training.local import Training, client_tensors
from fedloom.training.recorded import RecordedTrainer
from tests.conftest import (
    Dense,
)
from tests.training.helpers import job_of


def test_whole_batches_are_recorded_and_short_ones_only_of_small_models() -> None:
    def recorded(task: Task) -> list[int]:
        training = Training(batch_size=100)
        trainer = RecordedTrainer(task, training, None, client_tensors(job_of(task, training), 0))
        return [count for count in (1, 32, 33, 99, 100) if trainer.records(count)]

    assert recorded(Task(Dense)) == [1, 32, 100]
    assert recorded(Task("mnist_cnn")) == [100]
