"""Canaries in a copy of a run, through the mechanism that ships."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedloom.algorithm import Algorithm
from fedloom.algorithms import FedAvg, FedAvgM
from fedloom.audits.canary_run import WithCanaries, canary_run
from fedloom.errors import InputError
from fedloom.experiment import experiment_file
from fedloom.experiment.plan import Plan
from fedloom.privacy.dp import clipping, ledger, noise
from fedloom.privacy.secure import ring
from fedloom.tree import Groups

SETTINGS: dict[str, Any] = {
    "rounds": 1,
    "data": {"source": "digits", "partition": {"name": "iid", "clients": 10}},
    "algorithm": {"fedavg": {"weights": "uniform"}},
    "privacy": {"dp": {"noise_multiplier": 2.0, "clip": 0.5}},
    "run": {"backend": "serial"},
}
CANARIES = 400


@pytest.fixture(autouse=True)
def the_same_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise is drawn from a new secret every time: with a fixed one, a test has one outcome."""
    monkeypatch.setattr(ledger.secrets, "token_bytes", bytes)


def audited(algorithm: Algorithm | None = None, **tables: Any) -> dict[str, Any]:
    plan = Plan.of(experiment_file.parse({**SETTINGS, **tables}))
    return canary_run(plan, algorithm or plan.algorithms["fedavg"], CANARIES)


def test_a_sound_mechanism_is_not_refuted_and_its_claim_is_the_accountants() -> None:
    found = audited()
    assert found["claimed"] == pytest.approx(1.9931, abs=1e-3)
    assert (found["delta"], found["adjacency"], found["canaries"]) == (1e-5, "add or remove one client", CANARIES)
    assert not found["refuted"]
    assert found["bound"]["epsilon"] < found["claimed"]
    assert 0.5 < found["estimate"] < 10


def test_little_noise_is_claimed_and_found() -> None:
    found = audited(privacy={"dp": {"noise_multiplier": 0.2, "clip": 0.5}})
    assert 2 < found["bound"]["epsilon"] < found["claimed"]
    assert not found["refuted"]


def no_noise(groups: Groups, deviation: float, key: bytes) -> Groups:
    return {group: {name: leaf.double() * 0 for name, leaf in leaves.items()} for group, leaves in groups.items()}


def a_tenth_of_the_noise(groups: Groups, deviation: float, key: bytes) -> Groups:
    return NOISE_LIKE(groups, deviation / 10, key)


NOISE_LIKE = noise.noise_like


@pytest.mark.parametrize("bug", [no_noise, a_tenth_of_the_noise])
def test_missing_noise_is_found(bug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "noise_like", bug)
    found = audited()
    assert found["refuted"]
    assert found["bound"]["epsilon"] > found["claimed"] == pytest.approx(1.9931, abs=1e-3)


def test_missing_clipping_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clipping, "clip_jointly", lambda changes, most: (changes, clipping.joint_norm(changes) <= most))
    assert audited()["refuted"]


@pytest.mark.parametrize(
    "cohort",
    [{"sampling": "poisson", "fraction": 0.5}, {"count": 5}],
    ids=["every client with the same probability", "cohorts of a fixed size"],
)
def test_sampled_cohorts_are_audited_over_all_rounds(cohort: dict[str, Any]) -> None:
    found = audited(rounds=3, cohort=cohort)
    assert found["adjacency"] == ("replace one client" if "count" in cohort else "add or remove one client")
    assert not found["refuted"]


def test_an_adaptive_clip_and_a_server_with_momentum_are_audited() -> None:
    found = audited(FedAvgM(weights="uniform"), rounds=3, privacy={"dp": {"noise_multiplier": 1.0, "clip": "adaptive"}})
    assert 0 < found["bound"]["epsilon"] < found["claimed"]


def test_privacy_of_examples_may_be_beside_that_of_clients() -> None:
    found = audited(privacy={**SETTINGS["privacy"], "example_dp": {"epsilon": 8.0}})
    assert found["claimed"] == pytest.approx(1.9931, abs=1e-3)


def test_progress_is_told_after_every_round() -> None:
    told: list[int] = []
    plan = Plan.of(experiment_file.parse({**SETTINGS, "rounds": 2}))
    canary_run(plan, plan.algorithms["fedavg"], 100, told.append)
    assert told == [1, 2]


def test_the_real_run_has_no_canaries() -> None:
    plan = Plan.of(experiment_file.parse(SETTINGS))
    before = plan.federation(1).fingerprint
    canary_run(plan, FedAvg(weights="uniform"), 100)
    assert plan.federation(1).fingerprint == before
    assert np.diff(plan.federation(1).offsets).min() > 0


def test_noise_that_each_client_adds_for_itself_is_not_audited() -> None:
    with pytest.raises(InputError, match="with noise = 'server' or 'distributed'"):
        audited(privacy={"dp": {"noise_multiplier": 2.0, "clip": 0.5, "noise": "local"}})


# --- under secure aggregation

TOGETHER: dict[str, Any] = {
    "secure_aggregation": {"min_clients": 3},
    "dp": {"noise_multiplier": 2.0, "clip": 0.5, "noise": "distributed"},
}


@pytest.mark.parametrize("clip", [0.5, "adaptive"])
def test_noise_of_all_clients_together_is_audited(clip: Any) -> None:
    found = audited(rounds=2, privacy={**TOGETHER, "dp": {**TOGETHER["dp"], "clip": clip}})
    assert found["adjacency"] == "replace by zero what is sent by one client"
    assert 0 < found["bound"]["epsilon"] < found["claimed"] == pytest.approx(epsilon_of(2.0, rounds=2), abs=1e-3)
    assert not found["refuted"]


def epsilon_of(z: float, rounds: int) -> float:
    """RDP of Gaussian noise by hand: the least of a · rounds / (2 z²) over orders a, with the usual conversion."""
    orders = np.linspace(1.01, 200, 200_000)
    spent = orders * rounds / (2 * z**2)
    return float((spent + np.log1p(-1 / orders) - np.log(1e-5 * orders) / (orders - 1)).min())


@pytest.mark.parametrize("part", [0.0, 0.1], ids=["no noise", "a tenth of the noise"])
def test_missing_noise_of_clients_is_found(part: float, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = ring.discrete_gaussian
    monkeypatch.setattr(ring, "discrete_gaussian", lambda *given: np.rint(part * drawn(*given)).astype(np.int64))
    assert audited(privacy=TOGETHER)["refuted"]


def test_the_sum_of_an_audit_is_the_one_that_masks_would_give(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both copies have one secret, and differ only in whether masks are added and taken away."""
    privacy = {"secure_aggregation": {"min_clients": 3}, "dp": SETTINGS["privacy"]["dp"]}
    plain = audited(privacy=privacy)
    monkeypatch.setattr(WithCanaries, "_secure_sum", lambda self, work, answers: work.merge(answers))
    assert audited(privacy=privacy) == plain


def test_a_change_that_does_not_fit_the_ring_is_an_error_with_its_reason() -> None:
    privacy = {"secure_aggregation": {"min_clients": 3, "range": 1e-3}, "dp": SETTINGS["privacy"]["dp"]}
    with pytest.raises(InputError, match=r"A client of the copy sends nothing: .* out of the range 0\.001"):
        audited(privacy=privacy)
