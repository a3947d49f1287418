from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from fedloom.data.build import federate
from fedloom.data.federation import Dataset, Federation
from fedloom.data.partition import Iid
from fedloom.data.split import SPLITS, Split
from fedloom.errors import InputError
from tests.data.examples import numbered

TRAIN_ONLY = Split(train=1.0, validation=0.0, test=0.0)


def examples_of(federation: Federation) -> list[list[float]]:
    offsets = federation.offsets
    return [federation.x[start:end].flatten().tolist() for start, end in pairwise(offsets)]


def test_natural_clients_keep_their_examples_in_order() -> None:
    data = numbered(6, client=np.array(["b", "a", "b", "a", "c", "b"]))
    federation = federate(data)
    assert federation.names == ["a", "b", "c"]
    assert examples_of(federation) == [[1, 3], [0, 2, 5], [4]]
    assert federation.name(1) == "b"


def test_a_partition_that_replaces_the_clients_of_the_data_is_told() -> None:
    data = numbered(6, client=np.array(["b", "a", "b", "a", "c", "b"]))
    (said,) = federate(data, partition={"name": "iid", "clients": 2}).cautions
    assert said == "`partition` takes the place of the 3 clients that the data names: leave it out to keep them."
    assert federate(data).cautions == federate(data, partition="natural").cautions == ()
    assert federate(numbered(6), clients=2).cautions == ()


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
    assert examples_of(federation) == [[3], [1], [0, 2]]


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
    assert examples_of(federation) == examples_of(federate(numbered(), clients=4, seed=3))
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
    assert examples_of(first) != examples_of(second)


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
    assert all(value < 10 for value in examples_of(federation)[0])


@pytest.mark.parametrize("server", ["tset", 1.5, 0.0, 0, -1, True, {"test": "best"}, {"validation": "official"}, [1]])
def test_what_the_server_cannot_hold(server: Any) -> None:
    with pytest.raises(InputError, match='\'server\' of the data must be "none", "test"'):
        federate(numbered(), clients=2, server=server)


def test_unknown_server_splits_are_refused() -> None:
    with pytest.raises(InputError, match=r"not 'vaildation'\. Did you mean 'validation'"):
        federate(numbered(), clients=2, server={"vaildation": 3})


def test_the_server_must_leave_something() -> None:
    with pytest.raises(InputError, match="would hold 20 of 20 examples, which leaves none"):
        federate(numbered(), clients=2, server=20)


def test_a_source_without_a_test_set() -> None:
    with pytest.raises(InputError, match=r"this source has none.*server = 0\.1"):
        federate(numbered(), clients=2, server="test")


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
        ({}, "does not say which client holds each example.*clients = 1 } if it is all of one client"),
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


def test_splits_that_the_data_says_hold_for_each_client() -> None:
    data = numbered(6, client=np.array(list("baabba")), split=np.array([2, 0, 1, 0, 0, 0]))
    made = federate(data)
    assert made.x.flatten().tolist() == [1, 5, 2, 3, 4, 0]
    assert {split: made.sizes(split).tolist() for split in SPLITS} == {
        "train": [2, 2],
        "validation": [1, 0],
        "test": [0, 1],
    }
    assert made.counts((made.everyone, 1), "train").tolist() == [4, 2]
    assert made.indices(made.everyone, "train").tolist() == [0, 1, 3, 4]
    assert made.fingerprint != federate(replace(data, split=np.zeros(6, int))).fingerprint


def test_a_client_without_training_rows_is_refused() -> None:
    data = numbered(3, client=np.array(list("aab")), split=np.array([0, 1, 2]))
    with pytest.raises(InputError, match="Client b has no training examples: its rows are all for validation or test"):
        federate(data)


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
