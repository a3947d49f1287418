"""The base classes of algorithms and what updates declare."""

import inspect
import re
from typing import ClassVar

import pytest
import torch

from fedloom.algorithm import Algorithm, Update, without
from fedloom.algorithms import CLASSES, FedAvg, FedDC, FedDyn, OpenAIES, QFedAvg, Scaffold
from fedloom.errors import InputError
from fedloom.federation.engine import fit
from fedloom.task import Task
from fedloom.training.settings import Training
from tests.conftest import Dense, federation


def test_training_parameters_may_be_given_directly() -> None:
    assert FedAvg(lr=0.5) == FedAvg(train=Training(lr=0.5))
    assert FedAvg(train=Training(epochs=3), lr=0.5).train == Training(epochs=3, lr=0.5)


def test_weights_are_for_all_groups_or_for_each() -> None:
    one, two = torch.tensor([1.0]), torch.tensor([2.0])
    assert Update({"a": {}}, one).weights("a") is one
    assert Update({"a": {}, "b": {}}, {"a": one, "b": two}).weights("b") is two


def test_an_algorithm_without_round_says_so() -> None:
    with pytest.raises(NotImplementedError, match="Algorithm is abstract: it does not define round"):
        Algorithm().round({}, None)  # type: ignore[arg-type]


def test_an_algorithm_has_no_init_of_its_own() -> None:
    with pytest.raises(InputError, match=r"^Mine defines __init__, .* as in `mu: float = 0\.1`"):

        class Mine(FedAvg):
            def __init__(self, mu: float = 0.1) -> None:
                self.mu = mu


def test_a_setting_of_an_algorithm_has_a_type() -> None:
    with pytest.raises(InputError, match=r"^Mine\.mu has no type\. Write `mu: float = 0\.5` .* or _mu for a constant"):

        class Mine(FedAvg):
            mu = 0.5

    class Constants(FedAvg):
        _mu = 0.5
        takes_stale = True

    assert Constants()._mu == 0.5


def test_a_rule_shows_the_server_each_answer() -> None:
    assert FedAvg().linear
    assert not FedAvg(rule="median").linear


def test_without_leaves_the_named_leaves_out() -> None:
    assert list(without({"a": torch.ones(1), "b": torch.ones(1)}, ["a"])) == ["b"]


def test_algorithms_that_divide_by_the_number_of_clients_say_that_none_can_join_late() -> None:
    dividing = {
        name
        for name, kind in CLASSES.items()
        if re.search(r"cohort\.(population|share)\b", inspect.getsource(kind.round))
    }
    assert dividing == {"FedDC", "FedDyn", "OpenAIES", "Scaffold"}
    assert FedDC().needs_all_from_start
    assert FedDyn().needs_all_from_start
    assert Scaffold().needs_all_from_start
    assert OpenAIES(travels="fitness").needs_all_from_start
    assert not OpenAIES().needs_all_from_start
    assert not FedAvg().needs_all_from_start


@pytest.mark.parametrize("kind", [FedDC, QFedAvg, Scaffold])
def test_a_schedule_that_ends_at_zero_is_refused_at_the_start_where_the_formula_divides_by_lr(
    kind: type[Algorithm],
) -> None:
    ends = kind(schedule={"name": "cosine", "over": 3})
    with pytest.raises(InputError, match="lowers to 0 in round 4"):
        next(fit(federation((5, 6)), Task(Dense), ends, 5))
    assert [record.round for record in fit(federation((5, 6)), Task(Dense), ends, 3)] == [1, 2, 3]


def test_an_algorithm_refuses_the_keys_of_training_that_it_names_and_uneven_rates() -> None:
    class Strict(FedAvg):
        """Averages what clients learn with one rate and without clipping."""

        has_one_rate = True
        refuses: ClassVar[dict[str, str]] = {"clip": "Strict never clips. Leave it out."}

    assert Strict(lr=0.2, momentum=0.9).train.momentum == 0.9
    with pytest.raises(InputError, match=r"^Strict never clips\. Leave it out\. Got clip = 1\.0\.$"):
        Strict(clip=1.0)
    with pytest.raises(InputError, match=r"^Strict's formula has one learning rate"):
        Strict(local_schedule={"name": "exponential", "factor": 0.9})
