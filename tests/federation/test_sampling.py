"""Which clients take part in a round."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom import keys
from fedloom.algorithms import FedAvg
from fedloom.errors import InputError
from fedloom.federation.engine import fit
from fedloom.federation.sampling import Sampling
from fedloom.task import Task
from tests.conftest import Dense, federation, last


@given(
    st.integers(1, 300),
    st.floats(0, 1, allow_subnormal=False),
    st.integers(1, 50),
    st.integers(0, 5),
    st.sampled_from(["fixed", "poisson", "window"]),
)
def test_a_client_never_takes_part_twice_in_a_round(
    population: int, fraction: float, round: int, seed: int, kind: Any
) -> None:
    sampling = Sampling(fraction=fraction, sampling=kind)
    drawn = sampling.draw(population, round, seed)
    assert list(drawn) == sorted(set(drawn))
    assert all(type(client) is int and 0 <= client < population for client in drawn)
    assert drawn == sampling.draw(population, round, seed)
    if kind != "poisson":
        assert len(drawn) == sampling.size(population)


@pytest.mark.parametrize(
    ("fraction", "population", "size"),
    [
        (0.0, 100, 1),
        (0.1, 100, 10),
        (0.004, 100, 1),
        (0.016, 100, 2),
        (0.25, 10, 3),
        (0.5, 7, 4),
        (1.0, 7, 7),
        (0.0, 1, 1),
    ],
)
def test_a_round_has_the_rounded_fraction_of_clients_and_never_none(
    fraction: float, population: int, size: int
) -> None:
    assert Sampling(fraction=fraction).size(population) == size
    assert len(Sampling(fraction=fraction).draw(population, 1, 0)) == size


def test_rounds_and_seeds_draw_other_clients() -> None:
    drawn = {Sampling(count=10).draw(1000, round, seed) for round in (1, 2, 3) for seed in (0, 1)}
    assert len(drawn) == 6


@pytest.mark.parametrize("count", [3, 12])
def test_every_client_is_drawn_about_equally_often(count: int) -> None:
    rounds = 2000
    times = np.bincount([c for r in range(1, rounds + 1) for c in Sampling(count=count).draw(20, r, 4)], minlength=20)
    expected = rounds * count / 20
    assert ((times - expected) ** 2 / expected).sum() < 45  # 19 degrees of freedom: above once in a thousand


@pytest.mark.parametrize("population", [1000, 1_000_000, 2_000_000_000])
def test_a_few_of_a_million_cost_as_much_as_a_few_of_a_thousand(
    population: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    hashes = keys.hashes

    def counting(key: int, count: int) -> Any:
        asked.append(count)
        return hashes(key, count)

    monkeypatch.setattr(keys, "hashes", counting)
    drawn = Sampling(count=10).draw(population, 1, 0)
    assert len(set(drawn)) == 10
    assert max(drawn) > population // 2
    assert sum(asked) <= 60


def test_poisson_draws_each_client_by_itself_at_the_rate() -> None:
    sampling = Sampling(fraction=0.1, sampling="poisson")
    sizes = [len(sampling.draw(500, round, 1)) for round in range(1, 201)]
    assert np.mean(sizes) == pytest.approx(50, abs=1.5)
    assert np.var(sizes) == pytest.approx(45, rel=0.35)
    assert Sampling(fraction=1.0, sampling="poisson").draw(50, 1, 0) == tuple(range(50))
    assert Sampling(fraction=1e-9, sampling="poisson").draw(50, 1, 0) == ()
    with pytest.raises(InputError, match="never draws a client"):
        Sampling(fraction=0.0, sampling="poisson")


def test_a_window_moves_by_one_client_and_comes_round_again() -> None:
    window = Sampling(count=3, sampling="window")
    assert [window.draw(5, round, 9) for round in (1, 2, 3, 4, 6)] == [
        (0, 1, 2),
        (1, 2, 3),
        (2, 3, 4),
        (0, 3, 4),
        (0, 1, 2),
    ]


def test_a_cohort_may_stay_for_several_rounds() -> None:
    for kind in ("fixed", "window", "poisson"):
        sampling = Sampling(fraction=0.4, sampling=kind, redraw_every=3)
        drawn = [sampling.draw(20, round, 0) for round in range(1, 8)]
        assert drawn[0] == drawn[1] == drawn[2] != drawn[3] == drawn[4] == drawn[5] != drawn[6]


def test_more_clients_than_there_are_and_a_quorum_out_of_reach_are_refused() -> None:
    with pytest.raises(InputError, match=r"^cohort\.count = 11, but there are only 10 clients\. Allowed: 1 to 10\.$"):
        Sampling(count=11).check(10)
    message = r"^cohort\.quorum = 4 can never be met: a round has 3 of 10 clients\.$"
    with pytest.raises(InputError, match=message):
        Sampling(count=3, quorum=4).check(10)
    Sampling(count=10, quorum=10).check(10)
    Sampling(count=3, quorum=1.0).check(10)


def test_fit_checks_the_cohort_before_it_trains() -> None:
    with pytest.raises(InputError, match=r"cohort\.count = 3, but there are only 2 clients"):
        last(fit(federation((9, 9)), Task(Dense), FedAvg(), 1, sampling=Sampling(count=3)))


@pytest.mark.parametrize(
    ("quorum", "needed"),
    [(0.0, 0), (0.5, 5), (0.51, 6), (1.0, 10), (3.0, 3)],
    ids=["none", "half", "more", "all", "three"],
)
def test_a_quorum_is_a_share_of_the_cohort_or_a_number(quorum: float, needed: int) -> None:
    assert Sampling(count=10, quorum=quorum).needed(100) == needed
