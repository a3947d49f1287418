"""What sites agree on is what one site would have fitted on all rows."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan
from pathlib import Path

import numpy as np
import pytest
import torch

from fedloom.data.agreement import Summary, agree, as_agreed, doubts
from fedloom.data.build import divided, federate
from fedloom.data.federation import Dataset
from fedloom.data.preprocessing import Column, Preprocessing, columns_named
from fedloom.errors import InputError
from tests.data.sources.loading import load

TABLES = {
    "berlin": "age,ward,y\n70,icu,yes\n50,,no\n,icu,no\n",
    "oslo": "age,ward,y\n30,surgery,no\n20,surgery,maybe\n",
}
FIELDS = {"label": "y", "categorical": ["ward"], "fill": "mean"}
ALL = (1, 0, 0)


def data(folder: Path, text: str, **fields: object) -> Dataset:
    (folder / "data.csv").write_text(text)
    return load("csv", path=folder / "data.csv", **{**FIELDS, **fields})


def summary(dataset: Dataset) -> Summary:
    return Summary.of(divided(dataset, clients=1, split=ALL), dataset.missing)


def summaries(folder: Path) -> dict[str, Summary]:
    return {site: summary(data(folder, text)) for site, text in TABLES.items()}


def test_the_agreed_preprocessing_is_that_of_all_rows_in_one_place(tmp_path: Path) -> None:
    agreed = agree(summaries(tmp_path))
    together = TABLES["berlin"] + TABLES["oslo"].partition("\n")[2]
    whole = federate(data(tmp_path, together), clients=1, split=ALL, normalize="federated").preprocessing
    assert (agreed.columns, agreed.classes, agreed.label) == (whole.columns, ("maybe", "no", "yes"), ("y",))
    assert agreed.mean == pytest.approx(whole.mean, rel=1e-12)
    assert agreed.std == pytest.approx(whole.std, rel=1e-12)
    assert (agreed.missing, agreed.shape) == (True, (3,))


def test_a_site_prepares_its_rows_as_agreed(tmp_path: Path) -> None:
    agreed = agree(summaries(tmp_path))
    listed = {column.name: column.categories for column in agreed.columns if column.categories}
    site = as_agreed(data(tmp_path, TABLES["oslo"], categorical=listed), agreed)
    made = federate(site, clients=1, split=ALL, normalize="federated", agreed=agreed)
    assert (made.classes, made.y.tolist()) == (agreed.classes, [1, 0])
    expected = (np.array([[30, 0, 1], [20, 0, 1]]) - agreed.mean) / agreed.std
    np.testing.assert_allclose(made.x, expected, rtol=1e-6)
    assert made.preprocessing.mean == agreed.mean


def test_numbers_as_labels_are_put_together_too(tmp_path: Path) -> None:
    parts = {
        name: summary(data(tmp_path, f"x,y\n1,{a}\n2,{b}\n", categorical=None))
        for name, a, b in (("p", 0.5, 1.5), ("q", 3.5, 4.5))
    }
    assert agree(parts).target == (2.5, pytest.approx(np.std([0.5, 1.5, 3.5, 4.5])))
    made = federate(
        data(tmp_path, "x,y\n1,0.5\n2,1.5\n", categorical=None),
        clients=1,
        split=ALL,
        normalize="federated",
        agreed=agree(parts),
        scale_target=True,
    )
    assert made.y.tolist() == pytest.approx([(value - 2.5) / np.std([0.5, 1.5, 3.5, 4.5]) for value in (0.5, 1.5)])


def test_features_that_never_vary_or_are_never_known_are_as_in_one_place() -> None:
    column = (Column(name="a"), Column(name="b"))
    one = Summary(
        columns=column, marks={"": nan}, label=("y",), classes=("0",), features={"a": (2, 5, 0), "b": (0, 0, 0)}
    )
    agreed = agree({"p": one, "q": one})
    assert (agreed.mean, agreed.std) == ((5.0, 0.0), (1.0, inf))


@pytest.mark.parametrize(
    ("text", "fields", "said"),
    [
        ("age,y\n1,no\n", {"categorical": None}, r"differ in the columns: only berlin has ward \(categories\)"),
        (
            "age,ward,y\n1,2,no\n",
            {"categorical": None},
            r".*only berlin has ward \(categories\), only lyon has ward \(numbers\)",
        ),
        ("age,ward,y\n1,icu,0.5\n", {}, "differ in the kind of label"),
        ("age,ward,y\n1,icu,no\n", {"fill": "zero"}, "differ in the rule for missing values"),
        ("age,ward,z\n1,icu,no\n", {"label": "z"}, "differ in the label"),
    ],
)
def test_sites_whose_tables_differ_are_told_how(
    tmp_path: Path, text: str, fields: dict[str, object], said: str
) -> None:
    found = summaries(tmp_path)
    with pytest.raises(InputError, match=f"^berlin and lyon {said}"):
        agree({"berlin": found["berlin"], "lyon": summary(data(tmp_path, text, **fields))})


def test_sites_with_other_marks_for_missing_values_hear_what_all_should_write(tmp_path: Path) -> None:
    text = "age,ward,y\n1,icu,no\n"
    sites = {
        "aachen": summary(data(tmp_path, text)),
        "celle": summary(data(tmp_path, text, missing={"n/a": nan})),
        "ulm": summary(data(tmp_path, text, missing={"-9": nan, "never": 0.0})),
    }
    with pytest.raises(InputError) as refused:
        agree(sites)
    assert str(refused.value) == (
        "aachen and celle differ in the rule for missing values: only celle has 'n/a' = nan. Write the same in [data] "
        'at every site, also where no cell has such a mark: fill = "mean" and missing = { -9 = nan, never = 0.0, '
        '"n/a" = nan }. Then agree again: `fedloom data summarize`, `fedloom data agree`.'
    )
    with pytest.raises(InputError, match=r"aachen has nan for .* Write the same .*: fill = 0\. Then"):
        agree({"oslo": summary(data(tmp_path, text, fill="zero")), "aachen": sites["aachen"]})


def test_columns_are_found_by_name_in_the_order_of_the_first_site(tmp_path: Path) -> None:
    swapped = "ward,age,y\nsurgery,30,no\nsurgery,20,maybe\n"
    found = {**summaries(tmp_path), "oslo": summary(data(tmp_path, swapped))}
    agreed = agree(found)
    assert agreed == agree(summaries(tmp_path))
    listed = {column.name: column.categories for column in agreed.columns if column.categories}
    here, there = (as_agreed(data(tmp_path, one, categorical=listed), agreed) for one in (swapped, TABLES["oslo"]))
    assert here.features == there.features == agreed.features
    assert here.x.tolist() == there.x.tolist() == [[30, 0, 1], [20, 0, 1]]
    made = federate(here, clients=1, split=ALL, normalize="federated", agreed=agreed).preprocessing
    assert made.sha256 == agreed.sha256


def test_a_site_with_other_units_or_marks_for_missing_values_is_doubted() -> None:
    def site(age: float, crp: float, count: int = 40) -> Summary:
        features = {"age": (count, age, 100.0), "crp": (count, crp, crp**2)}
        return Summary(columns=columns_named(features), marks={}, label=("y",), classes=("0", "1"), features=features)

    found = {"berlin": site(60, 10), "lyon": site(64, 880), "oslo": site(50, 12)}
    (said,) = doubts(found, agree(found))
    # what all sites get names no site, and no number of a single one
    assert agree(found).doubts == ("crp may be in another unit at some sites, or hold numbers that mean missing.",)
    assert said.startswith("crp is about 81 times larger at lyon than elsewhere: is it in another unit there")
    assert [*doubts({"berlin": site(60, 10), "oslo": site(50, 40)}, agree(found))] == []
    never = {"berlin": site(60, 10), "oslo": site(50, 0, count=0)}
    empty = [*doubts(never, agree(never))]
    assert empty == [
        f"{name} is empty in all training rows of oslo: the model gets the mean there." for name in ("age", "crp")
    ]
    assert [one.replace("some sites", "oslo") for one in agree(never).doubts] == empty
    assert [*doubts({**found, "lyon": site(64, 880, count=5)}, agree(found))] == []  # too few to tell


def test_data_that_does_not_fit_what_was_agreed_is_refused(tmp_path: Path) -> None:
    agreed = agree(summaries(tmp_path))
    other = data(tmp_path, TABLES["oslo"])
    with pytest.raises(InputError, match=r"columns of this data are not those .*: only what was agreed has ward=icu"):
        as_agreed(other, agreed)
    fitting = replace(other, preprocessing=Preprocessing(columns=agreed.columns), classes=("no", "yse"))
    with pytest.raises(InputError, match=r"'yse' is not among the classes .*: maybe, no, yes\. Did you mean 'yes'"):
        as_agreed(fitting, agreed)


def test_a_summary_is_a_file_that_people_can_read(tmp_path: Path) -> None:
    made = summaries(tmp_path)["berlin"]
    made.write(tmp_path / "berlin.json")
    assert repr(Summary.read(tmp_path / "berlin.json")) == repr(made)
    assert made.features["age"] == (2.0, 60.0, 100.0)
    (tmp_path / "berlin.json").write_text("[]")
    with pytest.raises(InputError, match=r"berlin\.json cannot be read as a summary"):
        Summary.read(tmp_path / "berlin.json")
    pictures = Dataset(torch.zeros(4, 2, 2), torch.arange(4) % 2, classes=("a", "b"))
    with pytest.raises(InputError, match="Only tables can be summarised"):
        summary(pictures)
