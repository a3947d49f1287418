"""Every odd model is trained as plain torch trains it, in whatever way it is computed."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from fedloom.backends.serial import Serial
from fedloom.backends.vector import Workers
from fedloom.errors import FedloomError
from tests.conftest import slow_after
from tests.odd.harness import FEW_WAYS, compared, problems
from tests.odd.models import MODELS
from tests.odd.table import Odd

# a model that draws, or is quantised, says things that are no business of these tests
pytestmark = pytest.mark.filterwarnings("default")

ENTRIES = list(enumerate(MODELS))
TRAINED = [(number, entry) for number, entry in ENTRIES if not entry.refused and not entry.limit]
QUICK = [(number, entry) for number, entry in TRAINED if entry.quick]
REFUSED = [(number, entry) for number, entry in ENTRIES if entry.refused]


def names(entries: list[tuple[int, Odd]]) -> list[str]:
    return [entry.name for _, entry in entries]


def test_no_two_entries_have_the_same_name() -> None:
    assert len(set(names(ENTRIES))) == len(ENTRIES) >= 85


@pytest.mark.parametrize(("number", "entry"), slow_after(12, QUICK), ids=names(QUICK))
def test_in_this_process(number: int, entry: Odd) -> None:
    assert problems(compared(entry, number), FEW_WAYS) == []


@pytest.mark.slow
@pytest.mark.parametrize(("number", "entry"), TRAINED, ids=names(TRAINED))
def test_in_every_way(number: int, entry: Odd, pools: Callable[[int], Workers]) -> None:
    assert problems(compared(entry, number, [pools(1), pools(2), pools(3)])) == []


@pytest.mark.parametrize(("number", "entry"), REFUSED, ids=names(REFUSED))
def test_what_cannot_be_trained_is_refused_with_a_reason(number: int, entry: Odd) -> None:
    comparison = compared(entry, number)
    with pytest.raises(FedloomError) as refusal:
        comparison.run(Serial(comparison.federation, comparison.task, comparison.setup(1)))
    assert re.search(entry.refused, str(refusal.value))


def test_this_process_computes_as_workers_do() -> None:
    assert torch.get_num_threads() == 1
