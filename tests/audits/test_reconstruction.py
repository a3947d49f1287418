"""Labels and pictures from one update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import fedloom as fl
from fedloom.audits import reconstruction
from fedloom.audits.reconstruction import Reconstruction, label_of, reconstruct
from fedloom.data.federation import Federation
from fedloom.data.preprocessing import Column, Preprocessing
from fedloom.errors import InputError
from fedloom.task import leaves


def pictures(side: int = 4, classes: int = 3) -> Federation:
    draw = np.random.default_rng(1)
    x = draw.random((60, side * side)).astype(np.float32)
    return Federation.from_arrays(x, draw.integers(0, classes, 60), clients=6)


@pytest.fixture(scope="module")
def found() -> Reconstruction:
    told: list[tuple[int, int]] = []
    task = fl.Task("mlp", args={"features": 16, "classes": 3, "hidden": [32]})
    made = reconstruct(task, pictures(), 10, 4.0, lambda done, steps: told.append((done, steps)))
    assert told == [(done, 9) for done in range(10)]
    return made


def test_an_update_shows_its_label_and_its_picture(found: Reconstruction) -> None:
    assert found.labels["update"].value == 1.0
    assert found.similarity["update"] > 0.95
    assert found.similarity["original"] == pytest.approx(1.0)


def test_guessing_is_the_share_of_the_most_frequent_label(found: Reconstruction) -> None:
    assert found.guessing == np.bincount(pictures().y.numpy()).max() / 60


def test_noise_hides_both(found: Reconstruction) -> None:
    assert found.labels["differential privacy"].value < 0.6
    assert found.similarity["differential privacy"] < 0.5


def test_a_mean_hides_whose_label_it_is(found: Reconstruction) -> None:
    assert found.labels["secure aggregation"].value < 0.7
    assert found.similarity["secure aggregation"] < found.similarity["update"]
    assert found.cohort == 10


def test_pictures_are_squares_of_shares(found: Reconstruction) -> None:
    for each in found.pictures.values():
        assert np.shape(each) == (reconstruction.PICTURED, 4, 4)
        assert 0 <= np.min(each) <= np.max(each) <= 1


@pytest.mark.parametrize(("width", "names"), [(4, ()), (5, ()), (16, [f"column {place}" for place in range(16)])])
def test_numbers_that_are_no_picture_keep_their_names(width: int, names: Sequence[str]) -> None:
    draw = np.random.default_rng(1)
    x = draw.normal(size=(60, width)).astype(np.float32)
    data = replace(Federation.from_arrays(x, draw.integers(0, 3, 60), clients=6), features=tuple(names))
    found = reconstruct(fl.Task("mlp", args={"features": width, "classes": 3, "hidden": [32]}), data, 10, 4.0)
    assert found.pictures == {}
    assert found.columns == [*names] or found.columns[:2] == ["feature 1", "feature 2"]
    assert {np.shape(each) for each in found.values.values()} == {(reconstruction.PICTURED, width)}
    assert all(any(np.allclose(row, one) for one in x) for row in found.values["original"])
    assert found.similarity["update"] > 0.9


def test_embedded_columns_are_refused() -> None:
    columns = (Column(name="age"), Column(name="place", categories=("a", "b"), embedded=True))
    data = Federation.from_arrays(np.random.rand(20, 2), np.arange(20) % 2, clients=2)
    data = replace(data, features=("age", "place"), preprocessing=Preprocessing(columns=columns))
    with pytest.raises(InputError, match="embedded columns cannot be reconstructed"):
        reconstruct(fl.Task("mlp", args={"features": 2, "classes": 2}), data, 2, 1.0)


def test_the_same_seed_attacks_the_same_clients(found: Reconstruction) -> None:
    task = fl.Task("mlp", args={"features": 16, "classes": 3, "hidden": [32]})
    assert reconstruct(task, pictures(), 10, 4.0) == found


def test_the_victims_start_from_the_initial_weights_of_the_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconstruction, "STEPS", 5)
    module = nn.Sequential(nn.Linear(16, 8).requires_grad_(False), nn.Tanh(), nn.Linear(8, 3))
    save_file({name: 2 * leaf for name, leaf in leaves(module).items()}, tmp_path / "init.safetensors")
    given = reconstruct(fl.Task(module, init=str(tmp_path / "init.safetensors")), pictures(), 10, 4.0)
    with torch.no_grad():
        for leaf in module.parameters():
            leaf *= 2
    assert given == reconstruct(fl.Task(module), pictures(), 10, 4.0)


def test_a_label_is_read_from_the_last_layer_with_or_without_a_bias() -> None:
    logits = torch.randn(4, generator=torch.Generator().manual_seed(1))
    gradient = logits.softmax(0) - nn.functional.one_hot(torch.tensor(2), 4)
    assert label_of(gradient) == 2
    assert label_of(torch.outer(gradient, torch.rand(5))) == 2


@pytest.mark.parametrize(
    ("data", "shape"),
    [
        (Federation.from_arrays(np.random.rand(20, 3, 5), np.arange(20) % 2, clients=2), "3 × 5, and there are 2 cl"),
        (Federation.from_arrays(np.random.rand(20, 4), np.random.rand(20), clients=2), "4, and there are 0 classes"),
    ],
)
def test_what_is_no_picture_with_a_label_is_refused(data: Federation, shape: str) -> None:
    with pytest.raises(InputError, match=f"Only square pictures .* has the shape {shape}"):
        reconstruct(fl.Task("mlp", args={"features": 5, "classes": 2}), data, 2, 1.0)


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (fl.Task(lambda: nn.Linear(16, 1), loss="bce"), "Only updates of the loss cross_entropy"),
        (
            fl.Task(lambda: nn.Sequential(nn.Linear(16, 6), nn.Unflatten(1, (3, 2)), nn.Flatten())),
            "No parameter has a row",
        ),
    ],
)
def test_a_model_whose_last_layer_shows_no_label_is_refused(task: fl.Task, words: str) -> None:
    with pytest.raises(InputError, match=words):
        reconstruct(task, pictures(), 10, 4.0)
