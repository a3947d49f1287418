from __future__ import annotations

from dataclasses import replace
from math import nan
from typing import Any

import numpy as np
import pytest
import torch

from fedloom.data.build import federate
from fedloom.data.federation import Dataset, as_dataset
from fedloom.data.normalize import statistics
from fedloom.data.preprocessing import Preprocessing, columns_named
from fedloom.data.split import Split
from fedloom.errors import InputError
from tests.data.examples import numbered

TRAIN_ONLY = Split(train=1.0, validation=0.0, test=0.0)


HOLES = [[1.0, nan, 5.0], [3.0, nan, nan], [nan, nan, 7.0], [nan, 2.0, 9.0]]


def holes(client: list[str] | None = None) -> Dataset:
    return replace(as_dataset(np.array(HOLES), np.zeros(4, int), client=client), missing=True)


def changed(data: Dataset, place: int, *, x: float | None = None, y: float | None = None) -> Dataset:
    features, labels = data.x.clone(), data.y.clone() if y is None or float(y).is_integer() else data.y.float()
    if x is not None:
        features[place] = x
    if y is not None:
        labels[place] = y
    return replace(data, x=features, y=labels)


def test_federated_statistics_are_those_of_all_training_splits() -> None:
    generator = np.random.default_rng(1)
    data = as_dataset(generator.normal(50, 9, (300, 3)), generator.integers(0, 2, 300), client=np.arange(300) % 7)
    plain, normal = federate(data, server=30), federate(data, server=30, normalize="federated")
    rows = torch.cat([plain.indices(client, "train") for client in range(7)])
    mean, std = plain.x[rows].double().mean(0), plain.x[rows].double().std(0, correction=0)
    assert torch.allclose(normal.x, ((plain.x - mean) / std).float(), atol=1e-6)
    assert torch.allclose(normal.server["test"][0], ((plain.server["test"][0] - mean) / std).float(), atol=1e-6)
    assert normal.x.dtype == torch.float32


def test_client_statistics_are_each_clients_own() -> None:
    data = as_dataset(np.random.default_rng(1).normal(50, 9, (60, 2)), np.zeros(60, int), client=np.arange(60) % 3)
    plain, normal = federate(data), federate(data, normalize="client")
    for client in range(3):
        rows = plain.indices(client, "train")
        mean, std = plain.x[rows].double().mean(0), plain.x[rows].double().std(0, correction=0)
        examples = slice(int(plain.offsets[client]), int(plain.offsets[client + 1]))
        assert torch.allclose(normal.x[examples], ((plain.x[examples] - mean) / std).float(), atol=1e-6)


@pytest.mark.parametrize("normalize", ["client", "federated"])
def test_test_examples_do_not_leak_into_the_statistics(normalize: str) -> None:
    data = numbered(40)
    plain = federate(data, clients=2, seed=4)
    held_out = torch.cat([plain.indices(client, "test") for client in range(2)])
    places = plain.x[held_out].flatten().long()
    changed = replace(data, x=data.x.index_fill(0, places, 1e6))
    before, after = (federate(each, clients=2, seed=4, normalize=normalize) for each in (data, changed))
    train = torch.cat([plain.indices(client, "train") for client in range(2)])
    assert before.x[train].equal(after.x[train])
    assert not before.x[held_out].equal(after.x[held_out])


def test_integer_images_become_scaled_floats() -> None:
    x = torch.randint(0, 256, (50, 1, 3, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    x[:, 0, 0, 0] = 51  # a pixel that never varies
    data = Dataset(x, torch.arange(50) % 2, classes=("a", "b"), scale=1 / 255)
    federation = federate(data, clients=1, split=TRAIN_ONLY, normalize="federated")
    assert federation.x.dtype == torch.float32
    assert federation.scale == 1.0
    assert federation.x[:, 0, 0, 0].eq(0).all()
    varying = federation.x.flatten(1)[:, 1:]
    assert varying.mean(0).abs().max() < 1e-6
    assert (varying.std(0, correction=0) - 1).abs().max() < 1e-6


def test_a_constant_feature_with_a_rough_value_is_exactly_zero() -> None:
    x = torch.full((1001, 1), 0.1)
    assert federate(Dataset(x, torch.zeros(1001)), clients=3, normalize="federated").x.eq(0).all()


def test_statistics_keep_digits_beside_a_large_offset() -> None:
    x = torch.tensor([[1e7], [1e7 + 2]]).repeat(20_000, 1)
    found = statistics(x, torch.arange(len(x)))
    assert found.mean.item() == 1e7 + 1
    assert found.std.item() == 1.0


@pytest.mark.parametrize("normalize", ["federated", "client"])
def test_a_table_keeps_how_far_training_values_reach_in_whole_standard_deviations(normalize: str) -> None:
    x = np.random.default_rng(1).normal(50, 9, (300, 2))
    x[0], x[1] = (50, 104), (5, 50)  # some 6 above, some 5 below
    columns = columns_named(["age", "crp"])
    data = replace(as_dataset(x, np.zeros(300, int)), preprocessing=Preprocessing(columns=columns))
    made = federate(data, clients=1, split=TRAIN_ONLY, normalize=normalize)
    low, high = np.floor(made.x.numpy().min(0)), np.ceil(made.x.numpy().max(0))
    assert made.preprocessing.reach == (tuple(low), tuple(high))
    assert (low[0], high[1]) == (-5, 6)
    agreed = made.preprocessing.replace(mean=(50.0, 50.0), std=(9.0, 9.0), clients={})
    site = federate(data, clients=1, split=TRAIN_ONLY, normalize="federated", agreed=agreed)
    assert site.preprocessing.reach is None  # the farthest value is about one patient of a site
    assert federate(as_dataset(x, np.zeros(300, int)), clients=1, normalize=normalize).preprocessing.reach is None


def test_client_statistics_say_nothing_about_server_data() -> None:
    with pytest.raises(InputError, match='Use normalize = "federated"'):
        federate(numbered(), clients=2, server=3, normalize="client")


def test_unknown_normalisation() -> None:
    with pytest.raises(
        InputError, match=r"'client' or 'federated', or bounds .*Got 'federate' instead\. Did you mean 'federated'"
    ):
        federate(numbered(), clients=2, normalize="federate")


def test_what_is_missing_becomes_the_mean_of_what_is_known() -> None:
    normal = federate(holes(), clients=1, split=TRAIN_ONLY, normalize="federated").x
    assert normal[:, 0].tolist() == [-1.0, 1.0, 0.0, 0.0]
    assert normal[:, 1].tolist() == [0.0, 0.0, 0.0, 0.0]
    assert normal[:, 2].tolist() == pytest.approx([-(1.5**0.5), 0.0, 0.0, 1.5**0.5])


def test_a_client_that_never_saw_a_feature_learns_nothing_about_it() -> None:
    data = holes(["a", "a", "b", "b"])
    assert federate(data, split=TRAIN_ONLY, normalize="client").x.tolist() == [
        [-1.0, 0.0, 0.0],
        [1.0, 0.0, 0.0],
        [0.0, 0.0, -1.0],
        [0.0, 0.0, 1.0],
    ]
    x = torch.full((50, 1), nan)
    plain = federate(Dataset(torch.zeros(50, 1), torch.zeros(50)), clients=1)
    x[plain.indices(0, "test")] = 1e6  # known in the test split only: nothing in training says what it means
    for normalize in ("client", "federated"):
        assert federate(Dataset(x, torch.zeros(50), missing=True), clients=1, normalize=normalize).x.eq(0).all()


def test_statistics_of_holes_are_those_of_the_known_values() -> None:
    generator = np.random.default_rng(3)
    x = generator.normal(1e5, 7, (1500, 2))
    x[generator.random(x.shape) < 0.4] = nan
    found = statistics(torch.from_numpy(x), torch.arange(1500), missing=True)
    np.testing.assert_allclose(found.mean, np.nanmean(x, axis=0), rtol=1e-12)
    np.testing.assert_allclose(found.std, np.nanstd(x, axis=0), rtol=1e-9)


def test_missing_values_need_normalisation_and_are_the_only_exception() -> None:
    with pytest.raises(InputError, match=r'missing values, which normalisation fills .*normalize = "federated"'):
        federate(holes(), clients=1)
    infinite = replace(holes(), x=torch.tensor(HOLES).index_fill(0, torch.tensor([2]), torch.inf))
    with pytest.raises(InputError, match=r"Feature 0 of example 2 .* is inf"):
        federate(infinite, clients=1, normalize="federated")


def test_what_was_fitted_is_kept_for_new_examples() -> None:
    data = as_dataset(np.array([[1.0], [3.0], [5.0], [9.0]]), np.zeros(4, int), client=["a", "a", "b", "b"])
    kept = federate(data, split=TRAIN_ONLY, normalize="federated").preprocessing
    assert (kept.mean, kept.std, kept.shape) == ((4.5,), (pytest.approx(8.75**0.5),), (1,))
    assert federate(data, split=TRAIN_ONLY, normalize="client").preprocessing.clients == {
        "a": ((2.0,), (1.0,)),
        "b": ((7.0,), (2.0,)),
    }
    assert federate(data, split=TRAIN_ONLY).preprocessing.mean == ()


def test_targets_are_scaled_by_all_training_labels() -> None:
    data = as_dataset(np.zeros((4, 1)), [1.0, 3.0, 5.0, 7.0], client=["a", "a", "b", "b"], test=([[0.0]], [4.0]))
    made = federate(data, split=TRAIN_ONLY, scale_target=True, server="test")
    assert made.y.tolist() == pytest.approx([-3 / 5**0.5, -1 / 5**0.5, 1 / 5**0.5, 3 / 5**0.5])
    assert made.server["test"][1].tolist() == [0.0]
    assert made.preprocessing.target == (4.0, pytest.approx(5**0.5))
    with pytest.raises(InputError, match="scale_target is for labels that are one number, and these are 2 classes"):
        federate(numbered(), clients=2, scale_target=True)


def test_bounds_scale_a_feature_whatever_the_examples_are() -> None:
    data = replace(holes(), features=("age", "dose", "size"))
    made = federate(data, clients=2, split=TRAIN_ONLY, normalize={"age": [1, 3], "size": (5, 9)})
    order = [row.tolist() for row in made.x[made.x[:, 2].argsort()]]
    assert sorted(order) == sorted([[-1.0, 0.0, -1.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 2.0, 1.0]])
    assert (made.preprocessing.mean, made.preprocessing.std) == ((2.0, 0.0, 7.0), (1.0, 1.0, 2.0))
    assert made.scaled_by == ""
    served = federate(data, clients=2, split=TRAIN_ONLY, normalize={"dose": [0, 2]}, server=1)
    assert {float(value) for value in served.server["test"][0][:, 1]} <= {0.0, 1.0}


@pytest.mark.parametrize(
    ("bounds", "said"),
    [
        ({"agee": [0, 1]}, r"there is no feature 'agee'\. Known: age, dose, size\. Did you mean 'age'"),
        ({"age": [3, 3]}, r"bounds of age must be two numbers, the lower one first, such as \[0, 100\]\. Got \[3, 3\]"),
        ({"age": [0, 1, 2]}, r"Got \[0, 1, 2\] instead"),
        ({"age": 3}, "Got 3 instead"),
        ({"age": [0, nan]}, r"Got \[0, nan\]"),
    ],
)
def test_bounds_that_are_none_are_refused(bounds: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        federate(replace(holes(), features=("age", "dose", "size")), clients=2, normalize=bounds)
    with pytest.raises(InputError, match="the features of this data have no names"):
        federate(holes(), clients=2, normalize={"age": [0, 1]})


def test_a_federation_knows_whose_examples_decide_its_scale() -> None:
    data = as_dataset(np.arange(40.0).reshape(20, 2), np.arange(20) / 7, client=np.arange(20) % 2)
    whose = {how: federate(data, normalize=how).scaled_by for how in ("none", "client", "federated")}
    assert whose == {"none": "", "client": "its client's", "federated": "all clients'"}
    assert federate(data, scale_target=True).scaled_by == "all clients'"
    assert federate(data, scale_target=True, normalize="client").scaled_by == "all clients'"
