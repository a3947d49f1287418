"""What every protection refuses."""

from __future__ import annotations

import pytest

import fedloom as fl
from fedloom.errors import InputError
from fedloom.federation.engine import fit
from fedloom.privacy.protection import Protection
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
