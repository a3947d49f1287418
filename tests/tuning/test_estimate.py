"""Estimates: which work they count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedloom.errors import FedloomError, InputError
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


def test_odd_clients_and_weights_that_differ_are_cautioned_before_a_run(tmp_path: Path) -> None:
    rows = [*["alone,1.5,yes"], *(f"other,{number},{'yes' if number % 2 else 'no'}" for number in range(40))]
    (tmp_path / "data.csv").write_text("\n".join(["client,x,label", *rows]), encoding="utf-8")
    data = {"source": "csv", "path": "data.csv", "client": "client", "label": "label"}
    tables = {
        "data": data,
        "task": {"model": "logistic", "args": {"features": 1, "classes": 2}},
        "algorithm": {"fedavg": {}, "scaffold": {}},
    }
    said = "\n".join(estimate.estimate(experiment_file.parse(tables, base=tmp_path)).lines())
    assert "Caution: 1 of 2 clients has only one training example: alone." in said
    assert "Caution: 1 of 2 clients has no test examples: alone." in said
    assert (
        'Caution: Algorithms weigh clients in different ways (weights = "examples" for fedavg and "uniform" for' in said
    )


@pytest.mark.parametrize(("partition", "own"), [("natural", False), ({"name": "iid", "clients": 2}, True)])
def test_what_is_said_of_clients_that_every_seed_draws_names_the_seed(
    tmp_path: Path, partition: Any, own: bool
) -> None:
    rows = [*["alone,1.5,yes"] * 2, *(f"other,{number},{'yes' if number % 2 else 'no'}" for number in range(40))]
    (tmp_path / "data.csv").write_text("\n".join(["client,x,label", *rows]), encoding="utf-8")
    data = {"source": "csv", "path": "data.csv", "label": "label", "partition": partition, "seed": "run"}
    data |= {"drop": ["client"]} if own else {"client": "client"}
    task = {"model": "logistic", "args": {"features": 1, "classes": 2}}
    algorithm = {"usual": {"name": "fedavg", "batch_size": 64, "drop_last": True}}
    tables = {"seeds": [7, 8], "data": data, "task": task, "algorithm": algorithm}
    found = estimate.estimate(experiment_file.parse(tables, base=tmp_path))
    assert found.clients_of_seed == (7 if own else None)
    said = "\n".join(found.lines())
    assert (" each in seed 7; every seed draws its own" in said) == own
    assert ("drop_last = true drops nothing in seed 7: the largest" in said) == own
    once = estimate.estimate(experiment_file.parse({**tables, "seeds": [7]}, base=tmp_path))
    assert "seed 7" not in "\n".join(once.lines())


BATCH_NORM = """
from torch import nn

def make():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))

def worst(output, y):
    return nn.functional.cross_entropy(output, y, reduction="none").max()
"""


@pytest.mark.parametrize(
    ("privacy", "task", "message"),
    [
        ({"dp": {"epsilon": 2.0}}, {}, "needs more clients in a round than 10 × the noise multiplier"),
        ({"secure_aggregation": {"min_clients": 12}}, {}, "needs at least min_clients = 12"),
        ({"secure_aggregation": {"bits": 32, "range": 1e9}}, {}, "bits = 32 is too few for"),
        ({"secure_aggregation": {"bits": 32, "range": {"model": 1e9}}}, {}, "bits = 32 is too few for"),
        (
            {"dp": {"epsilon": 8.0, "clip": 1.0, "noise": "distributed", "colluders": 0.9}, "secure_aggregation": {}},
            {},
            "nobody may be left to add noise",
        ),
        ({"example_dp": {}}, {"model": "own.py:make"}, r"its layer 2 \(BatchNorm1d\) mixes .* torch.nn.GroupNorm"),
        ({"example_dp": {}}, {"loss": "own.py:worst"}, "needs a loss that is the mean of its examples' losses"),
    ],
)
def test_a_check_refuses_protections_that_a_run_would_refuse(
    tmp_path: Path, privacy: dict[str, Any], task: dict[str, Any], message: str
) -> None:
    (tmp_path / "own.py").write_text(BATCH_NORM, encoding="utf-8")
    tables = {
        "data": {"partition": {"name": "iid", "clients": 10}},
        "task": task,
        "privacy": privacy,
        "algorithm": {"fedavg": {"weights": "uniform"}},
    }
    with pytest.raises(InputError, match=message):
        estimate.estimate(experiment_file.parse(tables, base=tmp_path))


def test_pooling_gives_all_examples_away() -> None:
    experiment = experiment_file.parse(
        {"data": {"partition": {"name": "iid", "clients": 2}}, "algorithm": {"fedavg": {}, "pooled": {}}}
    )
    said = "\n".join(estimate.estimate(experiment).lines())
    assert "pooled trains on all examples in one place: every client would give them away" in said
    assert "fedavg sends " in said
    assert "pooled sends" not in said


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
        "algorithm": {"fedavg": {}, "snes": {}, "local": {}},
        "compress": {"up": {"name": "topk", "keep": 0.01}},
        "run": {"backend": "serial"},
    }
    found = estimate.estimate(experiment_file.parse(values))
    said = {line.split()[0]: line for line in found.lines()}
    assert " up and " in said["fedavg"].split(", instead of ")[1]
    assert "finds no change of the model in its messages" in said["snes"]
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


FAILING = """import torch
from torch import nn

class Late(nn.Linear):
    def __init__(self, most=20, training=True):
        super().__init__(64, 10)
        self.most, self.when = most, training
    def forward(self, x):
        if self.training == self.when and len(x) > self.most:
            raise KeyError("too many rows")
        return super().forward(x)

class Cut(nn.Linear):
    def forward(self, x):
        return super().forward(x).detach()

def late(output, target):
    if output.requires_grad and len(target) > 20:
        raise KeyError("too many rows")
    return nn.functional.cross_entropy(output, target)

def normed():
    return nn.Sequential(nn.Linear(64, 10), nn.BatchNorm1d(10))

def branching(output, target):
    value = nn.functional.cross_entropy(output, target)
    return value if value.item() > 0 else 2 * value
"""
PLACE = r"\n  \S*mine\.py, line \d+, in"


@pytest.mark.parametrize(
    ("task", "batch_size", "said"),
    [
        (
            {"model": "mine.py:Late"},
            32,
            rf"client '0', local training, step 1: KeyError: 'too many rows'{PLACE} forward",
        ),
        ({"loss": "mine.py:late"}, 32, rf"client '0', local training, step 1: KeyError: 'too many rows'{PLACE} late"),
        (
            {"model": "mine.py:Late", "args": {"most": 99, "training": False}},
            32,
            rf"client '0', evaluation: KeyError: 'too many rows'{PLACE} forward",
        ),
        (
            {"model": "mine.py:Cut", "args": {"in_features": 64, "out_features": 10}},
            32,
            r"does not require grad.*\nThe loss does not depend on the parameters\. Is there a \.detach\(\)",
        ),
        ({"model": "mine.py:normed"}, 1, "trains on batches of one example, but the model's batch normalisation needs"),
    ],
)
def test_a_check_refuses_your_own_code_in_the_words_of_a_run(
    tmp_path: Path, task: dict[str, Any], batch_size: int, said: str
) -> None:
    (tmp_path / "mine.py").write_text(FAILING, encoding="utf-8")
    tables = {"data": FOUR, "task": task, "train": {"batch_size": batch_size}, "run": {"backend": "serial"}}
    with pytest.raises(InputError, match=said):
        estimate.estimate(experiment_file.parse(tables, tmp_path))


def test_a_check_tries_only_batches_that_a_run_has(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FAILING, encoding="utf-8")
    task = {"model": "mine.py:Late", "args": {"most": 200}}
    tables = {"data": FOUR, "task": task, "train": {"batch_size": 1000}, "run": {"backend": "serial"}}
    estimate.estimate(experiment_file.parse(tables, tmp_path))


def test_a_check_takes_a_loss_that_only_a_whole_batch_can_compute(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FAILING, encoding="utf-8")
    tables = {"data": FOUR, "task": {"loss": "mine.py:branching"}, "run": {"backend": "serial"}}
    estimate.estimate(experiment_file.parse(tables, tmp_path))


def test_a_range_that_a_rehearsal_leaves_is_cautioned_and_a_missing_one_refused(tmp_path: Path) -> None:
    def cautions(range: Any, **more: Any) -> str:
        secure = {"secure_aggregation": {"range": range, "lost": [0.0, 0.0, 0.9, 0.0, 0.0]}, **more}
        values = {
            "data": {"source": "digits", "partition": {"name": "iid", "clients": 4}},
            "task": {"model": "digits_mlp"},
            "cohort": {"max_examples": 5},
            "privacy": secure,
            "algorithm": {"fedavg": {}},
        }
        return " ".join(estimate.estimate(experiment_file.parse(values)).cautions)

    assert "fedavg: clients may send nothing" in cautions(1e-6)
    assert "out of the range 1e-06" in cautions({"model": 1e-6})
    assert "may send nothing" not in cautions(4.0)
    with pytest.raises(InputError, match="has no range for the group 'model'"):
        cautions({"other": 1.0})
