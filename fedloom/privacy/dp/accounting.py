"""What releases cost: ε at a given δ, by Google's `dp-accounting`.

The reported ε is that of privacy loss distributions (PLD), which is tight. Rényi accounting (RDP) is a second, looser
bound, and the only one for cohorts of a fixed size and for noise of whole numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from fedloom.discovery import optional
from fedloom.errors import InputError

FINEST, COARSEST = 2e-5, 1e-3  # steps between privacy losses: finer ones take longer, coarser ones overstate ε
LARGEST = 1e5  # noise multiplier
MEANINGLESS = 500.0  # an ε that protects nobody, and for which PLD takes minutes
MOST_SEARCHED = 100.0  # an ε up to which PLD is fast enough to search the noise for it


def library(part: str = "") -> Any:
    """Return dp-accounting, or a part of it. It is loaded when it is first needed, because that takes a second."""
    name = f"dp_accounting.{part}" if part else "dp_accounting"
    logging.getLogger("absl").setLevel(logging.ERROR)  # it reports every order of RDP that it leaves out
    return optional(name, "Differential privacy needs dp-accounting", "privacy")


@dataclass(frozen=True)
class Mechanism:
    """One release: Gaussian noise on the sum over those who were drawn at random."""

    noise_multiplier: float  # standard deviation / the most that one who joins or leaves changes the sum by
    q: float = 1.0  # the probability of being drawn; 1 means that everybody takes part
    of: int | None = None  # cohorts have exactly q · of members; None if everybody is drawn independently
    discrete: bool = False  # whether the noise is a sum of discrete Gaussians, for which only RDP is known

    @property
    def fixed(self) -> bool:
        """Whether cohorts have a fixed size, so that a neighbour replaces one member."""
        return self.of is not None and self.q < 1

    @property
    def has_pld(self) -> bool:
        """Whether its privacy loss distribution is known."""
        return not self.fixed and not self.discrete

    @property
    def adjacency(self) -> str:
        """What two neighbouring data sets differ in."""
        if self.discrete:  # a client that leaves would take its noise along
            return "replace by zero what is sent by one"
        return "replace one" if self.fixed else "add or remove one"

    def event(self) -> Any:
        """Return the release in the words of dp-accounting."""
        dp_accounting = library()
        if self.fixed and self.of is not None:
            # replacing one changes the sum by twice as much as adding one
            gaussian = dp_accounting.GaussianDpEvent(self.noise_multiplier / 2)
            return dp_accounting.SampledWithoutReplacementDpEvent(self.of, round(self.q * self.of), gaussian)
        gaussian = dp_accounting.GaussianDpEvent(self.noise_multiplier)
        return gaussian if self.q == 1 else dp_accounting.PoissonSampledDpEvent(self.q, gaussian)


@dataclass(frozen=True)
class Epsilon:
    """ε by both accountants; PLD is left out for huge ε, and where it is not known."""

    rdp: float
    pld: float | None

    @property
    def value(self) -> float:
        """The ε to report."""
        return self.rdp if self.pld is None else self.pld


def epsilon(spent: Mapping[Mechanism, int], delta: float) -> Epsilon:
    """Return the ε of all releases together, given how often each mechanism was used.

    >>> round(epsilon({Mechanism(1.0): 1}, 1e-5).value, 3)
    4.377
    """
    return _epsilon(frozenset((mechanism, count) for mechanism, count in spent.items() if count), delta)


@lru_cache(maxsize=256)
def _epsilon(spent: frozenset[tuple[Mechanism, int]], delta: float) -> Epsilon:
    used = dict(spent)
    if not used:
        return Epsilon(0.0, 0.0)
    if len({mechanism.fixed for mechanism in used}) > 1:
        raise InputError(
            "Cohorts of a fixed size and other cohorts have different neighbours: no ε covers both. Report them apart."
        )
    bound = _rdp(used, delta)
    return Epsilon(bound, _pld(used, delta) if bound < MEANINGLESS else None)


def _rdp(used: Mapping[Mechanism, int], delta: float) -> float:
    relations = library().NeighboringRelation
    fixed = any(mechanism.fixed for mechanism in used)
    relation = relations.REPLACE_ONE if fixed else relations.ADD_OR_REMOVE_ONE
    accountant = library("rdp").RdpAccountant(None, relation)
    for mechanism, count in used.items():
        accountant.compose(mechanism.event(), count)
    return float(accountant.get_epsilon(delta))


def _pld(used: Mapping[Mechanism, int], delta: float) -> float | None:
    if not all(mechanism.has_pld for mechanism in used):
        return None
    step = min(_step(mechanism) for mechanism in used)
    total: Any = None
    for mechanism, count in used.items():
        if mechanism.q == 1:  # Gaussian noise composes exactly
            found = _loss_distribution(
                replace(mechanism, noise_multiplier=mechanism.noise_multiplier / count**0.5), step
            )
        else:
            found = _loss_distribution(mechanism, step).self_compose(count)
        total = found if total is None else total.compose(found)
    return float(total.get_epsilon_for_delta(delta))


def _step(mechanism: Mechanism) -> float:
    """Return a step that is small beside the privacy loss of one release."""
    return min(max(mechanism.q / mechanism.noise_multiplier / 40, FINEST), COARSEST)


@lru_cache(maxsize=8)
def _loss_distribution(mechanism: Mechanism, step: float) -> Any:
    return library("pld.privacy_loss_distribution").from_gaussian_mechanism(
        mechanism.noise_multiplier, sampling_prob=mechanism.q, value_discretization_interval=step
    )


@lru_cache(maxsize=64)
def noise_multiplier(
    target: float, delta: float, count: int, q: float = 1.0, of: int | None = None, discrete: bool = False
) -> float:
    """Return the smallest noise multiplier (to 1e-4) with which `count` releases cost at most ε = `target`.

    >>> round(noise_multiplier(4.377178, 1e-5, count=1), 3)
    1.0
    """
    from scipy.optimize import brentq

    def excess(z: float, account: Callable[[Mapping[Mechanism, int], float], float | None]) -> float:
        return (account({Mechanism(z, q, of, discrete): count}, delta) or 0.0) - target

    most = 1.0
    while excess(most, _rdp) > 0:
        most *= 2
        if most > LARGEST:
            raise InputError(
                f"No noise gives ε = {target:g} at δ = {delta:g} in {count} releases. Allow a larger ε, or plan fewer "
                "rounds or smaller cohorts."
            )
    least = most / 2
    while excess(least, _rdp) <= 0:
        least /= 2
    found = brentq(excess, least, most, args=(_rdp,), xtol=1e-4)
    if target < MOST_SEARCHED and Mechanism(found, q, of, discrete).has_pld:  # which needs less noise than RDP
        most, least = found + 1e-3, 0.8 * found
        while excess(least, _pld) <= 0:
            least *= 0.8
        found = brentq(excess, least, most, args=(_pld,), xtol=2e-5)
    while epsilon({Mechanism(found, q, of, discrete): count}, delta).value > target:
        found += 1e-5
    return float(found)
