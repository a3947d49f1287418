"""A column in another unit is multiplied when it is read, before anything else is done with it."""

from __future__ import annotations

import re
from math import inf, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedloom.data.agreement import Summary, agree, doubts
from fedloom.data.agreement import as_agreed as prepared
from fedloom.data.build import divided, federate
from fedloom.data.federation import Dataset
from fedloom.data.plausibility import suspicions
from fedloom.data.sources.csv import Csv
from fedloom.errors import InputError
from fedloom.experiment.description import identity
from fedloom.experiment.experiment_file import parse
from fedloom.files import toml_value
from fedloom.results.prediction import Predictor, predict, predict_file
from tests.data.sources.loading import load

BERLIN = "crea,age,ward,dead\n1,70,icu,1\n2,50,er,0\n"
ESSEN = "age,crea,ward,dead\n60,100,icu,1\n40,200,er,0\n"  # in another order
FIELDS: dict[str, Any] = {"label": "dead", "categorical": ["ward"]}


def folder(path: Path, **tables: str) -> Path:
    for name, text in tables.items():
        (path / f"{name}.csv").write_text(text)
    return path


def column(data: Dataset, name: str) -> list[float]:
    found: list[float] = data.x[:, data.features.index(name)].tolist()
    return found


def test_the_column_of_a_file_is_multiplied(tmp_path: Path) -> None:
    path = folder(tmp_path, essen=ESSEN) / "essen.csv"
    data = load("csv", path=path, convert={"crea": 0.01}, **FIELDS)
    assert column(data, "crea") == np.float32([1, 2]).tolist()  # whole numbers, multiplied and rounded once
    assert column(data, "age") == [60, 40]
    assert data.y.tolist() == [1, 0]


def test_only_the_file_of_one_client_is_multiplied(tmp_path: Path) -> None:
    data = load("csv", path=folder(tmp_path, berlin=BERLIN, essen=ESSEN), convert={"essen": {"crea": 0.5}}, **FIELDS)
    assert column(data, "crea") == [1, 2, 50, 100]
    assert column(data, "age") == [70, 50, 60, 40]
    data = load("csv", path=tmp_path, convert={"crea": 0.5}, **FIELDS)
    assert column(data, "crea") == [0.5, 1, 50, 100]


def test_who_predicts_hears_which_columns_have_another_unit_than_the_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = load("csv", path=folder(tmp_path, berlin=BERLIN, essen=ESSEN), convert={"essen": {"crea": 0.5}}, **FIELDS)
    (told,) = data.preprocessing.units
    assert told.startswith("crea was multiplied when the training data was read (by 0.5 at essen): the model takes")
    predictor = Predictor(nn.Linear(4, 2), data.preprocessing.replace(shape=(4,), classes=("0", "1")), torch.float32)
    said: list[str] = []
    assert [*predict_file(predictor, tmp_path / "essen.csv", said.append)]
    predict(predictor, np.float32([[1, 70, 0, 1]]))
    assert said == [told] == caplog.messages
    regression = {"label": "age", "task": "regression", "categorical": ["ward"], "convert": {"age": 12.0}}
    (told,) = load("csv", path=tmp_path, **regression).preprocessing.units
    assert told.endswith("(by 12 in all rows): predictions are in the unit that this gave.")


def test_only_the_rows_of_one_client_are_multiplied(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("site;crea;y\nessen ;1,5;0\nbonn;3;1\nbonn;4;1\n7,0;3;0\n")
    convert = {"essen": {"crea": 2}, "7.0": {"crea": -1}}
    data = load("csv", path=tmp_path / "a.csv", client="site", label="y", convert=convert)
    assert column(data, "crea") == [3, 3, 4, -3]


def test_marks_and_empty_cells_are_in_the_common_unit(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("crea;y\n1,5;0\n;1\n?;1\n-999;0\n -999,0;0\n<1;0\n")
    fields = {"path": tmp_path / "a.csv", "label": "y", "fill": 3.0}
    missing = {"?": 7.0, "-999": nan, "<1": 0.5}
    data = load("csv", **fields, missing=missing, convert={"crea": 2.0})
    np.testing.assert_array_equal(column(data, "crea"), [3, 3, 7, nan, nan, 0.5])
    assert data.preprocessing.marks["?"] == 7  # for new rows, too
    with pytest.raises(InputError, match=r"Line 4 .*'\?' in column 'crea', which is not a finite number"):
        load("csv", **fields, convert={"crea": 2.0})


def test_an_optional_column_may_be_lacking(tmp_path: Path) -> None:
    folder(tmp_path, berlin="age,dead\n70,1\n", essen="age,crea,dead\n60,100,0\n")
    data = load("csv", path=tmp_path, label="dead", optional=["crea"], fill=-1, convert={"crea": 0.5})
    assert column(data, "crea") == [-1, 50]


def test_a_number_to_predict_is_multiplied(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("age;days;sex\n1;24;0\n2;36,5;1\n")
    fields = {"path": tmp_path / "a.csv", "convert": {"days": 0.5}}
    assert load("csv", **fields, label="days", task="regression").y.tolist() == [12, 18.25]
    both = load("csv", **{**fields, "convert": {"age": 3}}, label=["days", "age"], task="regression")
    assert both.y.tolist() == [[24, 3], [36.5, 6]]
    with pytest.raises(InputError, match=r"convert has 'days', which is in label: .* set task = \"regression\""):
        load("csv", **fields, label="days")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"convert": {"essn": {"crea": 2}}}, "convert: The folder .* has no client 'essn'.*Did you mean 'essen'"),
        ({"convert": {"essen.csv": {"crea": 2}}}, "has no client 'essen.csv'.*Did you mean 'essen'"),
        ({"convert": {"essen": {"crae": 2}}}, r"convert: The file .*essen\.csv has no column 'crae'.*mean 'crea'"),
        ({"convert": {"crae": 2}}, r"convert: The file .*berlin\.csv has no column 'crae'.*Did you mean 'crea'"),
        ({"convert": {"crea": 2, "essen": {"crea": 2}}}, "factors for all rows beside tables of clients"),
        ({"convert": {"essen": {"crea": {"x": 1}}}}, "the factor of 'crea' must be a finite number other than 0"),
        ({"convert": {"ward": 2}}, "convert has 'ward', which is in categorical: categories have no unit"),
        ({"convert": {"dead": 2}}, "convert has 'dead', which is in label: classes have no unit"),
        ({"convert": {"age": 2}, "drop": ["age"]}, "convert has 'age', which is in drop: it is left out"),
        ({"convert": {"age": 2}, "group": "age"}, "convert has 'age', which is in client, split_column or group"),
        ({"convert": {"ward": 2}, "categorical": None}, "Line 2 .*'icu' in column 'ward'.*not a finite number"),
        ({"convert": 0.0113}, "must be a table"),
        *(
            ({"convert": given}, f"the factor of 'crea' must be .* other than 0, .*Got {re.escape(repr(factor))}")
            for factor in (0, 0.0, inf, nan, "0.0113", True)
            for given in ({"crea": factor}, {"essen": {"crea": factor}})
        ),
    ],
)
def test_what_does_not_fit_is_explained(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        load("csv", path=folder(tmp_path, berlin=BERLIN, essen=ESSEN), **{**FIELDS, **fields})


def test_a_file_of_one_client_needs_no_table_of_it(tmp_path: Path) -> None:
    path = folder(tmp_path, essen=ESSEN) / "essen.csv"
    with pytest.raises(InputError, match=r"has a table for 'essen', .*alone: convert = { crea = 0\.5 }\.$"):
        load("csv", path=path, convert={"essen": {"crea": 0.5}}, **FIELDS)
    with pytest.raises(InputError, match=r"convert: The file .*essen\.csv has no client 'ic'.*Did you mean 'icu'"):
        load("csv", path=path, label="dead", client="ward", convert={"ic": {"crea": 0.5}})


def rows(unit: float, sites: tuple[str, ...]) -> dict[str, str]:
    draw = np.random.default_rng(4)
    tables = {}
    for site in sites:
        values = np.exp(draw.normal(0, 0.4, 60)) * (unit if site == "essen" else 1)
        tables[site] = "crea,dead\n" + "".join(f"{one:.6g},{at % 2}\n" for at, one in enumerate(values))
    return tables


SITES = ("bonn", "essen", "köln")


@pytest.mark.parametrize("unit", [88.4, 1 / 88.4])
def test_the_caution_about_another_unit_names_the_key_that_ends_it(tmp_path: Path, unit: float) -> None:
    path = folder(tmp_path, **rows(unit, SITES))
    (said,) = suspicions(federate(load("csv", path=path, label="dead"), normalize="federated"))
    assert said.startswith("crea is about ")
    found = re.search(
        r"missing values\? For another unit, set convert = (.*) in \[data\], with the exact factor, times one", said
    )
    assert found
    convert = toml_value(found[1])
    assert convert == {"essen": {"crea": pytest.approx(1 / unit, rel=0.2)}}
    assert convert["essen"]["crea"] == float(f"{convert['essen']['crea']:.2g}")
    data = load("csv", path=path, label="dead", convert=convert)
    assert [*suspicions(federate(data, normalize="federated"))] == []
    drawn = federate(
        load("csv", path=path, label="dead"), partition={"name": "unbalanced", "clients": 3, "shuffle": False}
    )
    assert not any("convert" in one for one in suspicions(drawn))  # whoever it is, no key names that client


def test_sites_are_told_of_the_key_and_agree_on_the_common_unit(tmp_path: Path) -> None:
    folder(tmp_path, **rows(88.4, SITES))

    def site(name: str, **fields: Any) -> Dataset:
        return Csv(path=tmp_path / f"{name}.csv", label="dead", **fields).load(Path(), at_site=True)

    def summaries(**fields: Any) -> dict[str, Summary]:
        made = {name: site(name, **(fields if name == "essen" else {})) for name in SITES}
        return {name: Summary.of(divided(one, clients=1, split=(1, 0, 0)), one.missing) for name, one in made.items()}

    parts = summaries()
    (said,) = doubts(parts, agree(parts))
    found = re.search(
        r" set convert = (\{ crea = 0\.01\d* \}) in \[data\] at essen, with the exact factor, times one",
        said,
    )
    assert found, said
    parts = summaries(convert={"crea": 1 / 88.4})
    agreed = agree(parts)
    assert [*doubts(parts, agreed)] == []
    one = federate(
        load("csv", path=tmp_path, label="dead", convert={"essen": {"crea": 1 / 88.4}}),
        split=(1, 0, 0),
        normalize="federated",
    )
    assert agreed.mean == pytest.approx(one.preprocessing.mean, rel=1e-6)
    source = Csv(path=tmp_path / "essen.csv", label="dead", convert={"crea": 1 / 88.4}).as_agreed(agreed)
    here = prepared(source.load(Path(), at_site=True), agreed)
    made = federate(here, clients=1, split=(1, 0, 0), normalize="federated", agreed=agreed)
    assert made.preprocessing.sha256 == agreed.sha256  # the unit of a file is no other preparation
    assert abs(made.x.mean()) < 0.5


@pytest.mark.parametrize("convert", [{"crea": 0.0113}, {"essen": {"crea": 0.0113}}])
def test_a_number_that_means_missing_is_named_as_it_is_written(tmp_path: Path, convert: dict[str, Any]) -> None:
    text = "site,crea,y\n" + "".join(f"essen,{80 + at},{at % 2}\nbonn,{1 + at % 3},1\n" for at in range(30))
    (tmp_path / "a.csv").write_text(f"{text}essen,-999,0\nessen,,0\n")
    fields = {"path": tmp_path / "a.csv", "label": "y", "client": "site", "fill": "mean", "convert": convert}
    (said,) = load("csv", **fields).cautions
    assert said.startswith("crea is -999 in 1 row, far from all other values")
    assert load("csv", **fields, missing={"-999": nan}).cautions == ()


def test_factors_decide_the_identity_and_files_without_them_keep_theirs() -> None:
    data = {"source": "csv", "path": "a.csv", "label": "y"}
    described = [
        parse({"data": data | more}).description() for more in ({}, {"convert": {"a": 2}}, {"convert": {"a": 3}})
    ]
    assert "convert" not in described[0]["data"]
    assert len({*map(identity, described)}) == 3
