from __future__ import annotations

import io
import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits

from fedloom.data.build import federate
from fedloom.data.describe import describe, label_counts, missing_table, table
from fedloom.data.federation import Dataset, Federation
from fedloom.data.preprocessing import Column, Preprocessing, columns_named


def small() -> Federation:
    """a: five of label 0; b: three of label 0 and seven of label 1; c: one of label 1."""
    labels = torch.tensor([0] * 5 + [0] * 3 + [1] * 7 + [1])
    client = np.array(["a"] * 5 + ["b"] * 10 + ["c"])
    return federate(Dataset(torch.zeros(16, 1), labels, client=client, classes=("no", "yes", "maybe")))


def rendered(federation: Federation, **arguments: int) -> str:
    return printed(table(describe(federation), **arguments))


def printed(found: Table) -> str:
    text = io.StringIO()
    Console(width=80, file=text).print(found)
    return text.getvalue()


def test_every_client_is_counted() -> None:
    description = describe(small())
    assert description.names == ["a", "b", "c"]
    assert description.sizes.tolist() == [[3, 6, 1], [1, 2, 0], [1, 2, 0]]  # train, validation, test
    assert (description.labels.tolist(), description.largest.tolist()) == ([1, 2, 1], [1.0, 0.7, 1.0])
    assert (description.clients, description.examples, description.classes) == (3, 16, ("no", "yes", "maybe"))


def test_warnings_say_who() -> None:
    assert describe(small()).warnings == (
        "2 of 3 clients have only one label: a, c.",
        "1 of 3 clients has only one training example: c.",
        "1 of 3 clients has no validation examples: c.",
        "1 of 3 clients has no test examples: c.",
        "No client has examples of 1 of 3 classes: maybe.",
    )


def test_nothing_to_warn_about() -> None:
    data = Dataset(torch.zeros(100, 1), torch.arange(100) % 2, classes=("a", "b"))
    assert describe(federate(data, clients=2)).warnings == ()


def test_the_most_common_class_of_each_client_is_named() -> None:
    description = describe(small())
    assert description.most_common.tolist() == [0, 1, 1]
    lines = rendered(small()).splitlines()
    assert [next(line for line in lines if f"│ {name} " in line).split("│")[-2].strip() for name in "abc"] == [
        "100% no",
        "70% yes",
        "100% yes",
    ]
    assert description.message()["clients"][1] == {
        "name": "b",
        "examples": 10,
        "train": 6,
        "validation": 2,
        "test": 2,
        "labels": 2,
        "largest": {"class": "yes", "share": 0.7},
    }


def with_gaps(normalize: str, columns: int = 3) -> Federation:
    """berlin lacks a crp of 5, and two wards of 5; oslo a crp of 3. The mean of age is one of its values."""
    x = torch.tensor([[float(row % 3) + 1, row % 2, 1 - row % 2, row] for row in range(8)])
    x[[0, 6], 3] = torch.nan
    x[1:3, 1:3] = torch.nan
    kinds = (Column(name="age"), Column(name="ward", categories=("a", "b")), Column(name="crp [mg/l]"))
    data = Dataset(
        x,
        torch.arange(8) % 2,
        client=np.array(["berlin"] * 5 + ["oslo"] * 3),
        classes=("no", "yes"),
        features=("age", "ward=a", "ward=b", "crp [mg/l]"),
        missing=True,
        preprocessing=Preprocessing(columns=kinds),
    )
    return federate(data, normalize=normalize)


@pytest.mark.parametrize("normalize", ["federated", "client"])
def test_missing_values_are_counted_by_column_and_client(normalize: str) -> None:
    """Scaled values are 0 where they are missing, and also where they are the mean: those are not counted."""
    description = describe(with_gaps(normalize))
    assert {name: counts.tolist() for name, counts in description.missing.items()} == {
        "ward": [2, 0],
        "crp [mg/l]": [1, 1],
    }
    clients = description.message()["clients"]
    assert [one["missing"] for one in clients] == [{"ward": 2, "crp [mg/l]": 1}, {"crp [mg/l]": 1}]
    found = missing_table(description)
    assert found is not None
    text = printed(found)
    assert "│ ward       │       2 │ berlin 2 of 5 " in text
    assert "│ crp [mg/l] │       2 │ berlin 1 of 5, oslo 1 of 3 │" in text
    assert "age" not in text
    assert missing_table(describe(small())) is None


def test_tables_with_long_names_fit_eighty_columns() -> None:
    names = np.repeat([f"a hospital with a very long name, number {number}" for number in range(50)], 4)
    x = torch.zeros(200, 30)
    x[::2] = torch.nan
    columns = columns_named(f"a column with a very long name, number {number}" for number in range(30))
    classes = ("a class with a very long name", "another class")
    data = Dataset(x, torch.arange(200) % 2, client=names, classes=classes, missing=True)
    features = tuple(column.name for column in columns)
    data = replace(data, preprocessing=Preprocessing(columns=columns), features=features)
    description = describe(federate(data, normalize="federated"))
    found = missing_table(description)
    assert found is not None
    for text in (printed(found), printed(table(description))):
        assert max(len(line) for line in text.splitlines()) <= 80
    assert "45 more" in " ".join(re.sub("[^a-z0-9 ]", " ", printed(found)).split())
    assert "… 10 more" in printed(found)
    assert re.search(r"│ a hospital.*… │ +4 │ +2 │ +1 │ +1 │ +2 │ 50% a.*… │", printed(table(description)))


def test_a_regression_has_no_labels() -> None:
    description = describe(federate(Dataset(torch.zeros(10, 1), torch.rand(10)), clients=2, server=2))
    assert description.labels.tolist() == [0, 0]
    assert all(math.isnan(share) for share in description.largest)
    assert description.server == {"test": 2}
    assert "largest" not in rendered(federate(Dataset(torch.zeros(10, 1), torch.rand(10)), clients=2))


def test_counts_agree_with_counting_one_by_one() -> None:
    labels = torch.randint(0, 7, (500,), generator=torch.Generator().manual_seed(1))
    data = Dataset(torch.zeros(500, 1), labels, classes=tuple("abcdefg"))
    federation = federate(data, partition={"name": "dirichlet", "clients": 20, "alpha": 0.5})
    description = describe(federation)
    for client in range(20):
        held = federation.y[federation.offsets[client] : federation.offsets[client + 1]].tolist()
        assert description.labels[client] == len(set(held))
        assert description.largest[client] == max(held.count(label) for label in held) / len(held)


def test_the_table_has_clients_totals_and_warnings() -> None:
    text = rendered(small())
    for words in (
        "3 clients, 16 examples, 3 classes",
        "validation",
        "70%",
        "all",
        "2 of 3 clients have only one label",
    ):
        assert words in text
    assert "more" not in text
    assert "server" not in text


def test_labels_that_are_numbers_are_told_apart_from_the_numbers_of_classes() -> None:
    labels = torch.arange(30) % 3
    text = rendered(federate(Dataset(torch.zeros(30, 1), labels, classes=("1", "2", "3")), clients=2))
    assert "3 classes (number = label): 0 = 1, 1 = 2, 2 = 3" in text
    plain = rendered(federate(Dataset(torch.zeros(30, 1), labels, classes=("0", "1", "2")), clients=2))
    assert "number = label" not in plain  # a label is its own number


def test_the_table_says_what_the_server_holds() -> None:
    data = Dataset(torch.zeros(30, 1), torch.arange(30) % 2, classes=("a", "b"))
    text = rendered(federate(data, clients=2, server={"test": 4, "validation": 6}))
    assert "2 clients, 20 examples, 2 classes" in text
    assert "The server holds 4 test examples and 6 validation examples" in text


def test_labels_of_the_server_are_counted_also_where_those_of_clients_are_not() -> None:
    data = Dataset(torch.zeros(30, 1), torch.arange(30) % 3, classes=("a", "b", "c"))
    many = federate(data, clients=20, server=9)
    held = torch.bincount(many.server["test"][1], minlength=3).tolist()
    assert sum(held) == 9
    unknown = {"classes": ["a", "b", "c"], "counts": [], "tested": [], "server": held}
    assert label_counts(many, most=19) == unknown
    assert label_counts(replace(many, x=torch.empty(0), y=torch.empty(0))) == unknown  # as at a coordinator
    odd = {"test": (torch.zeros(4, 1), torch.tensor([0.0, 1.0, 1.0, -100.0]))}  # numbers for classes, and one ignored
    found = label_counts(replace(many, server=odd))
    assert found is not None
    assert found["server"] == [1, 2, 0]


def test_the_table_is_cut_and_fits_eighty_columns() -> None:
    names = np.repeat([f"a hospital with a very long name, number {number}" for number in range(50)], 40)
    data = Dataset(torch.zeros(2000, 1), torch.arange(2000) % 2, client=names, classes=("a", "b"))
    lines = rendered(federate(data), limit=5).splitlines()
    assert max(len(line) for line in lines) <= 80
    assert sum("…" in line and "40" in line for line in lines) == 5
    assert any("… 45 more" in line for line in lines)


def test_names_are_no_markup() -> None:
    data = Dataset(torch.zeros(4, 1), torch.zeros(4), client=np.array(["[red]", "[/b]", "[/b]", "[red]"]))
    assert "[red]" in rendered(federate(data))


def test_a_million_clients_are_described_without_a_loop() -> None:
    data = Dataset(torch.zeros(1_000_000, 1), torch.arange(1_000_000) % 10, classes=tuple("0123456789"))
    description = describe(federate(data, clients=1_000_000))
    assert description.labels.sum() == 1_000_000
    assert "1,000,000 of 1,000,000 clients have only one label: 0, 1, 2, 3, 4, …." in description.warnings


def made(x: torch.Tensor, y: torch.Tensor | None = None, **more: object) -> tuple[str, ...]:
    labels = torch.arange(len(x)) % 2 if y is None else y
    return describe(federate(Dataset(x, labels, classes=("a", "b"), **more), clients=2)).warnings  # type: ignore[arg-type]


def test_a_common_label_is_what_a_model_has_to_beat() -> None:
    assert made(torch.zeros(100, 1), (torch.arange(100) % 7 == 0).long()) == (
        "Always predicting a is right for 85% of the examples.",
    )


def test_features_that_differ_in_scale_are_named() -> None:
    x = torch.stack([torch.arange(100) % 2, torch.arange(100) * 3.0, torch.zeros(100)], 1)
    expected = 'Features differ in scale: crp varies 173 times as much as sex. Set normalize = "federated" or "client".'
    assert made(x, features=("sex", "crp", "constant")) == (expected,)
    assert made(x[:, ::2]) == ()
    assert (
        describe(
            federate(Dataset(x, torch.arange(100) % 2, classes=("a", "b")), clients=2, normalize="federated")
        ).warnings
        == ()
    )


def test_pixels_that_hardly_vary_are_no_difference_in_scale() -> None:
    digits = torch.from_numpy(load_digits().data).float()
    assert made(digits) == made(digits / 16) == ()
    said = "Features go up to 254, as bytes of pictures do: scale them, such as by 1/255, or normalise."
    assert made(digits / 16 * 254) == (said,)


def test_a_table_of_few_people_is_still_told_to_scale() -> None:
    draws = np.random.default_rng(0)
    age, income = draws.normal(40, 10, 200), draws.normal(40_000, 9_000, 200)
    columns = [age, income, np.ones(200), draws.random(200) < 0.01]  # the last ones are constant, or nearly
    (said,) = made(torch.from_numpy(np.stack(columns, 1)).float(), features=("age", "income", "one", "rare"))
    assert re.match(r"Features differ in scale: income varies [89]\d\d times as much as age\. Set normalize", said)
    assert made(torch.from_numpy(np.stack([age / 40, *columns[2:]], 1)).float()) == ()
    heights = torch.from_numpy(draws.uniform(140, 200, (200, 3))).float()  # few features below 255 are no picture
    (said,) = made(heights)
    assert re.match(r"Features are large: feature \d is about 17\d, and models learn best near 1\. Set norm", said)


@pytest.mark.parametrize(
    ("normalize", "said"),
    [
        ("none", r"Features differ in scale: .* Set normalize = "),
        (
            "client",
            r"Features .* They are scaled by each client's own training rows, .*: normalize = .federated. scales",
        ),
        ("federated", r"Features .* They are scaled by the training rows of all clients, and others are far from them"),
        ({"thousands": [0, 100]}, r"Features .* Give each of them bounds in \[data\] normalize"),
    ],
)
def test_features_that_are_scaled_already_get_other_advice(normalize: Any, said: str) -> None:
    income = torch.from_numpy(np.random.default_rng(0).normal(40_000, 9_000, 43)).float()
    owner = np.repeat(["a", "b", "c"], [20, 20, 3])  # the last one trains with a single row
    data = Dataset(torch.stack([income, income / 1000], 1), torch.arange(43) % 2, classes=("x", "y"), client=owner)
    federation = federate(replace(data, features=("income", "thousands")), normalize=normalize)
    if normalize == "federated":
        federation.x[federation.indices(0, "test")[0], 0] = 1e6
    (warning,) = (text for text in describe(federation).warnings if text.startswith("Features"))
    assert re.match(said, warning)


def test_a_feature_far_from_zero_differs_in_scale() -> None:
    draws = np.random.default_rng(0)
    near, far = draws.normal(0, 1, 200), 2e7 + 2 * draws.integers(0, 9, 200)
    (said,) = made(torch.from_numpy(np.stack([near, far], 1)).float(), features=("x", "day"))
    assert re.match(r"Features differ in scale: day is about 2e\+07, and x varies by (1|0\.9\d) only\. Set norm", said)
    (said,) = made(torch.from_numpy(far[:, None]).float(), features=("day",))
    assert re.match(r"Features differ in scale: day is about 2e\+07, and it varies by 5(\.\d)? only", said)
    assert made(torch.from_numpy(np.stack([near, 15 + near], 1)).float()) == ()
    (said,) = made(torch.from_numpy(np.stack([near, 500 + near], 1)).float(), features=("x", "mmHg"))
    assert said.startswith("Features are large: mmHg is about 500,")


def test_pictures_that_nobody_scaled_are_noticed() -> None:
    pictures = torch.arange(200, dtype=torch.uint8).reshape(50, 2, 2)
    said = "Features go up to 199, as bytes of pictures do: scale them, such as by 1/255, or normalise."
    assert made(pictures) == made(pictures.float()) == (said,)
    assert made(pictures, scale=1 / 255) == made(pictures.float() / 255) == ()


def test_features_and_classes_are_listed() -> None:
    named = Dataset(torch.zeros(9, 2), torch.arange(9) % 3, classes=("no", "yes", "maybe"), features=("age", "crp"))
    text = rendered(federate(named, clients=1))
    assert "2 features: age, crp" in text
    assert "3 classes (number = label): 0 = no, 1 = yes, 2 = maybe" in text


def test_data_without_test_examples_are_named() -> None:
    arrays = np.zeros((12, 1)), np.arange(12) % 2
    assert not any("no test" in text for text in describe(Federation.from_arrays(*arrays, clients=2)).warnings)
    without = describe(Federation.from_arrays(*arrays, clients=2, split=(1.0, 0.0, 0.0)))
    assert any(text.startswith("There are no test examples") for text in without.warnings)
