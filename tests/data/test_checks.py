from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedloom.data.build import federate
from fedloom.data.federation import Dataset
from fedloom.errors import InputError
from tests.data.examples import numbered


def changed(data: Dataset, place: int, *, x: float | None = None, y: float | None = None) -> Dataset:
    features, labels = data.x.clone(), data.y.clone() if y is None or float(y).is_integer() else data.y.float()
    if x is not None:
        features[place] = x
    if y is not None:
        labels[place] = y
    return replace(data, x=features, y=labels)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_features_must_be_finite(value: float) -> None:
    data = replace(numbered(client=np.repeat(["a", "b"], 10)), features=("height",))
    with pytest.raises(InputError, match=rf"Feature 'height' of example 13 \(client b\) is {value}"):
        federate(changed(data, 13, x=value))
    with pytest.raises(InputError, match=rf"Feature 0 of example 13 \(client \d\) is {value}"):
        federate(changed(numbered(), 13, x=value), clients=4)
    with pytest.raises(InputError, match=r"Feature 0 of example \d+ \(held by the server\)"):
        federate(replace(numbered(), x=torch.full((20, 1), value)), clients=1, server=19, seed=1)


def test_a_wrong_feature_is_found_far_into_the_data() -> None:
    with pytest.raises(InputError, match="of example 19999 "):
        federate(changed(numbered(20_000), 19_999, x=float("nan")), clients=1)


def test_labels_of_a_regression_must_be_finite() -> None:
    data = Dataset(torch.zeros(5, 1), torch.tensor([0.0, 1.0, float("nan"), 0.0, 0.0]), client=np.array(list("abcde")))
    with pytest.raises(InputError, match=r"label of example 2 \(client c\) is nan: labels must be finite"):
        federate(data)


@pytest.mark.parametrize("label", [-1, 2, 7])
def test_labels_must_be_in_range(label: int) -> None:
    message = rf"label of example 4 \(client b\) is {label}: with 2 classes, labels must be 0 to 1"
    with pytest.raises(InputError, match=message):
        federate(changed(numbered(client=np.array(["a", "b"] * 2 + ["b"] * 16)), 4, y=label))
    with pytest.raises(InputError, match=f"label of example 4 is {label}"):
        federate(changed(numbered(), 4, y=label), clients=2)


def test_labels_of_classes_must_be_whole() -> None:
    with pytest.raises(InputError, match=r"label of example 3 is 0\.5: the labels of classes must be whole numbers"):
        federate(changed(numbered(), 3, y=0.5), clients=2)


def test_whole_labels_in_floating_point_are_classes_if_named() -> None:
    data = replace(numbered(), y=torch.tensor([0.0, 1.0] * 10))
    assert federate(data, clients=2).y.dtype == torch.int64


def test_the_official_test_set_is_checked_too() -> None:
    def build(x: torch.Tensor, y: torch.Tensor) -> None:
        federate(numbered(test=(x, y)), clients=2, server="test")

    with pytest.raises(InputError, match="Example 1 of the official test set has a feature that is not a finite"):
        build(torch.tensor([[0.0], [float("nan")]]), torch.tensor([0, 1]))
    with pytest.raises(InputError, match="label of example 1 of the official test set is 5"):
        build(torch.zeros(2, 1), torch.tensor([0, 5]))
    with pytest.raises(InputError, match=r"must have one for each, and examples of shape \(1,\)"):
        build(torch.zeros(2, 3), torch.tensor([0, 1]))


def test_every_client_needs_an_example() -> None:
    data = replace(numbered(), y=torch.zeros(20, dtype=torch.int64))
    with pytest.raises(InputError, match=r"Client 1 would have no examples.*min_examples"):
        federate(data, partition={"name": "affinity", "probability": 1.0})


def test_data_must_be_there() -> None:
    with pytest.raises(InputError, match="no examples"):
        federate(Dataset(torch.zeros(0, 1), torch.zeros(0)), clients=1)
    with pytest.raises(InputError, match="There are 3 examples but 2 labels"):
        federate(Dataset(torch.zeros(3, 1), torch.zeros(2)), clients=1)
