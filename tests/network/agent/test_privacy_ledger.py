"""What a site's clients spend: charged by the agent itself, in each run and in all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fedloom as fl
from fedloom import tree
from fedloom.errors import InputError, TrainingError
from fedloom.experiment.progress import Silent
from fedloom.experiment.store import Store
from fedloom.experiment.tables import EvaluateTable
from fedloom.federation.sampling import Sampling
from fedloom.network.agent.policy import Policy, Refused
from fedloom.network.agent.privacy_ledger import SitePrivacy
from fedloom.network.coordinator import network_run
from fedloom.privacy.dp.accounting import Mechanism, epsilon
from fedloom.privacy.dp.distributed import NoiseShare, multiplier
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


def test_another_experiment_or_other_data_gets_other_noise_and_is_charged_again(tmp_path: Path) -> None:
    """Otherwise a coordinator could ask two questions about the same noise, and subtract it."""
    secrets = set()
    for experiment, data in (("e", "d"), ("other", "d"), ("e", "other"), ("e", "d")):
        found = replace(site(tmp_path), experiment=experiment).of_client("kerry", "a-1", data)
        assert found is not None
        assert found.examples is not None
        assert found.examples.charge is not None
        secrets.add(found.examples.secret)
        found.examples.charge("round 1", Z, 1)
    assert len(secrets) == 3
    (ledger,) = tmp_path.glob(f"run1/*/examples/{LEDGER}")
    assert len(ledger.read_text().splitlines()) == 1 + 3


def test_an_answer_that_was_not_charged_stays_at_the_site(tmp_path: Path) -> None:
    privacy = site(tmp_path)
    for name in ("round 1", "round 1"):  # the second time, it was paid for before
        charge(privacy, name)
        privacy.check_charged("kerry")
    privacy.of_client("kerry", "a-1")
    with pytest.raises(Refused, match=r"this answer of 'kerry' has no noise"):
        privacy.check_charged("kerry")
    site(tmp_path, LOCAL).check_charged("kerry")


def test_an_answer_is_charged_once_even_after_a_restart(tmp_path: Path) -> None:
    charge(site(tmp_path), "round 1")
    charge(site(tmp_path), "round 1")
    charge(site(tmp_path), "round 2")
    (ledger,) = tmp_path.glob(f"run1/*/examples/{LEDGER}")
    assert len(ledger.read_text().splitlines()) == 1 + 2


def share(folder: Path, session: str, run: str = "run1", z: float = 1.0, **policy: Any) -> None:
    """Five clients, of which one may work with the coordinator."""
    dp = DpTable(noise_multiplier=z, clip=1.0, noise="distributed")
    table = PrivacyTable(secure_aggregation=SecureTable(), dp=dp)
    site(folder, table, run, **policy).charge_share("kerry", "a-1", NoiseShare.of(table, z, 5), session)


def test_a_share_of_noise_is_charged_for_every_session(tmp_path: Path) -> None:
    for session in ("aa", "bb", "aa"):
        share(tmp_path, session)
    (ledger,) = tmp_path.glob(f"run1/*/distributed/{LEDGER}")
    assert len(ledger.read_text().splitlines()) == 1 + 2


def test_a_site_ends_where_its_share_of_noise_no_longer_suffices(tmp_path: Path) -> None:
    share(tmp_path, "aa", max_epsilon=5.0)  # one release costs 4.73
    with pytest.raises(Refused, match=r"another answer of 'kerry' would cost ε = 7\.\d+ in this run.*max_epsilon is 5"):
        share(tmp_path, "bb", max_epsilon=5.0)


def test_noise_of_all_clients_counts_as_half_as_large_beside_noise_for_examples(tmp_path: Path) -> None:
    """Its ε is about zeros in the place of a change. Another example can change it by twice as much."""
    both = epsilon({Z: 10, Mechanism(2.0, discrete=True): 1}, 1e-5).value
    charge(site(tmp_path), "round 1")
    with pytest.raises(Refused, match=rf"would cost ε = {both:.4g} in all runs"):
        share(tmp_path, "aa", run="run2", z=4.0, max_total_epsilon=both - 0.01)
    share(tmp_path, "aa", run="run2", z=4.0, max_total_epsilon=both + 0.01)


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


def test_all_runs_count_at_the_delta_of_the_policy_whatever_noise_they_have(tmp_path: Path) -> None:
    most = epsilon({Mechanism(4.0): 2}, 1e-5).value
    tables = [PrivacyTable(example_dp=ExampleTable(delta=0.9)), PrivacyTable(dp=LOCAL.dp)]
    for number, table in enumerate(tables * 2):
        found = site(tmp_path, table, run=f"run{number}", max_total_epsilon=most).of_client("kerry", "a-1")
        assert found is not None
        protection: Any = found.examples or found.local
        with contextlib.nullcontext() if number < 2 else pytest.raises(Refused, match="in all runs"):
            protection.charge("round 1", Mechanism(4.0), 1)


SHARES = PrivacyTable(
    secure_aggregation=SecureTable(), dp=DpTable(noise_multiplier=4.0, clip=1.0, noise="distributed", colluders=0.2)
)


def planned(
    folder: Path, table: PrivacyTable, run: str, cohort: Sampling = Sampling(), batch: int = 40, **policy: Any
) -> SitePrivacy:
    """A run of three rounds of two algorithms, at a site with one client that has 120 training examples."""
    algorithms = {"a": fl.FedAvg(lr=0.1, batch_size=40), "b": fl.FedProx(lr=0.1, batch_size=batch)}
    federation = SimpleNamespace(name=lambda client: "kerry", sizes=lambda split: [120])
    plan: Any = SimpleNamespace(
        privacy=table,
        rounds=3,
        algorithms=algorithms,
        seeds=(1,),
        cohort=cohort,
        evaluate=EvaluateTable(),
        federation=lambda seed: federation,
    )
    return SitePrivacy(folder, run, plan, Policy(**policy))


def answer(privacy: SitePrivacy, rounds: Iterable[int] = (1, 2, 3)) -> None:
    """Charge what a client's agent charges in these rounds."""
    table = privacy.plan.privacy
    for label, algorithm in privacy.plan.algorithms.items():
        for round in rounds:
            found = privacy.of_client("kerry", f"{label}-1")
            if found is not None and found.examples is not None and found.examples.charge is not None:
                steps = found.examples.steps(120, algorithm.train)
                found.examples.charge(f"round {round}", steps.mechanism, steps.count)
            if found is not None and found.local is not None and found.local.charge is not None:
                found.local.charge(f"round {round}", found.local.mechanism, 1)
            if table.has_distributed_noise and table.dp is not None:
                z = multiplier(table.dp, privacy.plan.rounds)
                privacy.charge_share("kerry", f"{label}-1", NoiseShare.of(table, z, 5), f"{round}")


@pytest.mark.parametrize(
    "table",
    [EXAMPLES, LOCAL, SHARES, EXAMPLES.replace(dp=LOCAL.dp)],
    ids=["examples", "local", "distributed", "examples and local"],
)
def test_what_is_said_before_a_run_is_what_its_last_round_comes_to(tmp_path: Path, table: PrivacyTable) -> None:
    answer(planned(tmp_path, table, "run1"))
    answer(planned(tmp_path / "both", table, "run1"))
    answer(planned(tmp_path / "both", table, "run2"))
    both = planned(tmp_path / "both", table, "run2")
    total = both.total(both.spent("kerry"))
    with pytest.raises(Refused, match=rf"to {total:.4g}, and max_total_epsilon is {total - 0.01:g}: .* spent already"):
        list(planned(tmp_path, table, "run2", max_total_epsilon=total - 0.01).check_total([0]))
    enough = planned(tmp_path, table, "run2", max_total_epsilon=total + 1e-6)
    (line,) = enough.check_total([0])
    assert f" {total:.4g} together, " in line
    answer(enough)


def test_algorithms_whose_noise_is_together_too_little_are_refused_before_they_train(tmp_path: Path) -> None:
    """The noise of each algorithm is made as if the other one had the same batches."""
    mixed = planned(tmp_path, EXAMPLES, "run1", batch=5)
    with pytest.raises(Refused, match="the run announced 8"):  # as late as in the last round
        answer(mixed)
    with pytest.raises(
        Refused, match=r"together they cost ε = 8\.0\d+, more than the 8 .* the same batch_size and epochs"
    ):
        list(mixed.check_total([0]))
    assert list(planned(tmp_path, EXAMPLES, "run1").check_total([0])) == []


def test_a_run_that_is_resumed_does_not_count_its_rounds_twice(tmp_path: Path) -> None:
    answer(planned(tmp_path, LOCAL, "run1"))

    def together() -> str:
        (line,) = planned(tmp_path, LOCAL, "run2", max_total_epsilon=20.0).check_total([0])
        return line.split(" needed ")[1]

    before = together()
    answer(planned(tmp_path, LOCAL, "run2"), rounds=(1, 2))
    assert together() == before
    (other,) = planned(tmp_path, LOCAL, "run3", max_total_epsilon=20.0).check_total([0])
    assert before not in other


def test_a_run_that_costs_too_much_is_refused_and_others_do_not_learn_what_was_spent(tmp_path: Path) -> None:
    for table, less in ((EXAMPLES, "a smaller ε"), (SHARES, "fewer rounds or a larger noise_multiplier")):
        with pytest.raises(Refused) as refused:
            list(planned(tmp_path, table, "run1", max_total_epsilon=0.5).check_total([0]))
        assert str(refused.value).startswith("this run would take the ε of all runs to ")
        assert str(refused.value).endswith(
            "and max_total_epsilon is 0.5: 0 are spent already. Raise it in [policy], or ask the coordinator for "
            f"{less}"
        )
        assert refused.value.told == (
            f"the site's privacy budget has too little left for this run. It needs {less}, or a larger budget"
        )
    assert not list(tmp_path.iterdir())  # a dry run writes nothing
    assert not list(planned(tmp_path, EXAMPLES, "run1").check_total([0]))  # no limit


@pytest.mark.parametrize("cohort", [Sampling(count=5), Sampling(fraction=0.5), Sampling(mode="async")])
def test_a_run_of_which_a_client_answers_an_unknown_part_is_not_refused(tmp_path: Path, cohort: Sampling) -> None:
    said = list(planned(tmp_path, LOCAL, "run1", cohort, max_total_epsilon=2.0).check_total([0]))
    assert said[1].startswith("How many rounds clients here answer is not known: ")
    assert said[2] == "Caution: this agent refuses rounds that would take the ε of all runs beyond what is allowed."
    assert len(list(planned(tmp_path, LOCAL, "run1", cohort, max_total_epsilon=9.0).check_total([0]))) == 2


EXPERIMENT: dict[str, Any] = {
    "name": "net",
    "rounds": 2,
    "data": {"source": "digits", "partition": {"name": "iid", "clients": 4}},
    "task": {"model": "digits_mlp"},
    "evaluate": {"every": 2},
    "algorithm": {"fedavg": {"weights": "uniform"}},
    "run": {"backend": "serial"},
}


@pytest.mark.slow
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
        ({"example_dp": {"epsilon": 8.0}}, r"ε at most 2 .* at δ at most 1e-05 .*, and the run offers ε = 8"),
        ({"example_dp": {"epsilon": 1.0, "delta": 0.1}}, r"and the run offers ε = 1 at δ = 0.1"),
    ],
)
def test_a_site_refuses_a_run_that_it_cannot_protect_itself(
    tmp_path: Path, privacy: dict[str, Any], words: str
) -> None:
    for number, limit in enumerate(("max_epsilon", "max_total_epsilon")):
        run = InProcessRun(tmp_path / f"{number}", {**EXPERIMENT, "privacy": privacy}, {limit: 2.0}, {})
        with pytest.raises(InputError, match=words):
            run.run(Silent())


@pytest.mark.parametrize("algorithm", [{"openai_es": {}}, {"fedsgd": {}}, {"fedavg": {"patience": 2}}])
def test_an_algorithm_that_adds_no_noise_does_not_count_as_privacy_of_examples(
    tmp_path: Path, algorithm: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {**EXPERIMENT, "algorithm": algorithm, "privacy": {"example_dp": {"epsilon": 1.0}}}
    with pytest.raises(InputError, match=r"example_dp (adds noise to the steps|cannot be used with patience)"):
        InProcessRun(tmp_path / "honest", values, {"max_epsilon": 1.0}, {})
    monkeypatch.setattr(network_run, "check_plan", lambda *_: None)
    run = InProcessRun(tmp_path / "lying", values, {"max_epsilon": 1.0}, {})
    with pytest.raises(InputError, match=r"This site does not take part: .*example_dp"):
        run.run(Silent())


@pytest.mark.parametrize(
    "privacy",
    [{"example_dp": {"epsilon": 4.0}}, {"dp": {"epsilon": 4.0, "clip": 1.0, "noise": "local"}}],
    ids=["examples", "local"],
)
def test_an_agent_whose_budget_is_spent_says_so_and_no_more(tmp_path: Path, privacy: dict[str, Any]) -> None:
    """How many rounds of the second run it answers is not known before, because clients are drawn."""
    values, policy = {**EXPERIMENT, "privacy": privacy}, {"max_epsilon": 4.0, "max_total_epsilon": 4.3}
    assert InProcessRun(tmp_path / "first", values, policy).run(Silent()).status == "done"
    run = InProcessRun(tmp_path / "run", values, policy, count=4)
    with pytest.raises(TrainingError, match=r"Clients that failed: 0, refused or rejected: 4\. Where a site's privacy"):
        run.run(Silent())
    here = [text for text in run.said if "max_total_epsilon is 4.3" in text]
    assert here
    assert all(text.startswith("refused: another answer of '") for text in here)
    told = {text for text in run.said if text.startswith("site-0 ") and "ready" not in text and "connected" not in text}
    assert told == {"site-0 refuses: the site's privacy budget is spent"}


def test_an_agent_is_not_ready_for_a_run_that_its_budget_cannot_end(tmp_path: Path) -> None:
    values = {**EXPERIMENT, "privacy": {"example_dp": {"epsilon": 4.0}}}
    run = InProcessRun(tmp_path / "run", values, {"max_epsilon": 4.0, "max_total_epsilon": 4.5})
    assert run.run(Silent()).status == "done"
    again = InProcessRun(tmp_path / "again", values, {"max_epsilon": 4.0, "max_total_epsilon": 4.5})
    with pytest.raises(
        InputError, match=r"take the ε of '\d' of all runs to .*, and max_total_epsilon is 4\.5: 4 are spent"
    ):
        again.run(Silent())
    assert not any(text.startswith("Ready") for text in again.said)
    assert any(text.startswith("site-0 refuses: the site's privacy budget has too little left") for text in again.said)


class Leaks(fl.FedAvg):
    """Claims to train, and sends what it has seen."""

    def client(self, task: fl.Task, shared: Any, own: Any, data: fl.Clients) -> tuple[fl.Update, Any]:
        model = {name: leaf + data.federation.x.float().mean() for name, leaf in shared["model"].items()}
        return fl.Update({"model": tree.expand(model, len(data))}, weight=torch.ones(len(data))), own


def test_an_algorithm_that_claims_to_train_and_does_not_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fl.FedAvg, "client", Leaks.client)
    run = InProcessRun(tmp_path / "run", {**EXPERIMENT, "privacy": {"example_dp": {"epsilon": 8.0}}}, {}, {})
    with pytest.raises(TrainingError, match="has no noise: its algorithm does not train"):
        run.run(Silent())


def test_noise_at_the_coordinator_is_accounted_without_amplification(tmp_path: Path) -> None:
    values = {**EXPERIMENT, "privacy": {"dp": {"noise_multiplier": 2.0, "clip": 1.0}}}
    run = InProcessRun(tmp_path / "run", values, {}, {})
    assert run.run(Silent()).status == "done"
    with Store(tmp_path / "run", read_only=True) as store:
        spent = [row["value"] for row in store.rows("server_metrics") if row["metric"] == "epsilon"]
    assert spent == [epsilon({Mechanism(2.0): n}, 1e-5).value for n in (1, 2)]
