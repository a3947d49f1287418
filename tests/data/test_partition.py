from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as some

from fedloom import keys
from fedloom.data.build import federate
from fedloom.data.federation import Dataset
from fedloom.data.partition import (
    PARTITIONS,
    Affinity,
    Dirichlet,
    Iid,
    Partition,
    Quantity,
    Shards,
    Unbalanced,
    partition,
)
from fedloom.errors import InputError

ALL: dict[str, dict[str, Any]] = {
    "iid": {},
    "shards": {"per_client": 2},
    "dirichlet": {"alpha": 50.0},
    "affinity": {"probability": 0.6},
    "unbalanced": {"shuffle": False},
    "quantity": {"sigma": 2.0},
}


def sizes(partition: Partition, labels: list[int], key: int = 1) -> list[int]:
    classes = max(labels) + 1
    owner = partition.assign(torch.tensor(labels), key, classes)
    return np.bincount(owner, minlength=partition.count(classes)).tolist()


def test_every_partition_is_in_these_tests() -> None:
    assert set(ALL) == set(PARTITIONS)


@settings(deadline=None, max_examples=40)
@given(
    name=some.sampled_from(sorted(ALL)),
    labels=some.lists(some.integers(0, 4), min_size=24, max_size=80),
    clients=some.integers(1, 6),
    seed=some.integers(0, 2**40),
)
def test_no_example_is_lost_or_rule_twice(name: str, labels: list[int], clients: int, seed: int) -> None:
    ids = torch.arange(len(labels)).reshape(-1, 1)
    data = Dataset(ids, torch.tensor(labels), classes=("a", "b", "c", "d", "e"))
    rule = partition({"name": name, "clients": clients, **ALL[name]})
    owner = rule.assign(data.y, keys.key(seed, "partition"), 5)
    assert owner.shape == (len(labels),)
    assume(
        len(set(owner.tolist())) == clients
    )  # by bad luck affinity leaves somebody with nothing, and that is refused
    federation = federate(data, partition=rule, seed=seed)
    assert sorted(federation.x.flatten().tolist()) == list(range(len(labels)))
    assert federation.y.tolist() == [labels[number] for number in federation.x.flatten().tolist()]
    assert np.diff(federation.offsets).tolist() == np.bincount(owner).tolist()


@pytest.mark.parametrize("name", sorted(ALL))
def test_the_key_alone_decides(name: str) -> None:
    rule = partition({"name": name, "clients": 5, **ALL[name]})
    labels = torch.arange(1000) % 10
    first, again, other = (rule.assign(labels, key, 10) for key in (7, 7, 8))
    assert first.dtype == np.int64
    assert (first == again).all()
    assert (first != other).any()


def test_iid_parts_are_as_equal_as_possible() -> None:
    assert sizes(Iid(clients=3), [0] * 11) == [4, 4, 3]
    assert sizes(Iid(clients=11), [0] * 11) == [1] * 11


def test_iid_deals_every_label_to_everybody() -> None:
    labels = torch.arange(10_000) % 10
    owner = Iid(clients=4).assign(labels, 3, 10)
    counts = np.array([np.bincount(labels[owner == client], minlength=10) for client in range(4)])
    assert counts.min() > 200
    assert counts.max() < 300


def test_shards_are_slices_of_the_sorted_labels() -> None:
    labels = [3, 1, 0, 2, 2, 0, 1, 3, 3, 0, 1, 2]
    owner = Shards(clients=3, per_client=2).assign(torch.tensor(labels), 5, 4)
    ranked = sorted(range(12), key=lambda example: (labels[example], example))
    shards = [ranked[start : start + 2] for start in range(0, 12, 2)]
    for shard in shards:
        assert len({int(owner[example]) for example in shard}) == 1
    assert np.bincount(owner).tolist() == [4, 4, 4]


def test_shards_of_mnist_size_give_at_most_few_labels() -> None:
    labels = torch.arange(60_000) % 10  # 6,000 of each, so no shard of 300 crosses two labels
    owner = Shards(clients=100).assign(labels, 1, 10)
    assert np.bincount(owner).tolist() == [600] * 100
    assert max(len(set(labels[owner == client].tolist())) for client in range(100)) == 2


def test_uneven_shards_differ_by_one() -> None:
    assert sorted(sizes(Shards(clients=3, per_client=1), [0, 0, 0, 1, 1, 1, 1])) == [2, 2, 3]


def test_dirichlet_cuts_each_class_by_its_proportions() -> None:
    labels = np.array([0] * 30 + [1] * 50)
    owner = Dirichlet(clients=4, alpha=2.0).assign(torch.from_numpy(labels), 9, 2)
    shares = keys.generator(keys.key(9, "proportions", 0)).dirichlet([2.0] * 4, size=2)
    for label, count in ((0, 30), (1, 50)):
        cuts = [round(float(total) * count) for total in np.cumsum(shares[label])]
        expected = [end - start for start, end in zip([0, *cuts[:-1]], cuts, strict=True)]
        assert np.bincount(owner[labels == label], minlength=4).tolist() == expected


def test_dirichlet_draws_again_until_everybody_has_enough() -> None:
    labels = [0, 1, 2] * 40
    for key in range(20):
        assert min(sizes(Dirichlet(clients=5, alpha=0.5, min_examples=8), labels, key)) >= 8


def test_a_small_alpha_separates_and_a_large_one_mixes() -> None:
    labels = torch.arange(2000) % 4

    def largest_share(alpha: float) -> float:
        owner = Dirichlet(clients=8, alpha=alpha).assign(labels, 2, 4)
        counts = [np.bincount(labels[owner == client], minlength=4) for client in range(8)]
        return float(np.mean([count.max() / count.sum() for count in counts]))

    assert largest_share(1000.0) < 0.3
    assert largest_share(0.1) > 0.7


def test_affinity_one_sends_every_class_home() -> None:
    labels = torch.arange(50) % 5
    assert (Affinity(probability=1.0).assign(labels, 1, 5) == labels.numpy()).all()
    assert Affinity(probability=1.0).count(5) == 5


def test_affinity_zero_sends_every_class_evenly_elsewhere() -> None:
    labels = torch.zeros(9000, dtype=torch.int64) + 2
    counts = np.bincount(Affinity(probability=0.0).assign(labels, 1, 4), minlength=4)
    assert counts[2] == 0
    assert counts[[0, 1, 3]].min() > 2850


def test_affinity_keeps_its_probability() -> None:
    labels = torch.arange(20_000) % 10
    owner = Affinity(probability=0.7).assign(labels, 4, 10)
    assert (owner == labels.numpy()).mean() == pytest.approx(0.7, abs=0.01)


@pytest.mark.parametrize("clients", [1, 2, 3, 7, 13, 20, 23])
def test_affinity_with_any_number_of_clients(clients: int) -> None:
    classes = 10
    labels = torch.arange(40_000) % classes
    owner = Affinity(probability=0.5, clients=clients).assign(labels, 4, classes)
    homes = min(clients, classes)
    for label in range(classes):
        counts = np.bincount(owner[labels == label], minlength=clients)
        home = [client for client in range(clients) if client % homes == label % homes]
        others = [client for client in range(clients) if client not in home]
        assert counts.sum() == 4000
        assert counts[home].min() > 0.8 * (2000 if others else 4000) / len(home)
        if others:
            assert counts[home].sum() == pytest.approx(2000, abs=150)
            assert counts[others].min() > 0.7 * 2000 / len(others)


def test_affinity_with_one_class_deals_to_everybody() -> None:
    assert min(sizes(Affinity(probability=0.3, clients=4), [0] * 400)) > 70


def test_unbalanced_cuts_in_order_unless_shuffled() -> None:
    owner = Unbalanced(clients=6, shuffle=False).assign(torch.zeros(40), 3, 0)
    assert (np.diff(owner) >= 0).all()
    assert set(owner) == set(range(6))
    shuffled = Unbalanced(clients=6).assign(torch.zeros(40), 3, 0)
    assert np.bincount(shuffled).tolist() == np.bincount(owner).tolist()
    assert (np.diff(shuffled) < 0).any()


def test_unbalanced_with_as_many_clients_as_examples() -> None:
    assert Unbalanced(clients=5, shuffle=False).assign(torch.zeros(5), 3, 0).tolist() == [0, 1, 2, 3, 4]


def test_quantity_sizes_are_log_normal() -> None:
    counts = np.array(sizes(Quantity(clients=2000, sigma=1.0), [0] * 400_000))
    assert counts.min() >= 1
    assert np.log(counts).std() == pytest.approx(1.0, abs=0.05)


def test_quantity_without_spread_is_equal() -> None:
    counts = sizes(Quantity(clients=7, sigma=0.0), [0] * 100)
    assert max(counts) - min(counts) <= 1


def test_quantity_survives_any_sigma() -> None:
    assert sorted(sizes(Quantity(clients=4, sigma=1e6), [0] * 50)) == [1, 1, 1, 47]


def test_many_clients_cost_no_loop() -> None:
    owner = Quantity(clients=200_000).assign(torch.zeros(1_000_000), 1, 0)
    assert np.bincount(owner, minlength=200_000).min() >= 1


@pytest.mark.parametrize("name", ["shards", "dirichlet", "affinity"])
def test_a_regression_has_no_labels_to_assign_by(name: str) -> None:
    rule = partition({"name": name, "clients": 2, **ALL[name]})
    with pytest.raises(InputError, match=r"assigns examples by their label.*regression.*Use iid, unbalanced"):
        rule.assign(torch.zeros(10), 1, 0)


@pytest.mark.parametrize("name", sorted(ALL))
def test_more_clients_than_examples_are_refused(name: str) -> None:
    rule = partition({"name": name, "clients": 11, **ALL[name]})
    with pytest.raises(InputError, match=r"at most the number of examples, 10\. Got 11 instead: use fewer clients"):
        rule.assign(torch.zeros(10, dtype=torch.int64), 1, 1)


def test_more_shards_than_examples_are_refused() -> None:
    with pytest.raises(InputError, match="5 clients × 3 shards are 15 shards for 10 examples"):
        Shards(clients=5, per_client=3).assign(torch.zeros(10, dtype=torch.int64), 1, 1)


def test_a_dirichlet_that_cannot_be_drawn_says_what_to_change() -> None:
    with pytest.raises(
        InputError, match=r"100 draws.*alpha=0\.001.*'alpha', fewer clients or a smaller 'min_examples'"
    ):
        Dirichlet(clients=10, alpha=0.001).assign(torch.zeros(50, dtype=torch.int64), 1, 2)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"name": "shrads", "clients": 2}, "There is no partition 'shrads'.*Did you mean 'shards'"),
        ({"name": "naturl"}, "Did you mean 'natural'"),
        ({"clients": 2}, "must be a table with a name"),
        ({"name": 3}, "must be a table with a name"),
        ("iid", "must be a table with a name"),
        ("skewed", "affinity, dirichlet and shards skew labels"),
        ({"name": "skewed", "clients": 2}, "affinity, dirichlet and shards skew labels"),
        ({"name": "iid"}, "'clients' parameter of Iid is needed"),
        ({"name": "iid", "clients": 0}, "'clients' parameter of Iid must be more than 0. Got 0"),
        ({"name": "iid", "clients": 2, "alpha": 1}, "Iid has no parameter 'alpha'"),
        ({"name": "shards", "clients": 2, "per_clients": 1}, "Did you mean 'per_client'"),
        ({"name": "dirichlet", "clients": 2, "alpha": 0}, "'alpha' parameter of Dirichlet must be more than 0"),
        ({"name": "dirichlet", "clients": 2, "alpha": float("nan")}, "'alpha' parameter of Dirichlet must be"),
        ({"name": "dirichlet", "clients": 2}, "'alpha' parameter of Dirichlet is needed"),
        ({"name": "affinity", "probability": 1.5}, "'probability' parameter of Affinity must be at most 1"),
        ({"name": "quantity", "clients": 2, "sigma": -1}, "'sigma' parameter of Quantity must be at least 0"),
    ],
)
def test_wrong_tables_are_explained(spec: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        partition(spec)


def test_a_partition_stays_itself() -> None:
    own = Iid(clients=3)
    assert partition(own) is own
