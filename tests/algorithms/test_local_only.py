"""Training alone."""

from dataclasses import replace
from itertools import pairwise

import numpy as np

from fedloom import tree
from fedloom.algorithms import LocalOnly
from fedloom.federation.engine import Evaluation, fit
from fedloom.federation.sampling import Sampling
from fedloom.task import Task
from tests.algorithms.linear import LR, RANGES, START, descend, linear_task, two_clients
from tests.conftest import Dense, federation, last

QUIET = Evaluation(splits=())


def test_every_client_descends_on_its_own_data() -> None:
    record = last(fit(two_clients(), linear_task(), LocalOnly(lr=LR, batch_size="full"), 3, evaluation=QUIET))
    assert record.state == {}
    for client, rows in enumerate(RANGES):
        w = START
        for _ in range(3):
            w = descend(w, rows)
        np.testing.assert_allclose(record.own[client]["model"]["weight"].numpy().ravel(), w[:2], rtol=1e-14)


def test_no_client_learns_from_another() -> None:
    task, data = Task(Dense), federation((12, 30, 21))
    other = replace(data, x=data.x.clone())
    other.x[12:] += 5.0
    one = last(fit(data, task, LocalOnly(batch_size=8), 2, evaluation=QUIET))
    two = last(fit(other, task, LocalOnly(batch_size=8), 2, evaluation=QUIET))
    assert tree.sha256(one.own[0]["model"]) == tree.sha256(two.own[0]["model"])
    assert tree.sha256(one.own[1]["model"]) != tree.sha256(two.own[1]["model"])


def test_a_client_that_is_not_drawn_keeps_what_it_has() -> None:
    task, data = Task(Dense), federation((12, 30, 21))
    records = list(fit(data, task, LocalOnly(batch_size=8), 4, sampling=Sampling(count=1), seed=1))
    for record in records:
        assert tuple(record.own) == record.cohort
    pauses = [
        (before, after)
        for before, after in pairwise(records)
        for client in range(3)
        if client not in before.cohort
        and before.clients["pre_fit"][client]["test"] != after.clients["pre_fit"][client]["test"]
    ]
    assert pauses == []
