"""What a dry run shows of a site and of an experiment."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import fedloom as fl
from fedloom.cli import app
from fedloom.data.preprocessing import Column, Preprocessing
from fedloom.errors import InputError
from fedloom.network.agent.dry_run import dry_run, first_round
from fedloom.network.agent.loaded_experiment import check_data
from fedloom.network.agent.policy import SCORES_LEAVE, TRUST, site_of
from fedloom.network.protocol.expected_update import synthetic_place
from fedloom.network.protocol.messages import DataFormat
from fedloom.privacy.dp.accounting import Mechanism, epsilon
from fedloom.privacy.dp.ledger import Ledger
from fedloom.task import Task
from fedloom.training.probe import probe
from tests.conftest import Dense
from tests.conftest import federation as some_clients
from tests.network.conftest import EXPERIMENT, write_toml

DATA = {"source": "digits", "partition": {"name": "iid", "clients": 2}}
SECURE = {"secure_aggregation": {}}


def lines(tmp_path: Path, experiment: dict[str, Any] | None = None, **policy: Any) -> list[str]:
    site = site_of({"site": {"name": "kerry"}, "data": DATA, "policy": policy}, tmp_path / "kerry.toml")
    file = write_toml(tmp_path / "experiment.toml", experiment) if experiment else None
    return list(dry_run(site, file, tmp_path / "state"))


def test_without_an_experiment_it_shows_data_and_policy(tmp_path: Path) -> None:
    shown = lines(tmp_path, verbs=["reduce"], metrics=["loss"], min_cohort=3)
    assert shown[0] == "Site kerry. This dry run connects nowhere and sends nothing."
    assert "Allowed verbs: reduce, in rounds of at least 3 client(s), as the coordinator counts them." in shown
    assert TRUST in shown
    unlimited = "This does not limit an algorithm's weights and public numbers: they may be scores of any metric."
    assert f"Metrics that may leave, each as one number per client and split: loss. {unlimited}" in shown
    assert shown[-1].endswith("add --experiment FILE to see it.")


def test_it_warns_of_scores_of_single_examples_and_names_metrics_that_are_withheld(tmp_path: Path) -> None:
    assert not any("SINGLE EXAMPLE" in line for line in lines(tmp_path, metrics=["f1"]))
    assert any(line.endswith(SCORES_LEAVE) for line in lines(tmp_path, metrics=["f1"], example_scores=True))
    experiment = {**EXPERIMENT, "task": {**EXPERIMENT.get("task", {}), "metrics": ["accuracy", "f1"]}}
    assert any(line.startswith("The policy withholds f1. ") for line in lines(tmp_path, experiment))
    shown = lines(tmp_path, experiment, metrics=["loss", "accuracy", "f1"], example_scores=True)
    assert SCORES_LEAVE in shown


def test_it_shows_what_leaves_under_the_policy(tmp_path: Path) -> None:
    shown = lines(tmp_path, EXPERIMENT, min_examples=400, max_evaluations=70)
    assert "  client 0: 539 train, 0 validation, 0 test" in shown
    assert "Each client is measured at most 70 times in the run, on one split each." in shown
    assert any("public key and network address, fewest clients in a sum" in line for line in shown)


@pytest.mark.parametrize(
    ("privacy", "policy", "why"),
    [
        (SECURE, {}, "the run has secure aggregation"),
        ({"dp": {"noise": "local", "epsilon": 2.0, "clip": 1.0}}, {}, "no noise covers them"),
        ({"dp": {"noise": "local", "epsilon": 2.0, "clip": 1.0}}, {"max_epsilon": 2.0}, "no noise covers them"),
    ],
)
def test_no_metric_leaves_beside_what_is_protected(
    tmp_path: Path, privacy: dict[str, Any], policy: dict[str, Any], why: str
) -> None:
    shown = lines(tmp_path, {**EXPERIMENT, "cohort": {"max_examples": 600}, "privacy": privacy}, **policy)
    assert any(line.startswith(f"Metrics that may leave: none, because {why}.") for line in shown)


def test_it_says_what_is_spent_needed_and_allowed_and_refuses_what_is_too_much(tmp_path: Path) -> None:
    given = {**EXPERIMENT, "rounds": 1, "privacy": {"dp": {"noise": "local", "epsilon": 2.0, "clip": 1.0}}}
    given["algorithm"] = {"fedavg": {"weights": "uniform"}}
    begun = Ledger(tmp_path / "state/privacy/aa" / hashlib.sha256(b"1").hexdigest()[:16] / "local", 1e-5, dict)
    begun.charge("round 1", Mechanism(3.0))
    spent, needed = epsilon({Mechanism(3.0): 1}, 1e-5).value, "2 needed for all rounds of this run"
    shown = lines(tmp_path, given, max_total_epsilon=3.0)
    line = next(line for line in shown if line.startswith("ε of '1': "))
    assert re.fullmatch(rf"ε of '1': {spent:.4g} spent in all runs, {needed}, 2\.\d+ together, 3 allowed .*", line)
    assert any(line.startswith(f"What was spent is read from {tmp_path / 'state'}. ") for line in shown)
    with pytest.raises(
        InputError, match=r"refuse to take part: this run would take the ε of '1' of all runs to 2\.\d+"
    ):
        lines(tmp_path, given, max_total_epsilon=2.1)


def test_a_delta_that_protects_nobody_here_is_named(tmp_path: Path) -> None:
    shown = lines(tmp_path, {**EXPERIMENT, "privacy": {"example_dp": {"delta": 2e-3}}})
    assert any(
        re.match("Caution: .*δ = 0.002 protects hardly anybody.*client has 53[89] training", line) for line in shown
    )


@pytest.mark.parametrize(("fewest", "warned"), [(1, True), (4, False)])
def test_sums_over_few_clients_are_named(tmp_path: Path, fewest: int, warned: bool) -> None:
    given = {**EXPERIMENT, "cohort": {"max_examples": 600}, "privacy": SECURE}
    shown = lines(tmp_path, given, min_cohort=fewest)
    assert (
        any(re.match("Caution: .*a sum may be over only 3 clients: two of the three", line) for line in shown) == warned
    )


@pytest.mark.parametrize(
    ("group", "words"),
    [
        ({"group": "patient"}, r"One person \(patient\) has 4 examples here: for this person, that means ε = 16"),
        ({"drop": ["patient"]}, "several may be of one person: with k examples of a person"),
    ],
)
def test_a_site_learns_what_an_epsilon_of_examples_means_for_its_people(
    tmp_path: Path, group: dict[str, Any], words: str
) -> None:
    rows = (f"{number % 7}.5,{number // 4},{'yes' if number % 3 else 'no'}\n" for number in range(80))
    (tmp_path / "rows.csv").write_text("age,patient,ill\n" + "".join(rows))
    data = {"source": "csv", "path": "rows.csv", "label": "ill", **group}
    site = site_of({"site": {"name": "kerry"}, "data": data}, tmp_path / "kerry.toml")
    given = {"rounds": 1, "task": {"model": "logistic", "args": {"features": 1, "classes": 2}}}
    given |= {"privacy": {"example_dp": {"epsilon": 4.0}}}
    file = write_toml(tmp_path / "experiment.toml", given)
    assert re.search(f"Caution: .*rows and not people.*{words}", "\n".join(dry_run(site, file, tmp_path)))


def test_sizes_do_not_leave_under_secure_aggregation(tmp_path: Path) -> None:
    shown = lines(tmp_path, {**EXPERIMENT, "cohort": {"max_examples": 600}, "privacy": SECURE})
    assert "  client 0 (not its number of examples)" in shown
    assert not any("539 train" in line or "is measured at most" in line for line in shown)


def test_an_experiment_that_the_policy_refuses_is_not_loaded(tmp_path: Path) -> None:
    refused = (
        "This site would refuse the experiment: the policy does not allow the algorithm 'fedavg'. Allowed: fedprox "
        "([policy] algorithms)."
    )
    with pytest.raises(InputError, match=re.escape(refused)):
        lines(tmp_path, EXPERIMENT, algorithms=["fedprox"])
    with pytest.raises(InputError, match="This site would refuse to take part: "):
        lines(tmp_path, EXPERIMENT, min_examples=10_000)


@pytest.mark.parametrize("allowed", [{}, {"models": ["evil.py:Net"]}, {"algorithms": ["evil.py:Net"]}])
def test_code_that_came_with_an_experiment_does_not_run_before_the_policy_allows_it(
    tmp_path: Path, allowed: dict[str, Any]
) -> None:
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nNet = None\n")
    mailed = {**EXPERIMENT, "task": {"model": "evil.py:Net"}, "algorithm": {"mine": {"name": "evil.py:Net"}}}
    with pytest.raises(InputError, match="This site would refuse the experiment: the policy "):
        lines(tmp_path, mailed, **allowed)
    assert not (tmp_path / "ran").exists()


def test_code_that_the_policy_allows_by_its_hash_runs(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("from torch import nn\ndef net():\n    return nn.Linear(64, 10)\n")
    sha256 = hashlib.sha256((tmp_path / "net.py").read_bytes()).hexdigest()
    allowed = {"models": ["net.py:net"], "code": {"net.py": sha256}}
    shown = lines(tmp_path, {**EXPERIMENT, "task": {"model": "net.py:net"}}, **allowed)
    assert "  model: 650 numbers in 2 tensors, and its weight" in shown


def test_the_form_of_answers_is_shown_though_training_diverges_on_made_up_examples(tmp_path: Path) -> None:
    shown = lines(tmp_path, {**EXPERIMENT, "train": {"lr": 1e30, "epochs": 20.0}})
    assert "  model: 2,410 numbers in 4 tensors, and its weight" in shown


def test_every_answer_of_the_first_round_is_listed_with_its_verb() -> None:
    data, task = some_clients((12, 9)), Task(Dense)
    place = synthetic_place(DataFormat.of(data), task, probe(data, task).setup(group=1))
    (answer,) = first_round(fl.FedAvg(lr=0.1), task, place)
    assert answer[:2] == ("reduce", "client")
    assert answer[2].groups["model"].keys() == task.initial().keys()
    assert [verb for verb, *_ in first_round(fl.Peer(lr=0.1), task, place)] == ["map", "exchange"]


def test_a_site_without_the_agreed_table_hears_of_it(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("age,ward,y\n" + "".join(f"{age},icu,{age % 2}\n" for age in range(40)))
    ward = Column(name="ward", categories=("general", "icu"))
    numbers = {"mean": (0.0,) * 3, "std": (1.0,) * 3}
    agreed = Preprocessing(columns=(Column(name="age"), ward), **numbers, shape=(3,), classes=("0", "1"), label=("y",))
    agreed.write(tmp_path / "agreed.json")
    data = {"source": "csv", "path": "rows.csv", "label": "y", "categorical": ["ward"]}
    experiment = {"data": {"preprocessing": "agreed.json"}, "task": {"model": "logistic"}}
    file = write_toml(tmp_path / "experiment.toml", experiment)
    site = site_of({"data": data}, tmp_path / "kerry.toml")
    missing = r'2 features here, 3 features in the run: preprocessing = "agreed\.json" may be missing in \[data\]'
    with pytest.raises(InputError, match=missing):
        list(dry_run(site, file, tmp_path))
    with pytest.raises(InputError, match=r'2 features here, 3 features there\. Add preprocessing = "agreed\.json"'):
        check_data(site)  # `join` does this before it uses the token
    prepared = site_of({"data": {**data, "preprocessing": "agreed.json"}}, tmp_path / "kerry.toml")
    check_data(prepared)
    assert list(dry_run(prepared, file, tmp_path))


@pytest.mark.parametrize("clients", [{"client": "ward"}, {"drop": ["ward"]}])
def test_a_site_that_is_unlike_all_sites_together_has_no_caution_that_tables_have_changed(
    tmp_path: Path, clients: dict[str, Any]
) -> None:
    """Neither in a dry run nor in the description of its data; another unit is still named, whatever its clients."""
    rows = np.random.default_rng(1).normal((50, 170), (10, 8), (200, 2))
    columns = (Column(name="age"), Column(name="height"))
    agreed = Preprocessing(
        columns=columns, mean=(60.0, 170.0), std=(14.0, 8.0), shape=(2,), classes=("0", "1"), label=("y",)
    )
    agreed.write(tmp_path / "agreed.json")

    def cautions(factor: float) -> str:
        cells = "".join(f"{age},{height * factor},w{at % 2},{at % 2}\n" for at, (age, height) in enumerate(rows))
        (tmp_path / "rows.csv").write_text(f"age,height,ward,y\n{cells}")
        data = {"source": "csv", "path": "rows.csv", "label": "y", "preprocessing": "agreed.json", **clients}
        site = write_toml(tmp_path / "oslo.toml", {"site": {"name": "oslo"}, "data": data})
        described = CliRunner().invoke(app, ["data", "describe", str(site), "--picture", str(tmp_path / "x.png")])
        assert described.exit_code == 0, described.output
        said = dry_run(site_of({"site": {"name": "oslo"}, "data": data}, site), None, tmp_path)
        return " ".join([*said, *described.output.split()])

    alike, in_metres = cautions(1.0), cautions(0.01)
    for found in (alike, in_metres):
        assert "sites agreed on" not in found
        assert "gree again" not in found
    assert "another unit" not in alike
    assert len(re.findall(r"set convert = \{ height = \d+\.0 \} in \[data\]", in_metres)) == 2
