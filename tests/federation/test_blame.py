"""Errors in your own code name the round, the client, the file and the line; fedloom's own errors stay as they are."""

from __future__ import annotations

from typing import Any

import pytest

from fedloom.algorithm import Clients, Cohort, Groups, Task, Update
from fedloom.algorithms.fedavg import FedAvg
from fedloom.backends.serial import Serial
from fedloom.errors import InputError, TrainingError
from fedloom.federation.engine import Evaluation, fit
from fedloom.federation.work import Work
from fedloom.training.probe import probe
from tests.conftest import ALL_TRAIN, Dense, federation


class Picky(FedAvg):
    """Cannot compute a client with 7 examples."""

    def client(self, task: Task, shared: Groups, own: Groups, data: Clients) -> tuple[Update, Groups]:
        if 7 in data.examples.tolist():
            raise ValueError("seven")
        return super().client(task, shared, own, data)


class Alone(FedAvg):
    """Cannot compute several clients together."""

    def client(self, task: Task, shared: Groups, own: Groups, data: Clients) -> tuple[Update, Groups]:
        if len(data) > 1:
            raise ValueError("too many")
        return super().client(task, shared, own, data)


class Forgetful(FedAvg):
    """Fails in its server half, in round 2."""

    def round(self, state: Groups, cohort: Cohort) -> Groups:
        if cohort.round == 2:
            raise KeyError("momentum")
        return super().round(state, cohort)


class Counting(FedAvg):
    """Keeps a number in itself."""

    def round(self, state: Groups, cohort: Cohort) -> Groups:
        self.rounds = cohort.round
        return super().round(state, cohort)


class Unstacked(FedAvg):
    """Forgets that a client method works on several clients at once."""

    def client(self, task: Task, shared: Groups, own: Groups, data: Clients) -> tuple[Update, Groups]:
        start = shared["model"]
        trained = self.fit(task, start, shared, own, data)
        return self.answer(shared, trained, data), trained.own


class Refusing(FedAvg):
    """Raises an error of fedloom's."""

    def round(self, state: Groups, cohort: Cohort) -> Groups:
        raise InputError("Not today.")


class Together(Serial):
    """Performs all clients of a round at once."""

    def run(self, work: Work) -> Any:
        return work.perform(self.place)


def train(algorithm: FedAvg, together: bool = True) -> None:
    data, task = federation((5, 7, 9), split=ALL_TRAIN), Task(Dense)
    backend = (Together if together else Serial)(data, task, probe(data, task).setup(group=3 if together else 1))
    list(fit(data, task, algorithm, 2, evaluation=Evaluation(splits=()), backend=backend))


@pytest.mark.parametrize("together", [True, False])
def test_the_client_that_fails_is_found_among_those_that_are_computed_together(together: bool) -> None:
    with pytest.raises(TrainingError) as failed:
        train(Picky(), together)
    message = str(failed.value)
    assert message.startswith("Round 1, client 'client-1', Picky.client: ValueError: seven\n")
    assert "test_blame.py, line " in message
    assert 'raise ValueError("seven")' in message


def test_an_error_of_clients_together_says_so() -> None:
    with pytest.raises(TrainingError, match=r"^Round 1, client 'client-0', Alone.client and 2 others together: ValueE"):
        train(Alone())


def test_the_servers_half_is_named_with_its_round() -> None:
    with pytest.raises(
        TrainingError, match=r"^Round 2, the server's half of Forgetful: KeyError: 'momentum'\n"
    ) as failed:
        train(Forgetful())
    assert 'raise KeyError("momentum")' in str(failed.value)


def test_an_algorithm_that_is_changed_says_where_its_state_belongs() -> None:
    with pytest.raises(TrainingError, match=r"Counting\.rounds cannot be set: .* `init` and `round` return") as failed:
        train(Counting())
    assert "self.rounds = cohort.round" in str(failed.value)


@pytest.mark.parametrize("together", [True, False])
def test_a_model_that_is_not_stacked_says_what_to_write(together: bool) -> None:
    with pytest.raises(TrainingError, match=r'give them expand\(shared\["model"\], len\(data\)\)') as failed:
        train(Unstacked(), together)
    assert "self.fit(task, start, shared, own, data)" in str(failed.value)


def test_errors_of_fedloom_stay_as_they_are() -> None:
    with pytest.raises(InputError, match=r"^Not today\.$"):
        train(Refusing())
