"""What a site's policy allows, and mistakes in its file."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom.errors import InputError
from fedloom.experiment.tables import TaskTable
from fedloom.network.agent.policy import SCORES_LEAVE, Policy, Refused, load_site, site_of, trust
from fedloom.network.protocol.messages import ClientAnswer
from fedloom.privacy.table import DpTable, ExampleTable, PrivacyTable, SecureTable
from fedloom.task import Task
from fedloom.training.evaluation import Measured


def check(policy: Policy, folder: Path = Path(), **task: Any) -> None:
    policy.check_experiment(["fedprox"], TaskTable(**task), folder)


def test_a_policy_refuses_what_it_does_not_allow() -> None:
    check(Policy())
    for policy, task, why in (
        (Policy(), {"model": "net.py:Net"}, "only fedloom's own code"),
        (Policy(), {"loss": "net.py:loss"}, "only fedloom's own code"),
        (Policy(), {"metrics": ["net.py:metric"]}, "only fedloom's own code, and the metric is 'net.py:metric'"),
        (Policy(models=["mlp"]), {}, "does not allow the model 'digits_mlp'. Allowed: mlp"),
        (Policy(algorithms=["fedavg"]), {}, "does not allow the algorithm 'fedprox'"),
    ):
        with pytest.raises(Refused, match=why):
            check(policy, **task)
    with pytest.raises(Refused, match="not map"):
        Policy(verbs=["reduce"]).check_assignment("train", "map", 10, {"shared"})
    with pytest.raises(Refused, match="at least 5 clients"):
        Policy(min_cohort=5).check_assignment("train", "reduce", 4, {"shared"})
    for kind, verb, roles in (
        ("train", "evaluate", {"shared"}),  # training is not to be had under another name
        ("evaluate", "reduce", {"shared"}),
        ("train", "reduce", {"shared", "peers"}),
        ("train", "exchange", {"shared"}),
    ):
        with pytest.raises(Refused, match="inconsistent request"):
            Policy().check_assignment(kind, verb, 10, roles)
    Policy().check_assignment("train", "exchange", 10, {"shared", "peers", "private"})
    Policy().check_assignment("fingerprint", "evaluate", 10, {"shared"})
    with pytest.raises(Refused, match="20 training examples"):
        Policy(min_examples=20).check_examples({"a": 19})
    assert Policy().may_leave("accuracy", True)
    assert not Policy().may_leave("auroc", False)
    assert Policy(metrics=["auroc"]).may_leave("auroc", False)
    assert not Policy(metrics=["auroc"]).may_leave("loss", True)
    assert Policy(metrics=["net.py:cost"]).may_leave("cost", False)


def test_a_code_file_is_allowed_only_as_it_was_when_somebody_read_it(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("import layers\nNet = layers.Net\n")
    (tmp_path / "layers.py").write_text("raise SystemExit('this must not run')\n")
    hashes = {name: hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() for name in ("net.py", "layers.py")}
    check(Policy(models=["net.py:Net"], code=hashes), tmp_path, model="net.py:Net")
    for left in ("net.py", "layers.py"):  # what the file imports from its folder is code too
        policy = Policy(models=["net.py:Net"], code={name: one for name, one in hashes.items() if name != left})
        with pytest.raises(Refused, match=f"does not allow the file {left} as it is: .*{hashes[left]}"):
            check(policy, tmp_path, model="net.py:Net")
    (tmp_path / "net.py").write_text("import layers\nNet = layers.Other\n")
    with pytest.raises(Refused, match=r"does not allow the file net\.py as it is"):
        check(Policy(models=["net.py:Net"], code=hashes), tmp_path, model="net.py:Net")


def test_a_metric_of_your_own_is_allowed_by_its_name_and_its_file(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("def cost(outputs, labels):\n    return 1.0\n")
    sha = hashlib.sha256((tmp_path / "net.py").read_bytes()).hexdigest()
    with pytest.raises(Refused, match=r"does not allow the file net\.py as it is"):
        check(Policy(metrics=["net.py:cost"]), tmp_path, metrics=["net.py:cost"])
    check(Policy(metrics=["net.py:cost"], code={"net.py": sha}), tmp_path, metrics=["net.py:cost"])


def test_only_allowed_metrics_leave_with_an_answer() -> None:
    task = Task("logistic", metrics=["accuracy", "balanced_accuracy"])
    scores = {"balanced_accuracy": torch.tensor([[1, 0], [1, 0]])}
    measured = {"test": Measured(2, {"loss": 1.0, "accuracy": 2.0}, scores, torch.tensor([0, 1]))}
    epoch = {"loss": 1.0, "validation_accuracy": 0.5, "validation_balanced_accuracy": 0.4}
    answer = ClientAnswer(0, measured=measured, history=(epoch,))
    found = Policy(metrics=["accuracy"], example_scores=True).withhold(answer, task)
    assert math.isnan(found.measured["test"].sums["loss"])
    assert found.measured["test"].sums["accuracy"] == 2.0
    assert found.measured["test"].summaries == found.measured["test"].scores == {}
    assert found.measured["test"].targets is None
    assert found.history == ({"validation_accuracy": 0.5},)  # not the balanced one, whose name ends in the same word
    test = Policy(metrics=["balanced_accuracy"]).withhold(answer, task).measured["test"]
    assert (test.summaries, test.scores, test.targets) == ({"balanced_accuracy": 0.5}, {}, None)
    test = Policy(metrics=["balanced_accuracy"], example_scores=True).withhold(answer, task).measured["test"]
    assert (test.summaries, test.scores) == ({"balanced_accuracy": 0.5}, scores)
    assert test.targets is not None
    none = Policy(metrics=["balanced_accuracy"], example_scores=True, max_epsilon=1.0).withhold(answer, task)
    assert none.measured["test"].summaries == none.measured["test"].scores == {}


def test_a_policy_says_what_to_write_and_warns_of_scores_of_single_examples() -> None:
    task = Task("logistic", metrics=["accuracy", "auroc"])
    (line,) = Policy().metric_lines(task)
    assert line.startswith("The policy withholds auroc. ")
    assert line.endswith('[policy] metrics = ["loss", "accuracy", "auroc"].')
    assert list(Policy(metrics=["loss", "accuracy", "auroc"]).metric_lines(task)) == []
    assert list(Policy(metrics=["loss", "accuracy", "auroc"], example_scores=True).metric_lines(task)) == [SCORES_LEAVE]
    assert not Policy(example_scores=True).sends_scores(task)  # no metric that needs them may leave


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[site]\nname = 'a'", "has no [data] table"),
        ("[data]\nsource = 'digits'\n[polcy]\n", "Did you mean 'policy'"),
        ("[data]\nsource = 'digits'\n[policy]\nverb = ['reduce']", "no key 'verb'"),
        ("[data]\nsource = 'digits'\n[policy]\nverbs = ['steal']", "[policy] verbs"),
        ("[data\n", "not a valid TOML file"),
    ],
)
def test_mistakes_in_a_site_file_are_explained(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "kerry.toml").write_text(text)
    with pytest.raises(InputError) as error:
        load_site(tmp_path / "kerry.toml")
    assert words in str(error.value)


def test_a_site_can_require_secure_aggregation_and_a_threshold() -> None:
    plain, secure = PrivacyTable(), PrivacyTable(secure_aggregation=SecureTable(threshold=0.6))
    Policy().check_privacy(plain)
    Policy(require_secure_aggregation=True, min_threshold=0.6).check_privacy(secure)
    with pytest.raises(
        Refused, match=r"requires secure aggregation \(\[policy\] require_secure_aggregation\), and the run has none"
    ):
        Policy(require_secure_aggregation=True).check_privacy(plain)
    with pytest.raises(
        Refused, match=r"at least 0.67 in secure aggregation \(\[policy\] min_threshold\), and the run has 0.6"
    ):
        Policy().check_privacy(secure)


def together(**dp: Any) -> PrivacyTable:
    settings = {"epsilon": 2.0, "clip": 1.0, "noise": "distributed", **dp}
    return PrivacyTable(secure_aggregation=SecureTable(), dp=DpTable(**settings))


def test_noise_that_clients_add_together_counts_if_the_site_says_how_many_may_collude() -> None:
    Policy(max_epsilon=2.0, assumed_colluders=0.1).check_privacy(together())
    Policy(max_epsilon=2.0, assumed_colluders=0.25).check_privacy(together(colluders=0.3))
    with pytest.raises(Refused, match="counts if the policy has assumed_colluders"):
        Policy(max_epsilon=2.0).check_privacy(together())
    with pytest.raises(Refused, match="and the run's dp colluders are at least as many"):
        Policy(max_epsilon=2.0, assumed_colluders=0.25).check_privacy(together())
    with pytest.raises(Refused, match="the run offers ε = 2 at δ = 1e-05"):
        Policy(max_epsilon=1.0, assumed_colluders=0.1).check_privacy(together())
    server = PrivacyTable(secure_aggregation=SecureTable(), dp=DpTable(epsilon=1.0, clip=1.0))
    with pytest.raises(Refused, match="cannot be verified here"):
        Policy(max_epsilon=2.0, assumed_colluders=0.0).check_privacy(server)


def test_a_refusal_names_the_keys_of_the_policy(tmp_path: Path) -> None:
    weak = PrivacyTable(example_dp=ExampleTable(epsilon=8.0, delta=1e-3))
    Policy(max_epsilon=8.0, max_delta=1e-3).check_privacy(weak)
    keys = r"ε at most 8 \(\[policy\] {}\) at δ at most 1e-05 \(\[policy\] max_delta\), and"
    with pytest.raises(Refused, match=keys.format("max_epsilon")):
        Policy(max_epsilon=8.0, max_total_epsilon=20.0).check_privacy(weak)
    with pytest.raises(Refused, match=keys.format("max_total_epsilon")):
        Policy(max_epsilon=9.0, max_total_epsilon=8.0).check_privacy(weak)
    with pytest.raises(Refused, match=r"\(\[policy\] verbs\)"):
        Policy(verbs=["evaluate"]).check_assignment("train", "reduce", 3, ())
    with pytest.raises(Refused, match=r"\(\[policy\] min_examples\)"):
        Policy(min_examples=9).check_examples({"kerry": 8})
    with pytest.raises(Refused, match=r"'mlp'\. Allowed: logistic \(\[policy\] models\)"):
        check(Policy(models=["logistic"]), tmp_path, model="mlp")
    with pytest.raises(Refused, match=r"name it in \[policy\] losses"):
        check(Policy(), tmp_path, loss="net.py:loss")


def test_a_site_is_told_what_it_must_trust_the_coordinator_in() -> None:
    assert "It can read each client's update" in trust(PrivacyTable(), Policy())
    secure = PrivacyTable(secure_aggregation=SecureTable())
    assert "sums over at least 5 clients, and no client's update" in trust(secure, Policy(min_cohort=5))


def test_a_site_is_told_if_two_secure_sums_are_about_the_same_weights() -> None:
    secure = PrivacyTable(secure_aggregation=SecureTable())
    assert "The 2 algorithms of this run begin with the same weights" in trust(secure, Policy(), 2)
    assert not any("same weights" in trust(*told) for told in ((secure, Policy(), 1), (together(), Policy(), 2)))


def test_a_site_is_told_when_it_must_trust_the_coordinator_to_follow_the_protocol_and_can_refuse() -> None:
    secure = PrivacyTable(secure_aggregation=SecureTable())
    warning = "In a round of more than 100 clients, it must also trust the coordinator to follow the protocol"
    assert warning in trust(secure, Policy())
    assert warning in trust(secure, Policy(max_secure_cohort=101))
    assert warning not in trust(secure, Policy(max_secure_cohort=100))
    assert warning not in trust(PrivacyTable(), Policy())
    Policy(max_secure_cohort=100).check_privacy(secure, 100)
    Policy(max_secure_cohort=100).check_privacy(PrivacyTable(), 101)
    Policy().check_privacy(secure, 101)
    with pytest.raises(Refused, match=r"at most 100 clients .* \(\[policy\] max_secure_cohort\), and this one has 101"):
        Policy(max_secure_cohort=100).check_privacy(secure, 101)


def test_a_stage_of_a_secure_sum_is_a_reduce() -> None:
    Policy(min_cohort=3).check_assignment("advertise", "reduce", 3, ())
    with pytest.raises(Refused, match="inconsistent request: kind 'unmask'"):
        Policy().check_assignment("unmask", "map", 3, ())
    with pytest.raises(Refused, match=r"at least 4 clients in a round \(\[policy\] min_cohort\), and"):
        Policy(min_cohort=4).check_assignment("share", "reduce", 3, ())


def test_what_a_refusal_quotes_cannot_pass_for_a_line_of_its_own() -> None:
    assert str(Refused("round 1 of a\x1b[2J\nEnrolled. is over")) == "round 1 of a\\x1b[2J\n  | Enrolled. is over"


def test_a_table_of_a_site_that_names_no_clients_is_one_client(tmp_path: Path) -> None:
    (tmp_path / "wards").mkdir()
    one = {"name": "iid", "clients": 1}
    for data, partition in (
        ({"source": "csv", "path": "kerry.csv"}, one),
        ({"source": "csv", "path": "kerry.csv", "client": "ward"}, None),
        ({"source": "csv", "path": "kerry.csv", "partition": {"name": "iid", "clients": 2}}, {**one, "clients": 2}),
        ({"source": "csv", "path": "wards"}, None),
        ({"source": "digits"}, None),
    ):
        assert site_of({"data": data}, tmp_path / "kerry.toml").data.get("partition") == partition
