"""The figure of an evolution."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import fedloom as fl
from fedloom.errors import InputError
from fedloom.results.evolution_figure import bytes_per_client_and_round, draw, generations
from fedloom.results.result import Result
from fedloom.results.run_data import RunData
from tests.conftest import Dense, federation


@pytest.fixture(scope="module")
def evolution(tmp_path_factory: pytest.TempPathFactory) -> RunData:
    """Two seeds of an evolution, and an algorithm that notes nothing."""
    folder = tmp_path_factory.mktemp("evolution")
    algorithms = {"ga": fl.Neuroevolution(population=4, parents=2), "fedavg": fl.FedAvg()}
    fl.run(federation((9, 12)), fl.Task(Dense), algorithms, 3, seeds=2, out=folder, backend="serial")
    return RunData.read(folder)


def test_notes_have_one_value_for_each_seed(evolution: RunData) -> None:
    found = generations(evolution, "fitness")
    assert list(found) == ["ga"]
    assert list(found["ga"]) == [1, 2, 3]
    seeds = [evolution.server_values("ga", seed, "fitness", "notes")[1].tolist() for seed in (1, 2)]
    assert list(found["ga"].values()) == [list(pair) for pair in zip(*seeds, strict=True)]
    assert generations(evolution, "species") == {}


def test_bytes_are_counted_for_one_client_and_round(evolution: RunData) -> None:
    found = bytes_per_client_and_round(evolution)
    costs = [evolution.costs("fedavg", seed) for seed in (1, 2)]
    up, down = sum(one.bytes_up.sum() for one in costs), sum(one.bytes_down.sum() for one in costs)
    assert found["fedavg"] == (up / 12, down / 12)  # two seeds, three rounds, two clients


def test_the_figure_has_a_panel_for_each_note_and_one_for_bytes(evolution: RunData) -> None:
    axes = draw(evolution).axes
    shown = [one.get_title(loc="left") for one in axes]
    assert shown == ["Fitness of the fittest", "Diversity of the population", "Bytes per client and round"]
    (line,) = axes[0].lines
    means = [np.mean(values) for values in generations(evolution, "fitness")["ga"].values()]
    assert np.asarray(line.get_ydata()).tolist() == pytest.approx(means)


def test_a_run_draws_its_generations(evolution: RunData, tmp_path: Path) -> None:
    result = Result.read(evolution.folder)
    assert result.plot_generations().read_bytes()[:4] == b"\x89PNG"
    assert result.plot_generations(tmp_path / "other.svg").is_file()
    with pytest.raises(InputError, match="must end in"):
        result.plot_generations(tmp_path / "other.txt")


def test_without_an_evolution_there_is_nothing_to_draw(run: RunData) -> None:
    with pytest.raises(InputError, match="no algorithm of this run notes a fitness"):
        draw(run)
