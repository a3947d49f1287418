"""All audits of an experiment, and the file they leave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedloom.audits import audit as auditing
from fedloom.audits.audit import audit
from fedloom.audits.poisoning import Poisoning
from fedloom.errors import InputError, StoreError, TrainingError
from fedloom.experiment import experiment_file
from fedloom.experiment.description import identity
from fedloom.experiment.plan import Plan
from fedloom.experiment.progress import Progress
from fedloom.experiment.run import run_plan

SETTINGS: dict[str, Any] = {
    "rounds": 2,
    "data": {"source": "digits", "partition": {"name": "iid", "clients": 5}},
    "algorithm": {"fedavg": {"weights": "uniform"}, "local": {}},
    "run": {"backend": "serial"},
}
PRIVATE = {"algorithm": {"fedavg": {"weights": "uniform"}}, "privacy": {"dp": {"noise_multiplier": 1.0, "clip": 0.5}}}


class Told(Progress):
    def __init__(self) -> None:
        self.steps: list[tuple[str, int]] = []

    def step(self, cell: str, round: int, values: dict[str, float], seconds: float) -> None:
        self.steps.append((cell, round))


def test_membership_is_inferred_for_each_algorithm_with_a_global_model(tmp_path: Path) -> None:
    experiment, told = experiment_file.parse(SETTINGS), Told()
    run_plan(Plan.of(experiment), tmp_path)
    found = audit(experiment, tmp_path, ["membership"], told)
    assert list(found["membership"]) == ["fedavg"]
    assert found["membership"]["fedavg"]["loss"]["members"] > 1000
    assert json.loads((tmp_path / "audit.json").read_text()) == found
    assert told.steps == [("membership", 1), ("membership", 2)]


def test_the_claimed_epsilon_is_audited_without_a_run(tmp_path: Path) -> None:
    experiment, told = experiment_file.parse({**SETTINGS, **PRIVATE}), Told()
    found = audit(experiment, tmp_path / "new", ["epsilon"], told, canaries=100)
    assert found["epsilon"]["fedavg"]["canaries"] == 100
    assert found["epsilon"]["fedavg"]["refuted"] is False
    assert told.steps == [("epsilon", 1), ("epsilon", 2)]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("epsilon", "claims no ε for clients"),
        ("membership", "There is no run in"),
        ("memebrship", "There is no audit 'memebrship'. Known: .* Did you mean 'membership'?"),
    ],
)
def test_an_audit_you_ask_for_says_why_it_cannot_be_made(tmp_path: Path, name: str, why: str) -> None:
    with pytest.raises((InputError, StoreError), match=why):
        audit(experiment_file.parse(SETTINGS), tmp_path, [name], Progress())
    assert not (tmp_path / "audit.json").exists()


def test_of_several_audits_those_that_apply_are_made_and_the_others_say_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auditing, "_poisoning", lambda *given: {"accuracy": {}})
    found = audit(experiment_file.parse(SETTINGS), tmp_path, ["epsilon", "membership", "poisoning"], Progress())
    assert "claims no ε for clients" in found["epsilon"]["left_out"]
    assert "There is no run in" in found["membership"]["left_out"]
    assert found["poisoning"] == {"accuracy": {}}
    with pytest.raises(InputError, match=r"^No audit of epsilon: .* dp\.\nNo audit of membership: There is no run"):
        audit(experiment_file.parse(SETTINGS), tmp_path, ["membership", "epsilon"], Progress())


@pytest.mark.parametrize("name", ["epsilon", "reconstruction", "poisoning"])
def test_attacks_on_updates_are_left_out_if_updates_are_compressed(tmp_path: Path, name: str) -> None:
    experiment = experiment_file.parse({**SETTINGS, **PRIVATE, "compress": {"up": "eden"}})
    with pytest.raises(InputError, match=f"The {name} audit attacks updates as they are"):
        audit(experiment, tmp_path, [name], Progress())


def test_findings_do_not_mix_with_the_run_of_another_experiment(tmp_path: Path) -> None:
    run_plan(Plan.of(experiment_file.parse(SETTINGS)), tmp_path)
    other = experiment_file.parse({**SETTINGS, "train": {"lr": 0.7}})
    with pytest.raises(InputError, match=r"holds the run of another experiment(.|\n)*lr: .* → 0\.7(.|\n)*--out"):
        audit(other, tmp_path, ["membership"], Progress())


def test_without_a_choice_audits_that_do_not_apply_are_left_out_and_earlier_ones_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auditing, "_poisoning", lambda *given: {"accuracy": {}})
    monkeypatch.setattr(auditing, "_reconstruction", lambda *given: {"labels": {}})
    experiment = experiment_file.parse(SETTINGS)
    about = {"identity": identity(experiment.description())}
    (tmp_path / "audit.json").write_text(json.dumps({"poisoning": 1, "another": 2, "experiment": about}))
    found = audit(experiment, tmp_path, [], Progress())
    assert list(found) == ["poisoning", "another", "experiment", "epsilon", "membership", "reconstruction"]
    assert found["poisoning"] == {"accuracy": {}}
    assert "claims no ε for clients" in found["epsilon"]["left_out"]
    assert "There is no run in" in found["membership"]["left_out"]


def test_findings_about_another_experiment_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auditing, "_poisoning", lambda *given: {"accuracy": {}})
    monkeypatch.setattr(auditing, "_membership", lambda *given: {"fedavg": {}})
    audit(experiment_file.parse({**SETTINGS, "train": {"lr": 0.7}}), tmp_path, ["poisoning"], Progress())
    found = audit(experiment_file.parse(SETTINGS), tmp_path, ["membership"], Progress())
    assert list(found) == ["experiment", "membership"]


def test_an_audit_that_fails_ends_the_others_and_what_was_found_before_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*given: Any) -> Any:
        raise TrainingError("the loss is not finite")

    monkeypatch.setattr(auditing, "_membership", lambda *given: {"fedavg": {}})
    monkeypatch.setattr(auditing, "_reconstruction", fails)
    with pytest.raises(TrainingError):
        audit(experiment_file.parse(SETTINGS), tmp_path, [], Progress())
    assert list(json.loads((tmp_path / "audit.json").read_text())) == ["experiment", "epsilon", "membership"]


def test_the_cohort_and_the_noise_of_the_experiment_are_those_of_the_reconstruction(tmp_path: Path) -> None:
    told = Told()
    experiment = experiment_file.parse({**SETTINGS, **PRIVATE, "cohort": {"count": 3}})
    found = audit(experiment, tmp_path, ["reconstruction"], told)["reconstruction"]
    assert (found["cohort"], found["noise_multiplier"]) == (3, 1.0)
    assert found["not_applied"] == ["dp"]
    assert told.steps[-1] == ("reconstruction", 9)


def test_poisoning_uses_the_data_the_model_and_the_rounds_of_the_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def poison(dataset: Any, task: Any, train: Any, rounds: int, normalize: str, tell: Any) -> Any:
        seen.extend([len(dataset.y), task.model, train.lr, rounds, normalize])
        return Poisoning({}, 20, 4, rounds)

    monkeypatch.setattr(auditing, "poison", poison)
    data = {**SETTINGS["data"], "normalize": "client"}  # the server's examples have no client's statistics
    experiment = experiment_file.parse({**SETTINGS, "train": {"lr": 0.07}, "data": data})
    audit(experiment, tmp_path, ["poisoning"], Progress())
    assert seen == [1797, "digits_mlp", 0.07, 2, "federated"]
