"""The cost of releases: against reference numbers, and calibrated to a wanted ε."""

import pytest

from fedloom.errors import InputError
from fedloom.privacy.dp.accounting import Mechanism, epsilon, noise_multiplier

REFERENCE = [  # q, z, T, δ, RDP, PLD
    (1.0, 1.0, 1, 1e-5, 4.7285, 4.3772),
    (1.0, 1.0, 100, 1e-5, 96.116, 91.817),
    (0.01, 1.0, 1000, 1e-5, 2.1014, 1.8282),
    (0.01, 0.8, 1000, 1e-5, 3.6956, 3.1410),
    (0.01, 4.0, 10000, 1e-5, 1.0355, 0.9470),
    (0.1, 1.0, 100, 1e-5, 7.9039, 7.0466),
    (5000 / 763430, 1.0, 5000, 1e-9, 4.1833, 3.8988),
]


@pytest.mark.parametrize(("q", "z", "count", "delta", "rdp", "pld"), REFERENCE)
def test_epsilon_agrees_with_the_reference_table(
    q: float, z: float, count: int, delta: float, rdp: float, pld: float
) -> None:
    found = epsilon({Mechanism(z, q): count}, delta)
    assert found.rdp == pytest.approx(rdp, abs=1e-3)
    assert found.pld == found.value == pytest.approx(pld, abs=1e-3)


@pytest.mark.parametrize(("target", "wanted"), [(1.0, 1.4146), (2.0, 0.9591), (8.0, 0.5863)])
def test_the_noise_for_a_wanted_epsilon_is_that_of_the_reference(target: float, wanted: float) -> None:
    z = noise_multiplier(target, 1e-5, count=1000, q=0.01)
    assert z == pytest.approx(wanted, abs=1e-3)
    assert epsilon({Mechanism(z, 0.01): 1000}, 1e-5).value <= target


def test_every_member_in_every_round_is_not_amplified() -> None:
    assert Mechanism(1.0, 1.0, of=100).event() == Mechanism(1.0).event()
    assert Mechanism(1.0, 1.0, of=100).adjacency == "add or remove one"


def test_a_fixed_cohort_is_accounted_with_replacement_of_one_and_twice_the_sensitivity() -> None:
    import dp_accounting
    from dp_accounting import rdp

    fixed = Mechanism(2.0, 0.01, of=1000)
    assert fixed.adjacency == "replace one"
    accountant = rdp.RdpAccountant(None, dp_accounting.NeighboringRelation.REPLACE_ONE)
    inner = dp_accounting.GaussianDpEvent(1.0)
    accountant.compose(dp_accounting.SampledWithoutReplacementDpEvent(1000, 10, inner), 100)
    found = epsilon({fixed: 100}, 1e-5)
    assert found.value == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-12)
    assert found.pld is None
    assert found.value > epsilon({Mechanism(2.0, 0.01): 100}, 1e-5).value


def test_the_noise_of_fixed_cohorts_keeps_the_wanted_epsilon() -> None:
    z = noise_multiplier(4.0, 1e-5, count=50, q=0.1, of=100)
    assert 3.95 < epsilon({Mechanism(z, 0.1, of=100): 50}, 1e-5).value <= 4.0


def test_different_releases_compose() -> None:
    one = epsilon({Mechanism(1.0, 0.01): 10, Mechanism(2.0, 0.01): 10}, 1e-5)
    assert epsilon({Mechanism(2.0, 0.01): 20}, 1e-5).value < one.value < epsilon({Mechanism(1.0, 0.01): 20}, 1e-5).value
    assert epsilon({Mechanism(1.0): 2, Mechanism(1.0, 1.0, of=5): 2}, 1e-5).value == pytest.approx(
        epsilon({Mechanism(1.0): 4}, 1e-5).value, abs=1e-3
    )


def test_nothing_released_costs_nothing() -> None:
    assert epsilon({}, 1e-5).value == epsilon({Mechanism(1.0): 0}, 1e-5).value == 0.0


def test_fixed_and_independent_cohorts_share_no_epsilon() -> None:
    with pytest.raises(InputError, match="no ε covers both"):
        epsilon({Mechanism(1.0, 0.1): 1, Mechanism(1.0, 0.1, of=100): 1}, 1e-5)


def test_an_epsilon_that_no_noise_reaches_is_refused() -> None:
    with pytest.raises(InputError, match=r"No noise gives ε = 1e-08"):
        noise_multiplier(1e-8, 1e-12, count=10_000)


def test_the_noise_for_a_huge_epsilon_keeps_it_and_is_found_without_the_slow_accountant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fedloom.privacy.dp.accounting._pld", lambda *given: pytest.fail("this takes minutes"))
    z = noise_multiplier(1000.0, 1e-5, count=100)
    assert 990 < epsilon({Mechanism(z): 100}, 1e-5).value <= 1000
