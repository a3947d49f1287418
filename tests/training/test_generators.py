"""Models may draw from the global generators, which are restored afterwards."""

import random
from contextlib import suppress

import numpy as np
import pytest
import torch

from fedloom.training import generators


def draw() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), float(np.random.random())


def test_the_same_key_gives_the_same_draws_and_another_key_others() -> None:
    with generators.lent():
        drawn = []
        for key in (5, 5, 6):
            generators.seed(key)
            drawn.append(draw())
    assert drawn[0] == drawn[1]
    assert all(one != other for one, other in zip(drawn[0], drawn[2], strict=True))


def test_the_generators_are_restored_also_after_an_error() -> None:
    before = generators.positions()
    with suppress(ZeroDivisionError), generators.lent():
        generators.seed(1)
        draw()
        raise ZeroDivisionError
    assert generators.positions() == before


@pytest.mark.parametrize("source", [torch.rand, random.random, np.random.random], ids=["torch", "python", "numpy"])
def test_any_draw_shows_in_the_positions(source: object) -> None:
    with generators.lent():
        generators.seed(1)
        before = generators.positions()
        source(1) if source is torch.rand else source()  # type: ignore[operator]
        assert generators.positions() != before


def test_a_use_inside_another_continues_its_draws() -> None:
    with generators.lent():
        generators.seed(3)
        first = draw()
        generators.seed(3)
        with generators.lent():
            assert draw() == first
        assert draw() != first


def test_numpys_second_normal_number_of_a_pair_is_not_lost() -> None:
    np.random.seed(1)
    expected = [np.random.normal(), np.random.normal(), np.random.normal()]
    np.random.seed(1)
    found = [np.random.normal()]
    with generators.lent():
        generators.seed(3)
        np.random.normal()
    found += [np.random.normal(), np.random.normal()]
    assert found == expected
