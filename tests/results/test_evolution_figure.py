"""The picture of an evolution."""

from pathlib import Path

import pytest

import fedloom as fl
from fedloom.errors import InputError
from fedloom.results.evolution_figure import draw, series, traffic
from tests.conftest import Dense, federation

NOTES = [
    {"algorithm": label, "seed": seed, "round": round, "split": "notes", "metric": metric, "value": seed + round}
    for label in ("ga", "es")
    for seed in (1, 2)
    for round in (1, 2, 3)
    for metric in ("fitness", "diversity", "species")
]
ROUNDS = [
    {"algorithm": "ga", "round": round, "bytes_up": 30, "bytes_down": 3000, "participants": 3} for round in (1, 2)
] + [{"algorithm": "es", "round": 1, "bytes_up": 40, "bytes_down": 80, "participants": 2}]


def test_notes_are_sorted_into_panels() -> None:
    found = series([*NOTES, {**NOTES[0], "split": "test", "metric": "fitness"}])
    assert list(found) == ["fitness", "diversity"]
    assert found["fitness"]["ga"] == {1: [2, 3], 2: [3, 4], 3: [4, 5]}


def test_traffic_is_counted_for_one_client_and_round() -> None:
    assert traffic(ROUNDS) == {"ga": (10.0, 1000.0), "es": (20.0, 40.0)}


def test_the_picture_has_a_panel_for_each_and_one_for_bytes() -> None:
    axes = draw(NOTES, ROUNDS).axes
    assert [one.get_title(loc="left") for one in axes] == [
        "Fitness of the fittest",
        "Diversity of the population",
        "Bytes a client and round",
    ]
    assert [line.get_ydata().tolist() for line in axes[0].lines] == [[2.5, 3.5, 4.5]] * 2


def test_a_run_draws_its_generations(tmp_path: Path) -> None:
    settings = {"out": tmp_path / "run", "backend": "serial"}
    result = fl.run(federation((9, 12)), fl.Task(Dense), fl.Neuroevolution(population=4, parents=2), 3, **settings)
    assert result.plot_generations().read_bytes()[:4] == b"\x89PNG"
    assert result.plot_generations(tmp_path / "other.svg").is_file()
    with pytest.raises(InputError, match="must end in"):
        result.plot_generations(tmp_path / "other.txt")


def test_without_an_evolution_there_is_nothing_to_draw() -> None:
    with pytest.raises(InputError, match="no algorithm of this run notes a fitness"):
        draw([], ROUNDS)
