"""The settings of local training: what fits together, whose they are, and which learning rate follows."""

from __future__ import annotations

from typing import Any

import pytest

from fedloom.errors import InputError
from fedloom.training.settings import Training


def test_keys_of_later_versions_leave_the_identity_of_older_runs_alone() -> None:
    later = {"centered", "schedule", "local_schedule", "clients"}
    assert later <= Training.model_fields.keys()
    assert not later & Training().model_dump().keys()
    assert not any(key in repr(Training()) for key in later)
    used = Training(schedule={"name": "exponential", "factor": 0.5}, clients=[{"name": "a", "lr": 0.2}])
    assert {"schedule", "clients"} <= used.model_dump(mode="json").keys()
    assert "factor=0.5" in repr(used)
    assert Training(**used.model_dump()) == used


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"optimizer": "nesterov"}, "needs a momentum"),
        ({"optimizer": "adam", "momentum": 0.5}, '\'momentum\' is for optimizer = "sgd" or "nesterov" or "rmsprop"'),
        ({"centered": True}, '\'centered\' is for optimizer = "rmsprop", not for "sgd"'),
        ({"schedule": {"name": "cosine"}}, "over is needed for a cosine"),
        ({"schedule": {"name": "step", "evry": 3}}, r"^\[train.schedule\] has no key 'evry'.*Did you mean 'every'"),
        ({"clients": [{"name": "a", "lr": 0}]}, r"^\[train.clients\] lr must be more than 0"),
        ({"clients": [{"name": "a", "lr": 0.1}, {"name": "a"}]}, "names 'a' twice"),
        ({"clients": {"a": {"lr": 0.1}}}, "clients"),
        ({"optimizer": "rmsprob"}, "Did you mean 'rmsprop'"),
    ],
)
def test_settings_that_do_not_fit_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Training(**keys)


def test_a_client_that_does_not_exist_is_refused_with_the_nearest_name() -> None:
    training = Training(clients=[{"name": "nroth", "lr": 0.1}])
    with pytest.raises(InputError, match=r"there is no client 'nroth'\. Did you mean 'north'"):
        training.check_clients(lambda: ["north", "south"])
    Training(clients=[{"name": "north"}]).check_clients(lambda: ["north", "south"])
    Training().check_clients(lambda: pytest.fail("nobody needs the names"))


def test_the_rate_is_that_of_the_round_the_step_and_the_client() -> None:
    halves, cosine = {"name": "exponential", "factor": 0.5}, {"name": "cosine", "over": 2}
    training = Training(lr=0.4, schedule=halves, local_schedule=cosine, clients=[{"name": "b", "lr": 0.8}])
    assert training.lr_at(1) == 0.4
    assert training.lr_at(3, 1) == pytest.approx(0.4 * 0.25 * 0.5)
    assert training.of("b").lr_at(2) == 0.4
    assert training.of("a") is training
    longer = Training(clients=[{"name": "b", "epochs": 2.0, "batch_size": "full"}])
    assert (longer.of("b").epochs, longer.of("b").batch_size, longer.with_epochs(5).of("b").epochs) == (2, "full", 5)


def test_a_formula_that_divides_by_the_rate_refuses_a_schedule_that_reaches_zero() -> None:
    cosine = Training(schedule={"name": "cosine", "over": 3})
    cosine.refuse_zero_rates("SCAFFOLD", 3)
    with pytest.raises(InputError, match=r"^SCAFFOLD divides by the learning rate, which .* lowers to 0 in round 4\."):
        cosine.refuse_zero_rates("SCAFFOLD", 5)
    Training(schedule={"name": "exponential", "factor": 0.5}).refuse_zero_rates("SCAFFOLD", 50)
    Training().refuse_zero_rates("SCAFFOLD", 5)
