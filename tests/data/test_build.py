from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import nan
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from fedloom.data.build import federate
from fedloom.data.federation import Dataset, Federation, as_dataset
from fedloom.data.normalize import statistics
from fedloom.data.partition import Iid
from fedloom.data.split import Split
from fedloom.errors import InputError

TRAIN_ONLY = Split(train=1.0, validation=0.0, test=0.0)


def numbered(count: int = 20, classes: int = 2, **more: Any) -> Dataset:
    """Examples whose only feature is their place in the source."""
    x = torch.arange(count, dtype=torch.float32).reshape(-1, 1)
    return Dataset(x, torch.arange(count) % classes, classes=tuple("abcdefgh"[:classes]), **more)


def holdings(federation: Federation) -> list[list[float]]:
    offsets = federation.offsets
    return [federation.x[start:end].flatten().tolist() for start, end in pairwise(offsets)]


# Who holds what


def test_natural_clients_keep_their_examples_in_order() -> None:
    data = numbered(6, client=np.array(["b", "a", "b", "a", "c", "b"]))
    federation = federate(data)
    assert federation.names == ["a", "b", "c"]
    assert holdings(federation) == [[1, 3], [0, 2, 5], [4]]
    assert federation.name(1) == "b"


@pytest.mark.parametrize(
    "client",
    [
        np.array(["10", "9", "10", "2"]),
        np.array([10, 9, 10, 2]),
        np.array([10.0, 9.0, 10.0, 2.0]),
        np.array([b"10", b"9", b"10", b"2"]),
        np.array([10, "9", 10, 2], dtype=object),
    ],
)
def test_names_that_are_numbers_sort_as_numbers(client: Any) -> None:
    federation = federate(numbered(4, client=client))
    assert federation.names == ["2", "9", "10"]
    assert holdings(federation) == [[3], [1], [0, 2]]


def test_names_with_and_without_numbers_mix() -> None:
    assert federate(numbered(4, client=np.array(["x", "10", "9", "a"]))).names == ["9", "10", "a", "x"]


def test_data_in_order_is_not_copied() -> None:
    data = numbered(6, client=np.array([0, 0, 1, 1, 1, 2]))
    assert federate(data).x.data_ptr() == data.x.data_ptr()


@pytest.mark.parametrize(
    "arguments",
    [
        {"clients": 4},
        {"partition": "iid", "clients": 4},
        {"partition": {"name": "iid"}, "clients": 4},
        {"partition": {"name": "iid", "clients": 4}},
        {"partition": {"name": "iid", "clients": 4}, "clients": 4},
        {"partition": Iid(clients=4)},
    ],
)
def test_iid_in_every_spelling(arguments: dict[str, Any]) -> None:
    federation = federate(numbered(), **arguments, seed=3)
    assert holdings(federation) == holdings(federate(numbered(), clients=4, seed=3))
    assert federation.names is None
    assert federation.name(2) == "2"


def test_a_partition_overrules_the_natural_clients() -> None:
    data = numbered(client=np.arange(20))
    assert federate(data).clients == 20
    assert federate(data, partition="natural").clients == 20
    assert federate(data, partition={"name": "iid", "clients": 3}).clients == 3


def test_affinity_takes_its_number_of_clients_from_the_classes() -> None:
    assert federate(numbered(classes=4), partition={"name": "affinity", "probability": 0.9}).clients == 4


def test_a_seed_changes_the_partition() -> None:
    first, second = (federate(numbered(), clients=2, seed=seed) for seed in (1, 2))
    assert holdings(first) != holdings(second)


def test_what_the_dataset_says_is_passed_on() -> None:
    data = numbered(scale=0.5, features=("place",))
    federation = federate(data, clients=2, seed=5, split=(1.0, 0.0, 0.0))
    assert (federation.scale, federation.features, federation.classes) == (0.5, ("place",), ("a", "b"))
    assert (federation.split, federation.seed) == (TRAIN_ONLY, 5)


def test_many_clients() -> None:
    federation = federate(Dataset(torch.zeros(300_000, 1), torch.zeros(300_000)), clients=300_000)
    assert federation.clients == 300_000
    assert federation.offsets[-1] == 300_000


def test_clients_with_one_class_are_fine() -> None:
    assert federate(numbered(client=np.arange(20) % 2)).clients == 2


# What the server holds


def test_the_server_holds_nothing_unless_asked() -> None:
    assert federate(numbered(), clients=2).server == {}
    assert federate(numbered(), clients=2, server="none").server == {}


def test_the_official_test_set() -> None:
    test = (torch.full((3, 1), 99.0), torch.tensor([1, 0, 1]))
    federation = federate(numbered(test=test), clients=2, server="test")
    assert federation.server["test"][0].flatten().tolist() == [99, 99, 99]
    assert len(federation.y) == 20


@pytest.mark.parametrize(("server", "size"), [(0.25, 5), (7, 7), ({"test": 0.25}, 5), (0.001, 1)])
def test_a_share_is_drawn_before_the_clients_get_theirs(server: Any, size: int) -> None:
    federation = federate(numbered(), clients=2, server=server)
    x, y = federation.server["test"]
    assert len(x) == len(y) == size
    assert y.tolist() == [int(value) % 2 for value in x.flatten()]
    assert sorted([*x.flatten().tolist(), *federation.x.flatten().tolist()]) == list(range(20))


def test_a_table_for_the_server() -> None:
    test = (torch.full((3, 1), 99.0), torch.tensor([1, 0, 1]))
    federation = federate(numbered(test=test), clients=2, server={"test": "official", "validation": 0.5})
    assert len(federation.server["test"][1]) == 3
    assert len(federation.server["validation"][1]) == 10
    both = federate(numbered(), clients=2, server={"validation": 4, "test": 6})
    drawn = [both.server[name][0].flatten().tolist() for name in ("test", "validation")]
    assert [len(part) for part in drawn] == [6, 4]
    assert sorted([*drawn[0], *drawn[1], *both.x.flatten().tolist()]) == list(range(20))


def test_a_validation_set_does_not_change_the_test_set() -> None:
    alone = federate(numbered(), clients=2, server={"test": 5}).server["test"][0]
    beside = federate(numbered(), clients=2, server={"test": 5, "validation": 5}).server["test"][0]
    assert alone.equal(beside)


def test_natural_clients_with_server_data() -> None:
    federation = federate(numbered(client=np.repeat(["a", "b"], 10)), server=4)
    assert len(federation.y) == 16
    assert all(value < 10 for value in holdings(federation)[0])


@pytest.mark.parametrize("server", ["tset", 1.0, 0.0, 0, -1, True, {"test": "best"}, {"validation": "official"}, [1]])
def test_what_the_server_cannot_hold(server: Any) -> None:
    with pytest.raises(InputError, match='\'server\' of the data must be "none", "test"'):
        federate(numbered(), clients=2, server=server)


def test_unknown_server_splits_are_refused() -> None:
    with pytest.raises(InputError, match=r"not 'vaildation'\. Did you mean 'validation'"):
        federate(numbered(), clients=2, server={"vaildation": 3})


def test_the_server_must_leave_something() -> None:
    with pytest.raises(InputError, match="to hold 20 of 20 examples, which leaves none"):
        federate(numbered(), clients=2, server=20)


def test_a_source_without_a_test_set() -> None:
    with pytest.raises(InputError, match=r"this source has none.*server = 0\.1"):
        federate(numbered(), clients=2, server="test")


# Normalisation


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


def test_client_statistics_say_nothing_about_server_data() -> None:
    with pytest.raises(InputError, match='Use normalize = "federated"'):
        federate(numbered(), clients=2, server=3, normalize="client")


def test_unknown_normalisation() -> None:
    with pytest.raises(
        InputError, match=r"none, client, federated\. Got 'federate' instead\. Did you mean 'federated'"
    ):
        federate(numbered(), clients=2, normalize="federate")


# Missing values

HOLES = [[1.0, nan, 5.0], [3.0, nan, nan], [nan, nan, 7.0], [nan, 2.0, 9.0]]


def holes(client: list[str] | None = None) -> Dataset:
    return replace(as_dataset(np.array(HOLES), np.zeros(4, int), client=client), missing=True)


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
    with pytest.raises(InputError, match=r'missing values, which are filled .*normalize = "federated"'):
        federate(holes(), clients=1)
    infinite = replace(holes(), x=torch.tensor(HOLES).index_fill(0, torch.tensor([2]), torch.inf))
    with pytest.raises(InputError, match=r"Feature 0 of example 2 .* is inf"):
        federate(infinite, clients=1, normalize="federated")


# What must hold of the examples


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


@pytest.mark.parametrize(
    ("client", "message"),
    [
        (np.array(["a", "", "b", "b"]), "Example 1 has no client"),
        (np.array([1.0, 2.0, float("nan"), 1.0]), "Example 2 has no client"),
        (np.array(["a", "b", "b", None], dtype=object), "Example 3 has no client"),
        (np.array([["a"], ["b"], ["b"], ["b"]]), r"one list with a name for every example.*\(4, 1\)"),
        (np.array(["a", "b"]), r"one list with a name for every example.*\(2,\)"),
    ],
)
def test_every_example_needs_a_client(client: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        federate(numbered(4, client=client))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "does not say who holds which example"),
        ({"partition": "natural"}, "natural partition needs a client for every example"),
        ({"partition": {"name": "iid", "clients": 3}, "clients": 4}, "two numbers of clients, 4 and 3"),
        ({"partition": Iid(clients=3), "clients": 4}, "two numbers of clients, 4 and 3"),
        ({"partition": "iidd", "clients": 3}, "Did you mean 'iid'"),
        ({"partition": 3}, "must be a table with a name"),
        ({"clients": 21}, "at most the number of examples, 20"),
        ({"clients": 2, "split": (0.8, 0.2)}, "three shares: train, validation, test"),
    ],
)
def test_impossible_federations_are_explained(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        federate(numbered(), **arguments)


@pytest.mark.parametrize("arguments", [{"clients": 3}, {"partition": {"name": "natural", "clients": 3}}])
def test_natural_clients_cannot_be_counted_otherwise(arguments: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="takes its clients from the data"):
        federate(numbered(client=np.arange(20)), **arguments)


def test_data_must_be_there() -> None:
    with pytest.raises(InputError, match="no examples"):
        federate(Dataset(torch.zeros(0, 1), torch.zeros(0)), clients=1)
    with pytest.raises(InputError, match="There are 3 examples but 2 labels"):
        federate(Dataset(torch.zeros(3, 1), torch.zeros(2)), clients=1)


# From arrays


def test_arrays_of_many_kinds_are_taken() -> None:
    frame = pd.DataFrame({"a": [1.0, 2.0, 3.0], "b": [1, 2, 3], "y": [0, 1, 0], "who": ["u", "v", "u"]})
    from_pandas = Federation.from_arrays(frame[["a", "b"]], frame["y"], client=frame["who"])
    assert from_pandas.names == ["u", "v"]
    assert from_pandas.x.dtype == torch.float32
    big_endian = np.arange(6, dtype=">u2").reshape(3, 2)
    assert Federation.from_arrays(big_endian, [0, 1, 0], clients=1).x.sum() == 15
    assert Federation.from_arrays(torch.zeros(3, 2), torch.tensor([0.5, 1.0, 2.0]), clients=1).classes == ()


def test_text_is_not_a_feature_or_a_label() -> None:
    with pytest.raises(InputError, match=r"must be numbers\. Got values of type <U3"):
        Federation.from_arrays(np.zeros((2, 1)), ["cat", "dog"], clients=1)


def test_an_identifier_is_not_a_label() -> None:
    with pytest.raises(InputError, match="the largest here is 123456789"):
        Federation.from_arrays(np.zeros((2, 1)), [0, 123456789], clients=1)


def test_built_federations_are_not_kept_alive() -> None:
    import gc
    import weakref

    federation = federate(numbered(), clients=2)
    federation.indices(0, "train")
    gone = weakref.ref(federation)
    del federation
    gc.collect()
    assert gone() is None
