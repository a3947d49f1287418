"""What a sweep tells you to do next."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedloom.results.run_values import MetricInfo
from fedloom.tuning.sweep import SweepResult, Trial
from fedloom.tuning.sweep_advice import advice, at_edge


@pytest.mark.parametrize(
    ("best", "said"),
    [(0.1, "lr = 0.1 is the smallest"), (0.2, ""), (0.3, "lr = 0.3 is the largest that was tried: larger")],
)
def test_a_best_setting_at_the_edge_is_named(tmp_path: Path, best: float, said: str) -> None:
    tried = [Trial({"lr": lr, "name": "x", "table": {}}, "a", values={1: float(lr == best)}) for lr in (0.1, 0.2, 0.3)]
    other = Trial({"lr": 0.9}, "b", values={1: 0.0})
    found = SweepResult(tmp_path, MetricInfo("accuracy", True, True), "", (*tried, other))
    hints = " ".join(at_edge(found, next(one for one in tried if one.values[1])))
    assert said in hints
    assert bool(said) == bool(hints)
    assert not [*at_edge(found, other)]


def test_the_command_for_one_algorithm_has_no_settings_of_others(tmp_path: Path) -> None:
    tried = tuple(Trial({"train.lr": 0.1}, label, values={1: 0.5}) for label in ("fedavg", "scaffold"))
    found = SweepResult(tmp_path, MetricInfo("accuracy", True, True), "", tried, unchanged=("local",))
    changes = [
        "rounds=3",
        "algorithm.scaffold.weights=uniform",
        "algorithm.fedavg.weights=uniform",
        "algorithm.local={}",
    ]
    commands = [text for text in advice(found, Path("x.toml"), changes) if "fedloom run" in text]
    for command, label in zip(commands, ("fedavg", "scaffold"), strict=True):
        changed = f"--set rounds=3 --set algorithm.{label}.weights=uniform --set train.lr=0.1"
        assert f"x.toml --only {label} {changed} --out" in command


def test_a_sweep_over_epsilon_names_no_best_setting_and_says_that_each_run_spends(tmp_path: Path) -> None:
    accuracy = MetricInfo("accuracy", True, True)
    tried = tuple(Trial({"privacy.dp.epsilon": one}, "a", values={1: one / 9, 2: one / 9}) for one in (8.0, 4.0))
    found = SweepResult(tmp_path, accuracy, "", tried, spends=True)
    told = " ".join(advice(found, Path("x.toml"), []))
    assert "you do not tune it" in told
    assert not any(word in told for word in ("Best", "may be better", "fedloom run"))
    assert "optimistic" not in (found.table().note or "")
    assert found.in_short() == "44.44 % to 88.89 % validation accuracy"
    assert "Each of these 4 runs spends its own ε" in " ".join(found.cautions())
    clipped = tuple(Trial({"privacy.dp.clip": one}, "a", values={1: one / 9}) for one in (8.0, 4.0))
    told = " ".join(advice(SweepResult(tmp_path, accuracy, "", clipped), Path("x.toml"), []))
    assert "Best on validation data: privacy.dp.clip=8.0" in told
    assert "larger ones may be better" in told
