"""The loss of a batch is what the user's function says of the batch, in whatever way it is computed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fedloom.backends.vector import Workers
from tests.odd.harness import FEW_WAYS, compared, problems
from tests.odd.losses import LOSSES
from tests.odd.table import Odd

ENTRIES = list(enumerate(LOSSES))
QUICK = [(number, entry) for number, entry in ENTRIES if entry.quick]


def names(entries: list[tuple[int, Odd]]) -> list[str]:
    return [entry.name for _, entry in entries]


def test_no_two_entries_have_the_same_name() -> None:
    assert len(set(names(ENTRIES))) == len(ENTRIES) >= 25


@pytest.mark.parametrize(("number", "entry"), QUICK, ids=names(QUICK))
def test_in_this_process(number: int, entry: Odd) -> None:
    assert problems(compared(entry, number), FEW_WAYS) == []


@pytest.mark.slow
@pytest.mark.parametrize(("number", "entry"), ENTRIES, ids=names(ENTRIES))
def test_in_every_way(number: int, entry: Odd, pools: Callable[[int], Workers]) -> None:
    assert problems(compared(entry, number, [pools(1), pools(2), pools(3)])) == []
