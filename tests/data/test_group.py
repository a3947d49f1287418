"""Examples that belong together, such as those of one patient, stay in one split."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.data.build import federate
from fedloom.data.describe import describe
from fedloom.data.federation import Dataset, Federation
from fedloom.data.split import SPLITS, Split
from fedloom.errors import InputError
from tests.data.sources.loading import load


def divided(owner: list[str], group: list[Any], split: Split | None = None, seed: int = 0) -> dict[str, list[set[Any]]]:
    """The groups in each split of every client; an example's feature is its row."""
    count = len(owner)
    rows = torch.arange(count, dtype=torch.float32)[:, None]
    data = Dataset(rows, torch.zeros(count), np.array(owner), group=np.array(group))
    made = federate(data, split=split, seed=seed)
    assert sorted(made.x[:, 0].tolist()) == list(range(count))
    return {
        name: [{group[int(row)] for row in made.x[made.indices(client, name), 0]} for client in range(made.clients)]
        for name in SPLITS
    }


@settings(deadline=None, max_examples=60)
@given(
    rows=st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 9)), min_size=1, max_size=60), seed=st.integers(0, 5)
)
def test_no_group_of_a_client_is_in_two_splits(rows: list[tuple[str, int]], seed: int) -> None:
    found = divided([owner for owner, _ in rows], [group for _, group in rows], seed=seed)
    for train, validation, test in zip(*(found[name] for name in SPLITS), strict=True):
        assert train  # there is always something to train with
        assert not train & validation | train & test | validation & test


def test_shares_are_those_of_the_split_as_far_as_groups_allow() -> None:
    found = divided(["a"] * 100, [number // 2 for number in range(100)])
    assert [len(found[name][0]) for name in SPLITS] == [30, 10, 10]
    in_order = divided(["a"] * 10, [number // 2 for number in range(10)], Split(shuffle=False))
    assert [found[0] for found in in_order.values()] == [{0, 1, 2}, {3}, {4}]
    assert [found[0] for found in divided(["a"] * 3, [7, 7, 7]).values()] == [{7}, set(), set()]


def test_other_seeds_draw_other_groups() -> None:
    owner, group = ["a"] * 40, [number // 4 for number in range(40)]
    assert len({str(divided(owner, group, seed=seed)) for seed in range(5)}) > 1
    assert divided(owner, group, seed=3) == divided(owner, group, seed=3)


def test_arrays_may_say_what_belongs_together() -> None:
    x, patient = np.arange(40.0)[:, None], np.arange(40) % 8
    made = Federation.from_arrays(x, np.arange(40) % 2, client=["a", "b"] * 20, group=patient)
    for client in range(2):
        patients = [{int(row) % 8 for row in made.x[made.indices(client, name), 0]} for name in SPLITS]
        assert sum(map(len, patients)) == len(set.union(*patients)) == 4
    with pytest.raises(InputError, match="40 examples but 3 groups"):
        Federation.from_arrays(x, np.arange(40) % 2, client=["a", "b"] * 20, group=[1, 2, 3])


def write(folder: Path) -> None:
    rows = [
        f"{hospital},{number % 8},{number},{number % 2}\n" for hospital in ("cork", "kerry") for number in range(40)
    ]
    (folder / "visits.csv").write_text("hospital,patient_id,age,dead\n" + "".join(rows))


def test_a_column_of_a_table_says_what_belongs_together(tmp_path: Path) -> None:
    write(tmp_path)
    found = load("csv", tmp_path, path="visits.csv", label="dead", client="hospital", group="patient_id")
    assert found.features == ("age",)
    made = federate(found)
    for client in range(2):
        patients = [{int(age) % 8 for age in made.x[made.indices(client, name), 0]} for name in SPLITS]
        assert sum(map(len, patients)) == len(set.union(*patients)) == 8
    for wrong in ({"partition": {"name": "iid", "clients": 3}}, {"server": 0.2}):
        with pytest.raises(InputError, match=r"takes them apart\. The data says which client .* leave out partition"):
            federate(found, **wrong)
        with pytest.raises(InputError, match=r"takes them apart\. Name the column with the clients"):
            federate(replace(found, client=None), **{"clients": 3, **wrong})
    with pytest.raises(InputError, match="both group and split_column"):
        load("csv", tmp_path, path="visits.csv", label="dead", group="patient_id", split_column="hospital")


def test_a_number_of_patients_that_is_left_out_and_repeats_is_a_caution(tmp_path: Path) -> None:
    write(tmp_path)
    settings: dict[str, Any] = {"path": "visits.csv", "label": "dead", "client": "hospital"}
    left_out = federate(load("csv", tmp_path, **settings, drop=("patient_id",)))
    assert any('set group = "patient_id"' in text for text in describe(left_out).warnings)
    kept = federate(load("csv", tmp_path, **settings, group="patient_id"))
    assert not any("group" in text for text in describe(kept).warnings)
