"""Early stopping returns the weights of the best epoch: algorithms that count steps count those that led there."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fedloom.algorithms import FedAvg, FedNova, Scaffold
from fedloom.data.federation import Federation
from fedloom.data.split import Split
from fedloom.federation.engine import Evaluation, RoundRecord, fit
from fedloom.federation.work import Place
from fedloom.task import Task
from fedloom.testing.ways import InProcess
from fedloom.training.probe import probe
from tests.conformance.transcriptions import Attendance
from tests.conftest import Dense, federation

QUIET = Evaluation(splits=())
BATCH, LR = 4, 0.2
STOPPING = {"lr": LR, "batch_size": BATCH, "epochs": 12.0, "patience": 3}


def noisy() -> Federation:
    """Labels that cannot be learnt at client 0, and hardly at client 1: training makes the validation loss worse."""
    data = federation((24, 40), seed=3, split=Split(train=0.5, validation=0.5, test=0.0))
    data.y[:24] = torch.from_numpy(np.random.default_rng(0).integers(0, 3, 24))
    return data


def flat(model: dict[str, torch.Tensor]) -> NDArray[np.float64]:
    return np.concatenate([leaf.numpy().ravel() for leaf in model.values()])


def best_steps(record: RoundRecord, data: Federation) -> list[int]:
    """From the history: the epochs up to the lowest validation loss, in steps."""
    found = []
    for report in record.reports:
        losses = [epoch["validation_loss"] for epoch in report.history]
        per_epoch = -(-len(data.indices(report.client, "train")) // BATCH)
        assert int(np.argmin(losses)) + 1 < len(losses), "a test of patience needs epochs that are thrown away"
        found.append((int(np.argmin(losses)) + 1) * per_epoch)
    return found


def alone(data: Federation, task: Task, client: int) -> NDArray[np.float64]:
    """What one client's training returns."""
    (record,) = fit(data, task, FedAvg(**STOPPING), 1, sampling=Attendance(rounds=((client,),)), evaluation=QUIET)
    return flat(record.state["model"])


@pytest.mark.parametrize("group", [1, 2])
def test_scaffold_divides_by_the_steps_that_led_to_the_returned_weights(group: int) -> None:
    task, data = Task(Dense, dtype="float64"), noisy()
    backend = InProcess(Place(data, task, probe(data, task).setup(group=group)), ())
    (record,) = fit(data, task, Scaffold(**STOPPING), 1, evaluation=QUIET, backend=backend)
    start = flat(task.initial())
    for client, steps in enumerate(best_steps(record, data)):
        expected = (start - alone(data, task, client)) / (steps * LR)
        np.testing.assert_allclose(flat(record.own[client]["control"]), expected, rtol=1e-7, atol=1e-9)


def test_fednova_normalises_by_the_steps_that_led_to_the_returned_weights() -> None:
    task, data = Task(Dense, dtype="float64"), noisy()
    (record,) = fit(data, task, FedNova(**STOPPING, weights="uniform"), 1, evaluation=QUIET)
    start, steps = flat(task.initial()), best_steps(record, data)
    taken = [len(report.history) * (3 if report.client == 0 else 5) for report in record.reports]
    assert steps[0] / taken[0] != steps[1] / taken[1], "otherwise it makes no difference"
    changes = [(alone(data, task, client) - start) / steps[client] for client in range(2)]
    np.testing.assert_allclose(
        flat(record.state["model"]), start + np.mean(steps) * np.mean(changes, axis=0), rtol=1e-9, atol=1e-12
    )
