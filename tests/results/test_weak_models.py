"""Models that are no better than guessing, miss cases or leave clients behind are named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedloom.experiment import experiment_file
from fedloom.experiment.plan import Plan
from fedloom.experiment.run import run_plan
from fedloom.results.comparisons import comparisons
from fedloom.results.report_warnings import cautions
from fedloom.results.run_data import RunData
from fedloom.results.run_values import ClientValues, MetricInfo
from fedloom.results.weak_models import EASIER, easy_own_tests, left_behind, misses_most, no_better_than_guessing
from tests.results.helpers import with_labels


def test_algorithms_that_do_no_better_than_the_most_common_label_are_named(run: RunData) -> None:
    def said(counts: list[list[int]]) -> list[str]:
        return [text for text in cautions(with_labels(run, counts)) if text.startswith("No better than")]

    assert said([[1, 1, 1]]) == []
    (text,) = said([[0, 50, 0], [0, 50, 0]])
    assert text.startswith("No better than always predicting dead, which has 100.00 % by the same measure: fedavg (")
    assert "global model, all clients' tests" in text


@pytest.mark.parametrize("kind", ["dp", "example_dp"])
def test_noise_is_the_first_reason_for_a_model_that_guesses(run: RunData, kind: str) -> None:
    def said(privacy: dict[str, Any]) -> str:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RunData, "description", {**run.description, "privacy": privacy})
            return next(no_better_than_guessing(with_labels(run, [[0, 50, 0]])))

    assert "noise" not in said({})
    assert "more rounds" in said({})
    noisy = said({kind: {"epsilon": 1.0}})
    assert 0 < noisy.index("noise of differential privacy") < noisy.index("larger ε") < noisy.index("smaller lr")
    assert "more rounds" not in noisy


def test_guessing_is_measured_as_models_are(run: RunData, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few die at a large hospital, and half at four small ones: a mean over hospitals is not one over patients."""
    tested = [[594, 6, 0], [24, 16, 0], [20, 20, 0], [19, 21, 0], [18, 22, 0]]

    def said(key: str, held: dict[str, Any], server: dict[str, int] | None = None, **means: float) -> list[str]:
        found = replace(
            comparisons(run, "accuracy")[0], key=key, values={name: {1: one} for name, one in means.items()}
        )
        monkeypatch.setattr("fedloom.results.weak_models.comparisons", lambda *_: [found])
        labels = {"classes": ["alive", "dead", "gone"], "counts": [[1, 0, 0]], **held}
        about = replace(run, facts={**run.facts, "labels": labels, "server": server or {}})
        return [text.partition(", global")[0].partition(", final")[0] for text in no_better_than_guessing(about)]

    no, unclear = "No better than always predicting alive", "Not clearly better than always predicting alive"
    assert said("test", {"tested": tested}, local=0.823, fedavg=0.638, sick=0.6) == [
        f"{unclear}, which has 60.30 % by the same measure: fedavg (63.80 %)",
        f"{no}, which has 60.30 % by the same measure: sick (60.00 %)",
    ]
    assert said("server_test", {"tested": tested}, fedavg=0.823) == [
        f"{no}, which has 88.82 % by the same measure: fedavg (82.30 %)"
    ]
    at_server = {"tested": tested, "server": [40, 30, 30]}
    (text,) = said("server_test", at_server, {"test": 100}, fedavg=0.45)
    assert text == f"{unclear}, which has 40.00 % by the same measure: fedavg (45.00 %)"
    assert said("server_test", at_server, {"test": 100}, fedavg=0.50) == []  # two standard errors are 9.8 points
    assert (
        said("server_test", {"tested": tested}, {"test": 100}, fedavg=0.1) == []
    )  # an earlier version did not count them
    evenly = {"tested": [[300, 300, 0], [9, 1, 0], [9, 1, 0], [9, 1, 0]]}
    assert said("test", evenly, fedavg=0.75)[0].startswith(f"{no}, which has 80.00 % by the same measure")


def test_how_far_chance_alone_goes_is_said(run: RunData, monkeypatch: pytest.MonkeyPatch) -> None:
    found = replace(comparisons(run, "accuracy")[0], key="server_test", values={"fedavg": {1: 0.42}})
    monkeypatch.setattr("fedloom.results.weak_models.comparisons", lambda *_: [found])
    about = with_labels(run, [[160, 120, 120]])
    (text,) = no_better_than_guessing(about)
    assert "On 400 test examples, chance alone can lift it to 44.90 %. Look at balanced_accuracy" in text
    (text,) = no_better_than_guessing(replace(about, facts={**about.facts, "rounds": 0}))
    assert text.endswith("Nothing was trained here: this is about the model that was given, or its initial weights.")


def test_without_counts_of_labels_an_accuracy_on_a_network_is_not_left_uncommented(run: RunData) -> None:
    known = with_labels(run, [[1, 1, 1]])
    unknown = replace(run, facts={name: value for name, value in run.facts.items() if name != "labels"})

    def said(run: RunData, network: bool) -> bool:
        about = replace(run, facts={**run.facts, "network": network})
        return any(text.startswith("How often the most frequent class occurs is unknown") for text in cautions(about))

    at_clients = [one for one in comparisons(run, "accuracy") if one.key != "server_test"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedloom.results.weak_models.comparisons", lambda *_: at_clients)
        assert said(unknown, network=True)
        assert not said(known, network=True)
        assert not said(unknown, network=False)
    assert said(unknown, network=True)  # an earlier version did not count the labels of the server's own data
    own = {"classes": ["alive", "dead", "gone"], "counts": [], "tested": [], "server": [4, 3, 3]}
    assert not said(replace(unknown, facts={**unknown.facts, "labels": own, "server": {"test": 10}}), network=True)


@pytest.mark.parametrize(
    ("metric", "is_mean", "others", "low"), [("accuracy", True, 0.96, 16 / 19), ("auroc", False, 0.9, 0.7)]
)
def test_a_client_is_left_behind_only_if_chance_could_hardly_explain_it(
    metric: str, is_mean: bool, others: float, low: float, run: RunData, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the rule that compares clients with learning alone: few test examples and unequal seeds explain much."""

    def said(tested: int, *lows: float) -> list[str]:
        held = [
            ClientValues.of(np.array([[1, client, others] for client in range(9)] + [[1, 9, value]])) for value in lows
        ]
        monkeypatch.setattr(RunData, "client_values_by_seed", lambda *_: dict(enumerate(held, 1)))
        clients = tuple({**run.clients[0], "test": tested} for _ in range(10))
        metrics = {metric: MetricInfo(metric, is_mean, True)}
        return [*left_behind(replace(run, clients=clients, metrics=metrics))]

    assert not said(19, low)
    assert "Left behind with" in said(1900, low)[0]
    assert "Left behind with" in said(1900, low, low)[0]
    assert not said(1900, 2 * low - others, others)  # the same mean over seeds, by one bad seed


def test_models_that_miss_most_cases_are_named_with_what_to_do(run: RunData, monkeypatch: pytest.MonkeyPatch) -> None:
    recall = replace(run, metrics={**run.metrics, "sensitivity": MetricInfo("sensitivity", True, True)})
    assert not any("cases are missed" in text for text in cautions(run))
    found = {"fedavg": {1: [0.1, 0.3], 2: [0.6]}, "local": {1: [0.9]}, "pooled": {1: [0.6]}}

    def last_round(run: RunData, label: str, *_: str) -> dict[int, ClientValues]:
        return {
            seed: ClientValues.of(np.array([[1, 0, one] for one in values])) for seed, values in found[label].items()
        }

    monkeypatch.setattr(RunData, "last_round", last_round)
    assert "fedavg (40.00 %)" in next(misses_most(recall))  # the mean over seeds, as in tables
    found["fedavg"].pop(2)
    (said,) = misses_most(recall)
    assert said.startswith("Most cases are missed: sensitivity is what models find of them with predictions from a")
    assert "here fedavg (20.00 %). If a missed case" in said


def test_own_tests_of_mostly_one_label_are_no_test_of_other_labels(run: RunData) -> None:
    def said(counts: list[list[int]], universal: bool, **tested: list[list[int]]) -> list[str]:
        about = with_labels(run, counts)
        about.facts["labels"].update(tested)
        tables = {**about.description, "evaluate": {**about.evaluation, "universal": universal}}
        private = replace(about, facts={**about.facts, "description": tables})
        found = replace(comparisons(run, "accuracy")[0], key="test")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("fedloom.results.weak_models.main_comparison", lambda _: found)
            return [*easy_own_tests(private)]

    (caution,) = said([[9, 1, 0], [0, 9, 1], [1, 0, 9]], universal=False)
    assert "most frequent label is right for 90.00 % on average, and for 33.33 % of everybody's tests" in caution
    assert said([[9, 1, 0], [0, 9, 1], [1, 0, 9]], universal=True) == []
    assert said([[4, 3, 3]] * 3, universal=False) == []
    assert said([[0, 0, 0]] * 3, universal=False) == []  # without own tests
    few = np.random.default_rng(1).multinomial(8, [0.1] * 10, size=30)  # drawn evenly: few vary by chance
    assert (few.max(axis=1) / 8).mean() > few.sum(axis=0).max() / few.sum() + EASIER
    assert said(few.tolist(), universal=False) == []
    assert said([[9, 1], [1, 9]], universal=False, tested=[[5, 5], [5, 5]]) == []  # it is about the tests' labels


def test_guessing_is_measured_on_the_test_examples_of_every_seed(tmp_path: Path) -> None:
    """With another split in each seed, what one of them holds says nothing about the mean over seeds."""
    generator = np.random.default_rng(4)
    rows = [f"{c},{generator.normal():.3f},{generator.choice(['no', 'yes'], p=[0.6, 0.4])}" for c in "ab" * 40]
    (tmp_path / "wards.csv").write_text("\n".join(["ward,x,sick", *rows]))
    shares, said = [], []
    for seeds in ([1, 2, 3], [3, 2, 1]):
        experiment = experiment_file.parse({
            "name": "wards", "rounds": 1, "seeds": seeds, "run": {"backend": "serial"},
            "data": {"source": "csv", "path": str(tmp_path / "wards.csv"), "client": "ward", "label": "sick",
                     "seed": "run"},
            "task": {"model": "logistic", "metrics": ["accuracy"]}, "train": {"lr": 1e-9}, "algorithm": {"fedavg": {}},
        })  # fmt: skip
        plan = Plan.of(experiment)
        run_plan(plan, tmp_path / f"run-{seeds[0]}")
        for seed in seeds:
            federation = plan.federation(seed)
            tested = [federation.y[federation.indices(client, "test")].numpy() for client in range(2)]
            shares.append([np.mean([(labels == label).mean() for labels in tested]) for label in (0, 1)])
        (text,) = [one for one in cautions(RunData.read(tmp_path / f"run-{seeds[0]}")) if "always predicting" in one]
        said.append(text)
    assert len({tuple(one) for one in shares}) == 3
    best = np.mean(shares, axis=0).max()
    assert f"which has {100 * best:.2f} % by the same measure: fedavg" in said[0]
    assert said[0] == said[1]
    assert " test examples of each seed, chance alone" in said[0] or said[0].startswith("No better")
