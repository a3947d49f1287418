"""Errors name the thing, the value and what is allowed, and have exit codes."""

import pickle

import pytest

from fedloom.errors import (
    UNKNOWN,
    FedloomError,
    InputError,
    ParameterError,
    QuorumError,
    RoundAbandoned,
    StoreError,
    TrainingError,
    nearest,
    unknown,
)


@pytest.mark.parametrize(
    ("kind", "code"),
    [(FedloomError, 1), (InputError, 2), (TrainingError, 1), (QuorumError, 3), (RoundAbandoned, 3), (StoreError, 1)],
)
def test_every_error_has_its_exit_code(kind: type[FedloomError], code: int) -> None:
    assert kind("message").exit_code == code
    assert str(kind("message")) == "message"


def test_an_input_error_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="not valid"):
        raise InputError("not valid")


def test_a_parameter_error_names_the_record_or_the_table_of_the_file() -> None:
    error = ParameterError("FedAvg", "lr", "must be more than 0", " Got 0 instead.")
    assert str(error) == "The 'lr' parameter of FedAvg must be more than 0. Got 0 instead."
    assert error.at("algorithm.fedavg") == "[algorithm.fedavg] lr must be more than 0. Got 0 instead."


def test_an_unknown_parameter_is_a_parameter_that_the_record_does_not_have() -> None:
    error = ParameterError("FedAvg", "lrr", UNKNOWN, " Did you mean 'lr'?")
    assert str(error) == "FedAvg has no parameter 'lrr'. Did you mean 'lr'?"
    assert error.at("run") == "[run] has no key 'lrr'. Did you mean 'lr'?"


def test_a_parameter_error_survives_the_way_from_a_worker_process() -> None:
    error = ParameterError("FedAvg", "lr", "is needed")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert again.parameter == "lr"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("momentun", " Did you mean 'momentum'?"),
        ("lr", " Did you mean 'lr'?"),
        ("unlike", ""),
        ("learning_rate", " Did you mean 'lr'?"),
        ("clients", " Did you mean 'count'?"),
        ("excel", ""),  # eeg has half of its letters
        ("mean_perimeter", ""),  # and magnesium of this
        ("fedaverage", " Did you mean 'fedavg'?"),
    ],
)
def test_only_a_similar_name_is_suggested(name: str, hint: str) -> None:
    assert nearest(name, ["lr", "momentum", "eeg", "magnesium", "fedavg", "count"]) == hint


def test_a_file_without_a_name_in_it_is_answered_with_how_to_write_it() -> None:
    said = str(unknown("model", "net.py", ["mlp"]))
    assert said == "'net.py' is a file: say which model in it you mean, as in 'net.py:Name'."


def test_capitals_do_not_hide_the_nearest_name() -> None:
    assert nearest("adamW", ["adam", "adamw"]) == " Did you mean 'adamw'?"
    assert nearest("ANN", ["Ann", "Ben"]) == " Did you mean 'Ann'?"
