"""Algorithms that weigh clients in different ways are cautioned, if both are looked at."""

from __future__ import annotations

from pathlib import Path

import pytest

import fedloom as fl
from fedloom.experiment import unequal_weights
from fedloom.results.report_warnings import cautions
from fedloom.results.run_data import RunData
from tests.conftest import federation


@pytest.mark.parametrize(
    ("ways", "sizes"), [({"a": "examples", "b": "uniform"}, [20, 21]), ({"a": "examples"}, [1, 9]), ({}, [])]
)
def test_without_different_ways_or_sizes_there_is_no_caution(ways: dict[str, str], sizes: list[int]) -> None:
    assert list(unequal_weights.caution(ways, sizes)) == []


def test_a_run_knows_how_each_algorithm_weighs_clients(tmp_path: Path) -> None:
    task = fl.Task("logistic", args={"features": 16, "classes": 3})
    algorithms = {"fedavg": fl.FedAvg(lr=0.1), "scaffold": fl.Scaffold(lr=0.1), "local": fl.LocalOnly(lr=0.1)}
    fl.run(federation([10, 60, 30], seed=1), task, algorithms, 1, out=tmp_path, backend="serial")
    run = RunData.read(tmp_path)
    assert run.facts[unequal_weights.FACT] == {"fedavg": "examples", "scaffold": "uniform"}
    about = [text for text in cautions(run) if text.startswith(unequal_weights.BEGINNING)]
    assert len(about) == 1
    assert '(weights = "examples" for fedavg and "uniform" for scaffold), and clients have' in about[0]
    assert about[0] in run.facts["cautions about algorithms"]  # the run said the same at its start
    for labels in ({"fedavg", "local"}, {"scaffold"}):
        assert not any(text.startswith(unequal_weights.BEGINNING) for text in cautions(run, labels))
