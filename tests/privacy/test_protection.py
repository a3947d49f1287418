"""What every protection refuses."""

from __future__ import annotations

from typing import Any

import pytest

import fedloom as fl
from fedloom.errors import InputError
from fedloom.federation.engine import fit
from fedloom.privacy.protection import Protection, check_plan
from fedloom.privacy.table import PrivacyTable, SecureTable
from fedloom.task import Task
from tests.conftest import Dense
from tests.conftest import federation as some_clients


@pytest.mark.parametrize("algorithm", [fl.Selective(), fl.FedAvg(rule="median"), fl.EvaluationWeighted()])
def test_an_algorithm_that_shows_each_update_is_refused(algorithm: fl.Algorithm) -> None:
    table = PrivacyTable(secure_aggregation=SecureTable())
    protection = Protection(table, fl.Sampling(), 3, 1)
    with pytest.raises(InputError, match=r"each of them|makes some public"):
        next(fit(some_clients((12, 9, 7)), Task(Dense), algorithm, 1, protection=protection))


@pytest.mark.parametrize(
    ("table", "cohort", "algorithm", "words"),
    [
        ({"dp": {"epsilon": 1.0}}, {}, fl.FedAvg(), "bound on how much one client counts"),
        ({"dp": {"epsilon": 1.0}}, {"quorum": 0.5}, fl.FedAvg(weights="uniform"), "quorum"),
        ({"example_dp": {"epsilon": 1.0}}, {}, fl.IFCA(), "in another way"),
    ],
)
def test_differential_privacy_that_does_not_fit_is_refused_before_anything_is_loaded(
    table: dict[str, Any], cohort: dict[str, Any], algorithm: fl.Algorithm, words: str
) -> None:
    with pytest.raises(InputError, match=words):
        check_plan(PrivacyTable(**table), fl.Sampling(**cohort), [algorithm])
    check_plan(PrivacyTable(), fl.Sampling(**cohort), [algorithm])
    local = PrivacyTable(dp={"epsilon": 1.0, "clip": 1.0, "noise": "local"})
    check_plan(local, fl.Sampling(**cohort), [algorithm])
