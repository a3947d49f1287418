"""The rule that chooses how clients are trained, and trainers that are used again."""

from torch import nn

from fedloom.task import Task
from fedloom.training.local import SingleClientTrainer, Training
from fedloom.training.probe import probe
from fedloom.training.recorded import RecordedTrainer
from fedloom.training.trainers import LANES, lanes, trainer_for
from tests.conftest import FEATURES, Cumulative, Dense, federation
from tests.training.helpers import Prox, job_of


def test_the_automatic_group_depends_on_the_model_and_the_cohort_alone() -> None:
    small = probe(federation((20,)), Task(Dense))
    assert small.bytes == 4 * (FEATURES * 7 + 7 + 7 * 3 + 3)
    assert lanes("auto", small.bytes, cohort=2 * LANES) == LANES
    assert lanes("auto", small.bytes, cohort=2 * LANES - 1) == 1
    large = probe(federation((20,)), Task(lambda: nn.Sequential(nn.Linear(FEATURES, 10_000), nn.Linear(10_000, 3))))
    assert lanes("auto", large.bytes, cohort=1000) == 1
    assert probe(federation((20,)), Task(Cumulative)).setup(group=LANES).group == 1


def test_a_full_batch_and_a_pooled_client_are_never_trained_side_by_side() -> None:
    assert lanes(4, batch_size=32) == 4
    assert lanes(4, batch_size="full") == 1
    assert lanes(4, batch_size=32, pooled=True) == 1


def test_full_batches_are_trained_with_plain_steps() -> None:
    assert isinstance(trainer_for(job_of(Task(Dense), Training(batch_size="full"))), SingleClientTrainer)


def test_a_trainer_is_found_again_when_an_equal_algorithm_comes_from_another_process() -> None:
    task = Task(Dense)

    def trainer(mu: float) -> object:
        return trainer_for(job_of(task, correct=Prox(mu=mu).correct))

    assert isinstance(trainer(0.5), RecordedTrainer)
    assert trainer(0.5) is trainer(0.5)
    assert trainer(0.7) is not trainer(0.5)
