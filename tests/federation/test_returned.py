"""What an algorithm's methods return is checked, and an error names the method, its file and its line."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fedloom.algorithms import FedAvg
from fedloom.errors import InputError
from fedloom.federation.engine import Evaluation, fit
from fedloom.task import Task
from tests.conftest import Dense, federation


class Changed(FedAvg):
    """FedAvg whose methods return something else."""

    def init(self, *given: Any) -> Any:
        return changed["init"](super().init(*given))

    def init_own(self, *given: Any) -> Any:
        return changed["init_own"]({"count": {"n": torch.zeros(())}})

    def round(self, *given: Any) -> Any:
        return changed["round"](super().round(*given))

    def client(self, task: Any, shared: Any, own: Any, data: Any) -> Any:
        return changed["client"](*super().client(task, shared, own, data))


def same(*values: Any) -> Any:
    return values[0] if len(values) == 1 else values


changed: dict[str, Any] = {}


@pytest.mark.parametrize(
    ("method", "returns", "message"),
    [
        ("init", lambda state: None, r"None\. It must return a dict of named trees"),
        ("init", lambda state: {"model": 3}, r"an int as \['model'\]\. It must return a tree there: a dict of named"),
        ("init_own", lambda own: None, r"None\. It must return a dict of named trees"),
        (
            "round",
            lambda state: {"modle": state["model"]},
            r"a state without 'model', with 'modle'\. It must return all ",
        ),
        ("round", lambda state: {"model": {}}, r"'model' with the leaves nothing\. It must return the leaves '"),
        (
            "round",
            lambda state: {"model": {name: leaf[:1] for name, leaf in state["model"].items()}},
            r"a tensor of shape \(1, 16\) and torch.float32 as 'model'\['\S+'\]\. It must return a tensor of shape \(",
        ),
        (
            "client",
            lambda update, own: update,
            r"an Update\. It must return an Update and what its clients keep, as in",
        ),
        ("client", lambda update, own: (own, update), r"a tuple of 2\. It must return an Update and what its clients"),
        ("client", lambda update, own: (update, None), r"None as own\. It must return a dict of named trees"),
        (
            "client",
            lambda update, own: (update, {}),
            r"an own with nothing\. It must return an own with 'count', as init",
        ),
        (
            "client",
            lambda update, own: (update, {"count": 1}),
            r"an int as own\['count'\]\. It must return a tree there",
        ),
        (
            "client",
            lambda update, own: (update, {"count": {"n": 1}}),
            r"an int as own\['count'\]\['n'\]\. It must return",
        ),
        (
            "client",
            lambda update, own: (update, {"count": {"n": torch.zeros(())}}),
            r"a tensor of shape \(\) and torch.float32 as own\['count'\]\['n'\]\. It must return a row for each of",
        ),
        (
            "client",
            lambda update, own: (update, {"count": {"n": own["count"]["n"].long()}}),
            r"a tensor of shape \(1,\) and torch.int64 as own\['count'\]\['n'\]\. It must return .*float32, as it was",
        ),
        (
            "client",
            lambda update, own: (replace(update, weight=3.0), own),
            r"a float as the weight of 'model'\. It must return a tensor with one weight for each of the 1 clients",
        ),
        (
            "client",
            lambda update, own: (replace(update, public={"score": 3.0}), own),
            r"a float as Update\['public'\]\['score'\]\. It must return a tensor there",
        ),
    ],
)
def test_what_a_method_returns_is_checked(method: str, returns: Any, message: str) -> None:
    changed.update(dict.fromkeys(("init", "init_own", "round", "client"), same))
    changed[method] = returns
    with pytest.raises(InputError, match=rf"^Changed\.{method} \(\S*test_returned\.py, line \d+\) returned {message}"):
        list(fit(federation((5, 7)), Task(Dense), Changed(), 1, evaluation=Evaluation(splits=())))


def test_a_group_of_the_server_other_than_the_model_may_grow() -> None:
    changed.update(dict.fromkeys(("init_own", "client"), same))
    changed["init"] = lambda state: {**state, "people": {"all": torch.zeros(1)}}
    changed["round"] = lambda state: {**state, "people": {"all": torch.cat([state["people"]["all"], torch.ones(1)])}}
    *_, last = fit(federation((5, 7)), Task(Dense), Changed(), 3, evaluation=Evaluation(splits=()))
    assert last.state["people"]["all"].tolist() == [0, 1, 1, 1]
