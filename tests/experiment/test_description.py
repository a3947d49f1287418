"""What differs between two descriptions of experiments."""

from __future__ import annotations

from typing import Any

from fedloom.experiment.description import differences


def test_a_mark_for_missing_values_is_no_difference() -> None:
    one, other = ({"missing": {"-999": float("nan")}, "fill": [float("nan")], "lr": lr} for lr in (1, 1.0))
    assert differences(one, other) == []
    assert differences(one, {**other, "missing": {"-999": 0.0}}) == ["missing.-999: NaN → 0.0"]


def test_a_difference_of_hashes_is_said_in_words() -> None:
    one = {"data": "a1" * 32, "code": ["a1" * 32, "torch.nn.Linear"], "values": {"loss": "a1" * 32}}
    other = {"data": "b2" * 32, "code": ["b2" * 32, "torch.nn.Linear"], "values": {"loss": "b2" * 32}}
    of_value = "a value in the code of loss has changed"
    assert differences(one, {**other, "code": one["code"]}) == ["data has changed", of_value]
    assert differences(one, other) == ["your code has changed", "data has changed"]  # it says the rest


def test_what_only_follows_from_a_changed_model_is_not_listed() -> None:
    def described(code: str, model: str, init: str) -> dict[str, Any]:
        return {"code": [code * 32], "values": {"model": model * 32}, "task": {"init": init * 32}}

    before = described("a1", "a1", "a1")
    assert differences(before, described("b2", "b2", "b2")) == ["your code has changed"]
    value = ["a value in the code of model has changed"]
    assert differences(before, described("a1", "b2", "b2")) == value
    other_weights = ["your code has changed", "task.init has changed"]  # of an algorithm: the model is the same
    assert differences(before, described("b2", "a1", "b2")) == other_weights


def test_a_file_that_changed_is_named_once_however_many_classes_are_in_it() -> None:
    """What changed may be another class, or a comment: the hash is that of the file."""
    names = ("mine.py:Net", "mine.py:Sam", "sub/helper.py")
    one, other = ({"code": dict.fromkeys(names, sha * 32)} for sha in ("a1", "b2"))
    assert differences(one, other) == [
        "the file mine.py has changed",
        "the file sub/helper.py has changed",
    ]
    more = {"code": {**one["code"], "mine.py:New": "a1" * 32}}
    assert differences(one, more) == ["code.mine.py:New: added"]
