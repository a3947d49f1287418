"""A column that only some files or sites have counts as empty elsewhere, if `optional` names it."""

from __future__ import annotations

from math import isnan
from pathlib import Path
from typing import Any

import pytest

from fedloom.data.agreement import Summary, agree, as_agreed, doubts
from fedloom.data.build import divided, federate
from fedloom.data.federation import Dataset
from fedloom.data.plausibility import suspicions
from fedloom.data.preprocessing import Preprocessing
from fedloom.data.sources.csv import Csv
from fedloom.errors import InputError
from fedloom.experiment.description import identity
from fedloom.experiment.experiment_file import parse
from tests.data.sources.loading import load

BERLIN = "age,bnp,ward,dead\n70,5,icu,1\n50,7,general,0\n"
BREE = "age,dead\n30,0\n40,1\n"
FIELDS = {"label": "dead", "optional": ["bnp", "ward"], "categorical": ["ward"], "fill": "mean"}


def folder(path: Path, **tables: str) -> Path:
    for name, text in tables.items():
        (path / f"{name}.csv").write_text(text)
    return path


def at_site(path: Path, text: str, **fields: Any) -> Dataset:
    folder(path, site=text)
    return Csv(path=path / "site.csv", **{**FIELDS, **fields}).load(Path(), at_site=True)


def summary(dataset: Dataset) -> Summary:
    return Summary.of(divided(dataset, clients=1, split=(1, 0, 0)), dataset.missing)


def whole(path: Path, **fields: Any) -> Preprocessing:
    (path / "all").mkdir()
    made = load("csv", path=folder(path / "all", berlin=BERLIN, bree=BREE), **{**FIELDS, **fields})
    return federate(made, split=(1, 0, 0), normalize="federated").preprocessing


@pytest.mark.parametrize("first", ["berlin", "aachen"])  # the first file may be the one that lacks them
def test_it_is_empty_in_the_rows_of_files_that_lack_it(tmp_path: Path, first: str) -> None:
    data = load("csv", path=folder(tmp_path, berlin=BERLIN, **{first.replace("berlin", "bree"): BREE}), **FIELDS)
    x = data.x[:, [data.features.index(name) for name in ("age", "bnp", "ward=general", "ward=icu")]]
    rows = sorted([None if isnan(value) else value for value in row] for row in x.tolist())
    assert rows == [[30, None, None, None], [40, None, None, None], [50, 7, 1, 0], [70, 5, 0, 1]]
    assert data.preprocessing.optional == ("bnp", "ward")


def test_a_number_in_place_of_empty_cells_is_taken_there_too(tmp_path: Path) -> None:
    data = load("csv", path=folder(tmp_path, berlin=BERLIN, bree=BREE), **{**FIELDS, "fill": -1})
    assert data.x.tolist()[2:] == [[30, -1, -1, -1], [40, -1, -1, -1]]


def test_the_caution_about_a_client_that_never_measured_it_appears(tmp_path: Path) -> None:
    bree = "age,dead\n" + "".join(f"{20 + 3 * row % 50},{row % 2}\n" for row in range(30))
    berlin = "age,bnp,dead\n" + "".join(f"{20 + 3 * row % 50},{row * 7 % 31},{row % 2}\n" for row in range(30))
    data = load("csv", path=folder(tmp_path, berlin=berlin, bree=bree), label="dead", optional=["bnp"], fill="mean")
    said = "bnp is empty in all rows of bree: the model gets the mean over the other clients there."
    assert said in suspicions(federate(data, normalize="federated"))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"optional": ["ward", "bmp"]}, "The folder .* has no column 'bmp'.*Did you mean 'bnp'"),
        ({"fill": "error"}, 'optional .* count as empty .* fill = "mean"'),
        ({"optional": ["bnp"], "drop": ["bnp", "ward"], "categorical": None}, "optional has 'bnp', .* in drop"),
        ({"optional": ["dead"]}, "optional has 'dead', which is also in label: every row needs it"),
        ({"embed": ["ward"]}, "optional has 'ward', which is also in embed"),
        ({"optional": ["bnp"]}, r"bree\.csv has no column .ward..*optional = \[.ward.\]"),
        ({"optional": ["ward"]}, r'bree\.csv has no column .bnp.*optional = \["bnp"\].*drop = \["bnp"\]'),
    ],
)
def test_what_does_not_fit_is_explained(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        load("csv", path=folder(tmp_path, berlin=BERLIN, bree=BREE), **{**FIELDS, **fields})


def test_another_spelling_is_not_taken_for_a_column_that_is_lacking(tmp_path: Path) -> None:
    folder(tmp_path, berlin=BERLIN, bree=BREE.replace("age", "age,BNP").replace("0,", "0,3,"))
    with pytest.raises(InputError, match=r"bree\.csv has no column 'bnp', which .* optional names, but 'BNP'"):
        load("csv", path=tmp_path, **FIELDS)


def test_one_file_must_have_it(tmp_path: Path) -> None:
    assert load("csv", path=folder(tmp_path, berlin=BERLIN) / "berlin.csv", **FIELDS).features[1] == "bnp"
    with pytest.raises(InputError, match=r"The file .*bree\.csv has no column"):
        load("csv", path=folder(tmp_path, bree=BREE) / "bree.csv", **FIELDS)


@pytest.mark.parametrize("fill", ["mean", 3.0])
def test_sites_agree_on_what_one_machine_would_have_fitted(tmp_path: Path, fill: Any) -> None:
    parts = {site: summary(at_site(tmp_path, text, fill=fill)) for site, text in (("a", BREE), ("b", BERLIN))}
    agreed, one = agree(parts), whole(tmp_path, fill=fill)
    assert ({*agreed.columns}, agreed.optional) == ({*one.columns}, ("bnp", "ward"))
    for numbers in ("mean", "std"):
        here, there = (dict(zip(each.features, getattr(each, numbers), strict=True)) for each in (agreed, one))
        assert here == pytest.approx(there, rel=1e-12)
    said = "bnp is empty in all training rows of a: the model gets the mean there."
    assert (said in doubts(parts, agreed)) == (fill == "mean")


def test_a_site_that_lacks_it_prepares_rows_as_agreed(tmp_path: Path) -> None:
    agreed = agree({"b": summary(at_site(tmp_path, BERLIN)), "a": summary(at_site(tmp_path, BREE))})
    folder(tmp_path, site=BREE)
    source = Csv(path=tmp_path / "site.csv", label="dead", optional=["bnp", "ward"]).as_agreed(agreed)
    site = as_agreed(source.load(Path(), at_site=True), agreed)
    made = federate(site, clients=1, split=(1, 0, 0), normalize="federated", agreed=agreed)
    assert made.preprocessing.sha256 == agreed.sha256
    assert made.x[:, 1:].tolist() == [[0, 0, 0], [0, 0, 0]]  # the mean
    bare = Csv(path=tmp_path / "site.csv", label="dead", optional=["ward"]).as_agreed(agreed)
    with pytest.raises(InputError, match=r'only what was agreed has bnp.*set optional = \["bnp"\]'):
        as_agreed(bare.load(Path(), at_site=True), agreed)


def test_a_site_that_lacks_it_cannot_take_part_before_sites_agreed(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"lacks bnp, ward, .*`fedloom data agree`"):
        federate(at_site(tmp_path, BREE), clients=1, normalize="client")


@pytest.mark.parametrize("in_folder", [True, False])
def test_a_site_may_leave_out_a_column_that_only_others_have(tmp_path: Path, in_folder: bool) -> None:
    folder(tmp_path, bree=BREE)
    path = tmp_path if in_folder else tmp_path / "bree.csv"
    made = Csv(path=path, label="dead", drop=["ages"]).load(Path(), at_site=True)
    assert made.features == ("age",)
    (said,) = made.cautions
    assert said.startswith("[data] drop names the column 'ages', which this table lacks.")
    assert said.endswith("Did you mean 'age'?")
    with pytest.raises(InputError, match=r"has no column 'Age', which .* drop names, but 'age'"):
        Csv(path=path, label="dead", drop=["Age"]).load(Path(), at_site=True)
    with pytest.raises(InputError, match="has no column 'ages'"):  # elsewhere it is probably a mistake
        load("csv", path=path, label="dead", drop=["ages"])


def test_sites_that_cannot_agree_are_told_of_the_key(tmp_path: Path) -> None:
    plain = {"optional": None, "categorical": None}
    one, two = at_site(tmp_path, "age,bnp,dead\n1,2,0\n", **plain), at_site(tmp_path, BREE, **plain)
    with pytest.raises(InputError, match=r'only b has bnp .*optional = \["bnp"\].*drop = \["bnp"\]'):
        agree({"b": summary(one), "a": summary(two)})
    spelt = at_site(tmp_path, "Age,dead\n1,0\n2,1\n", **plain)
    with pytest.raises(InputError, match=r"Spell names alike at all sites: age and Age\.$"):
        agree({"a": summary(two), "c": summary(spelt)})
    nobody = at_site(tmp_path, BREE, optional=["bpn"], categorical=None)
    with pytest.raises(InputError, match="No site has the column 'bpn', which is optional at c"):
        agree({"a": summary(two), "c": summary(nobody)})
    numbers = at_site(tmp_path, "age,ward,dead\n1,2,0\n", categorical=None)
    lacking, words = summary(at_site(tmp_path, BREE)), summary(at_site(tmp_path, BERLIN))
    with pytest.raises(InputError, match=r"b and c differ in the columns: .*ward \(categories\).*ward \(numbers\)"):
        agree({"a": lacking, "b": words, "c": summary(numbers)})


def test_files_without_the_key_keep_their_identity() -> None:
    described = parse({"data": {"source": "csv", "path": "a.csv", "label": "y"}}).description()
    assert "optional" not in described["data"]
    other = parse({"data": {"source": "csv", "path": "a.csv", "label": "y", "optional": ["bnp"]}}).description()
    assert identity(described) != identity(other)


def test_an_empty_list_takes_back_what_a_file_says() -> None:
    assert Csv(path=Path("x.csv"), label="y", optional=[]).optional is None  # type: ignore[arg-type]
