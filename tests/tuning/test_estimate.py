"""Estimates: which work they count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedloom.errors import FedloomError
from fedloom.experiment import experiment_file
from fedloom.tuning import estimate

# of 1,797 digits, 197 at the server: four clients with 200 to train, 100 to validate and 100 to test
FOUR = {"partition": {"name": "iid", "clients": 4}, "split": [0.5, 0.25, 0.25], "server": 197}


@pytest.mark.parametrize(
    ("evaluate", "tested"),
    [
        ({}, 100),
        ({"server": ["test"]}, 100),
        ({"server": []}, 0),
        ({"server": ["train", "test"]}, 1697 + 100),  # train: of all clients
    ],
)
def test_only_what_is_measured_is_counted(
    monkeypatch: pytest.MonkeyPatch, evaluate: dict[str, Any], tested: int
) -> None:
    monkeypatch.setattr(estimate, "_time_step", lambda *_: (3.0, 1))  # a second forward, two backward
    experiment = experiment_file.parse(
        {
            "data": {"partition": {"name": "iid", "clients": 1}, "split": [1, 0, 0], "server": 100},
            "evaluate": {"splits": [], **evaluate},
            "run": {"backend": "serial"},
        }
    )
    training = 1697 * 3.0
    assert estimate.estimate(experiment).seconds_a_round == pytest.approx(training + tested, abs=0.1)


@pytest.mark.parametrize(
    ("algorithm", "models"),
    [({"name": "fedavg"}, 0), ({"name": "selective"}, 1), ({"name": "peer", "weights": "score"}, 4)],
)
@pytest.mark.parametrize(("evaluate", "at_the_end"), [({}, 0), ({"universal": True}, 4 * 400)])
def test_scores_and_everybodys_tests_are_counted(
    monkeypatch: pytest.MonkeyPatch, algorithm: dict[str, Any], models: int, evaluate: dict[str, Any], at_the_end: int
) -> None:
    monkeypatch.setattr(estimate, "_time_step", lambda *_: (3.0, 1))
    experiment = experiment_file.parse(
        {
            "data": FOUR,
            "train": {"epochs": 1},
            "evaluate": {"splits": [], "server": [], **evaluate},
            "algorithm": {"one": algorithm},
            "run": {"backend": "serial"},
        }
    )
    found = estimate.estimate(experiment)
    assert found.seconds_a_round == pytest.approx(4 * 200 * 3.0 + models * 4 * 100, abs=0.1)
    assert found.seconds_at_the_end == at_the_end


def test_a_run_that_may_stop_in_any_round_measures_everybodys_tests_in_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "_time_step", lambda *_: (3.0, 1))
    experiment = experiment_file.parse(
        {
            "data": FOUR,
            "evaluate": {
                "splits": [], "server": [], "universal": True, "target": {"accuracy": 0.9}, "stop": "target",
            },
            "run": {"backend": "serial"},
        }
    )  # fmt: skip
    found = estimate.estimate(experiment)
    assert found.seconds_a_round == pytest.approx(4 * 200 * 3.0 + 4 * 400, abs=0.1)
    assert found.seconds_at_the_end == 0


def test_compression_is_said_in_bytes() -> None:
    values: dict[str, Any] = {
        "data": {"source": "digits", "partition": {"name": "iid", "clients": 4}},
        "algorithm": {"fedavg": {}, "peer": {}, "local": {}},
        "compress": {"up": {"name": "topk", "keep": 0.01}},
        "run": {"backend": "serial"},
    }
    found = estimate.estimate(experiment_file.parse(values))
    said = {line.split()[0]: line for line in found.lines()}
    assert " up and " in said["fedavg"].split(", instead of ")[1]
    assert "finds no change of the model in its messages" in said["peer"]
    assert said["local"] == "local sends nothing"
    up, plain = found.traffic_a_round["fedavg"], found.uncompressed_a_round["fedavg"]
    assert up is not None
    assert plain is not None
    assert up.up < plain.up / 40
    assert up.down == plain.down


def test_an_error_in_a_metric_of_your_own_is_found_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def mine(output, target):\n    raise KeyError('age')\n")
    experiment = experiment_file.parse({"data": FOUR, "task": {"metrics": ["mine.py:mine"]}}, tmp_path)
    with pytest.raises(FedloomError, match="The metric 'mine' failed: KeyError: 'age'"):
        estimate.estimate(experiment)
