"""What a site's clients spend: charged by the agent itself, in each run and in all of them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedloom.errors import InputError
from fedloom.experiment.progress import Silent
from fedloom.experiment.store import Store
from fedloom.network.agent.policy import Policy, Refused
from fedloom.network.agent.privacy_ledger import SitePrivacy
from fedloom.privacy.dp.accounting import Mechanism, epsilon
from fedloom.privacy.dp.distributed import NoiseShare
from fedloom.privacy.dp.ledger import LEDGER
from fedloom.privacy.table import DpTable, ExampleTable, PrivacyTable, SecureTable
from tests.network.conftest import InProcessRun

EXAMPLES = PrivacyTable(example_dp=ExampleTable(epsilon=8.0))
LOCAL = PrivacyTable(dp=DpTable(epsilon=8.0, clip=1.0, noise="local"))
Z = Mechanism(1.0, 0.1)


def site(folder: Path, table: PrivacyTable = EXAMPLES, run: str = "run1", **policy: Any) -> SitePrivacy:
    plan: Any = SimpleNamespace(privacy=table, rounds=3, algorithms={"a": None, "b": None}, seeds=(1,))
    return SitePrivacy(folder, run, plan, Policy(**policy))


def charge(privacy: SitePrivacy, name: str, mechanism: Mechanism = Z, count: int = 10, client: str = "kerry") -> None:
    found = privacy.of_client(client, "a-1")
    assert found is not None
    assert found.examples is not None
    assert found.examples.charge is not None
    found.examples.charge(name, mechanism, count)


def test_noise_is_planned_for_all_cells_and_cells_share_no_noise(tmp_path: Path) -> None:
    for table, kind in ((EXAMPLES, "examples"), (LOCAL, "local")):
        first, second = (getattr(site(tmp_path, table).of_client("kerry", cell), kind) for cell in ("a-1", "b-1"))
        assert first.rounds == 3 * 2
        assert first.secret != second.secret
        assert first.secret == getattr(site(tmp_path, table).of_client("kerry", "a-1"), kind).secret
        assert first.secret != getattr(site(tmp_path, table).of_client("cork", "a-1"), kind).secret
    assert site(tmp_path, PrivacyTable()).of_client("kerry", "a-1") is None


def test_an_answer_is_charged_once_even_after_a_restart(tmp_path: Path) -> None:
    charge(site(tmp_path), "round 1")
    charge(site(tmp_path), "round 1")
    charge(site(tmp_path), "round 2")
    (ledger,) = tmp_path.glob(f"run1/*/examples/{LEDGER}")
    assert len(ledger.read_text().splitlines()) == 1 + 2


def share(folder: Path, question: str, attempt: int, secure: SecureTable, **policy: Any) -> None:
    """Five clients, of which one may work with the coordinator."""
    dp = DpTable(noise_multiplier=1.0, clip=1.0, noise="distributed")
    table = PrivacyTable(secure_aggregation=secure, dp=dp)
    found = NoiseShare.of(table, 1.0, 5)
    site(folder, table, **policy).charge_share("kerry", "a-1", found, question, attempt)


def test_a_share_of_noise_is_charged_once_for_a_question_if_nobody_unmasks_two_sums(tmp_path: Path) -> None:
    always, rarely = SecureTable(threshold=0.8), SecureTable(threshold=0.6)  # 2 · 4 − 5 > 1, but 2 · 3 − 5 is not
    for folder, secure, charged in ((tmp_path / "a", always, 2), (tmp_path / "b", rarely, 3)):
        for question, attempt in (("round 1", 1), ("round 1", 2), ("round 2", 2)):
            share(folder, question, attempt, secure)
        (ledger,) = folder.glob(f"run1/*/distributed/{LEDGER}")
        assert len(ledger.read_text().splitlines()) == 1 + charged


def test_a_site_ends_where_its_share_of_noise_no_longer_suffices(tmp_path: Path) -> None:
    share(tmp_path, "round 1", 1, SecureTable(), max_epsilon=5.0)  # one release costs 4.73
    with pytest.raises(Refused, match=r"another answer of 'kerry' would cost ε = 7\.\d+ in this run.*max_epsilon is 5"):
        share(tmp_path, "round 2", 1, SecureTable(), max_epsilon=5.0)


def test_a_coordinator_cannot_have_more_than_the_run_announced_or_the_policy_allows(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"would cost ε = .* in this run, and the run announced 8"):
        charge(site(tmp_path / "a"), "round 1", count=1000)
    with pytest.raises(Refused, match=r"and the policy's max_epsilon is 0.5"):
        charge(site(tmp_path / "b", max_epsilon=0.5), "round 1")
    assert not [line for file in tmp_path.glob(f"*/*/*/*/{LEDGER}") for line in file.read_text().splitlines()[1:]]


def test_all_runs_together_are_limited_for_each_client(tmp_path: Path) -> None:
    most = epsilon({Z: 20}, 1e-5).value
    for run in ("run1", "run2"):
        charge(site(tmp_path, run=run, max_total_epsilon=most), "round 1")
    with pytest.raises(Refused, match=r"in all runs, and the policy's max_total_epsilon"):
        charge(site(tmp_path, run="run3", max_total_epsilon=most), "round 1")
    charge(site(tmp_path, run="run3", max_total_epsilon=most), "round 1", client="cork")


EXPERIMENT: dict[str, Any] = {
    "name": "net",
    "rounds": 2,
    "data": {"source": "digits", "partition": {"name": "iid", "clients": 4}},
    "task": {"model": "digits_mlp"},
    "evaluate": {"every": 2},
    "algorithm": {"fedavg": {"weights": "uniform"}},
    "run": {"backend": "serial"},
}


@pytest.mark.parametrize(
    "privacy",
    [{"example_dp": {"epsilon": 8.0}}, {"dp": {"epsilon": 8.0, "clip": 1.0, "noise": "local"}}],
    ids=["examples", "local"],
)
def test_a_run_that_agents_protect_satisfies_their_policies_and_no_metrics_leave(
    tmp_path: Path, privacy: dict[str, Any]
) -> None:
    run = InProcessRun(tmp_path / "run", {**EXPERIMENT, "privacy": privacy}, {"max_epsilon": 8.0}, {})
    assert run.run(Silent()).status == "done"
    ledgers = [*tmp_path.glob(f"state-*/privacy/*/*/*/{LEDGER}")]
    assert len(ledgers) == 4  # one for each client
    assert {len(ledger.read_text().splitlines()) for ledger in ledgers} == {1 + 2}
    with Store(tmp_path / "run", read_only=True) as store:
        assert all(row["value"] is None for row in store.rows("client_metrics"))
        assert not store.rows("history")


@pytest.mark.parametrize(
    ("privacy", "words"),
    [
        ({}, "Noise that the server adds cannot be verified here"),
        ({"dp": {"epsilon": 1.0, "clip": 1.0}}, "Noise that the server adds cannot be verified here"),
        ({"example_dp": {"epsilon": 8.0}}, r"ε at most 2 at δ at most 1e-05, and the run offers ε = 8"),
        ({"example_dp": {"epsilon": 1.0, "delta": 0.1}}, r"and the run offers ε = 1 at δ = 0.1"),
    ],
)
def test_a_site_refuses_a_run_that_it_cannot_protect_itself(
    tmp_path: Path, privacy: dict[str, Any], words: str
) -> None:
    run = InProcessRun(tmp_path / "run", {**EXPERIMENT, "privacy": privacy}, {"max_epsilon": 2.0}, {})
    with pytest.raises(InputError, match=words):
        run.run(Silent())


def test_noise_at_the_coordinator_is_accounted_without_amplification(tmp_path: Path) -> None:
    values = {**EXPERIMENT, "privacy": {"dp": {"noise_multiplier": 2.0, "clip": 1.0}}}
    run = InProcessRun(tmp_path / "run", values, {}, {})
    assert run.run(Silent()).status == "done"
    with Store(tmp_path / "run", read_only=True) as store:
        spent = [row["value"] for row in store.rows("server_metrics") if row["metric"] == "epsilon"]
    assert spent == [epsilon({Mechanism(2.0): n}, 1e-5).value for n in (1, 2)]
