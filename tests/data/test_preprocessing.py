from __future__ import annotations

import json
from math import inf, isnan, nan
from pathlib import Path

import numpy as np
import pytest
import torch

from fedloom.data.agreement import Summary
from fedloom.data.preprocessing import Column, Preprocessing, categories, numbers_first
from fedloom.errors import InputError

WARD = Column(name="ward", categories=("icu", "surgery"))
TABLE = Preprocessing(columns=(Column(name="age"), WARD), marks={"": nan}, shape=(3,))


def where(at: int) -> str:
    return f"Row {at}"


def test_a_category_becomes_one_feature_for_each_or_its_number() -> None:
    assert WARD.features == ("ward=icu", "ward=surgery")
    assert WARD.codes(["surgery", " icu "], where, {}).tolist() == [[0, 1], [1, 0]]
    embedded = WARD.replace(embedded=True)
    assert embedded.features == ("ward",)
    assert embedded.codes(["surgery", "icu"], where, {}).tolist() == [[1], [0]]


def test_a_number_is_one_category_however_it_is_written() -> None:
    assert categories(["2", "1.0", "10", "1"], {}) == ("1", "2", "10")
    assert Column(name="code", categories=("1", "2")).codes(["1.0"], where, {}).tolist() == [[1, 0]]


def test_nan_and_infinity_are_texts_so_that_the_order_of_categories_never_depends_on_that_of_rows() -> None:
    for cells in (["nan", "3", "1", "INF"], ["3", "nan", "INF", "1"], ["1", "INF", "3", "nan"]):
        assert categories(cells, {}) == ("1", "3", "INF", "nan")
    assert sorted(["3", "nan", "1"], key=numbers_first) == ["1", "3", "nan"]


@pytest.mark.parametrize("value", [nan, 0.0])
def test_a_missing_value_of_an_embedded_column_is_refused(value: float) -> None:
    with pytest.raises(InputError, match=r"^Row 1 has a missing value in column 'ward', which is embedded.*'unknown'"):
        WARD.replace(embedded=True).codes(["icu", "?"], where, {"?": value})


def test_a_category_may_have_a_decimal_comma() -> None:
    grades = Preprocessing(columns=(Column(name="grade", categories=("1.5", "2")),), shape=(2,))
    assert grades.encode({"grade": ["2", "1,5"]}, where, comma_is_decimal=True).tolist() == [[0, 1], [1, 0]]


def test_another_word_for_yes_or_no_is_recognised() -> None:
    column = Column(name="smoker", categories=("False", "True"))
    for cell, meant in (("1", "True"), ("0", "False"), ("YES", "True")):
        with pytest.raises(InputError, match=f"has '{cell}' in column 'smoker', .* Did you mean '{meant}'"):
            column.codes([cell], "Row {}".format, {})


def test_an_unknown_category_is_named_and_a_missing_one_has_its_mark() -> None:
    with pytest.raises(InputError, match=r"^Row 1 has 'icv' in column 'ward', whose categories are icu, surgery\. Did"):
        WARD.codes(["icu", "icv"], where, {})
    assert np.isnan(WARD.codes([""], where, {"": nan})).all()


def test_rows_are_encoded_in_the_order_of_training() -> None:
    x = TABLE.encode(
        {"ward": ["icu", "surgery"], "id": ["a", "b"], "age": ["70", "33,5"]}, where, comma_is_decimal=True
    )
    assert x.tolist() == [[70, 1, 0], [33.5, 0, 1]]


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"ages": ["1"], "ward": ["icu"]}, r"^The table lacks the column age\. Did you mean 'ages'"),
        ({"x": ["1"]}, "^The table lacks the columns age, ward"),
        (
            {"Age ": ["1"], "WARD": ["icu"]},
            "lacks the columns age, ward.*capitals .*: 'age' instead of 'Age ', 'ward' instead of 'WARD'",
        ),
        ({"x": ["1"], "WARD": ["icu"]}, r"lacks the columns age, ward\. Did you mean 'WARD'"),
        ({"age": ["1"], "wards": ["icu"], "ages": ["1"]}, r"^The table lacks the column ward\. Did you mean 'wards'"),
        ({"age": ["old"], "ward": ["icu"]}, "Row 0 has 'old' in column 'age'"),
    ],
)
def test_a_table_that_does_not_fit_is_explained(table: dict[str, list[str]], said: str) -> None:
    with pytest.raises(InputError, match=said):
        TABLE.encode(table, where)


def test_a_feature_that_is_there_is_not_offered_for_one_that_is_missing() -> None:
    pressures = TABLE.model_copy(update={"columns": tuple(Column(name=name) for name in ("sbp", "dbp"))})
    with pytest.raises(InputError, match=r"^The table lacks the column sbp\.$"):
        pressures.encode({"dbp": ["80"]}, where)


def test_examples_that_are_not_rows_need_an_array() -> None:
    with pytest.raises(InputError, match=r"takes examples of shape \[28, 28\], not rows"):
        Preprocessing(shape=(28, 28)).encode({"a": ["1"]}, where)


def test_a_text_becomes_its_last_words_with_padding_in_front() -> None:
    made = Preprocessing(words=3, classes=("<PAD>", "<UNK>", "to", "be"))
    tokens = made.encode({"text": ["To be, or to be", "To", ""]}, where)
    assert tokens.tolist() == [[0, 2, 3], [0, 0, 2], [0, 0, 0]]
    with pytest.raises(InputError, match="needs a column 'text'"):
        made.encode({"words": ["to"]}, where)


def test_the_file_keeps_every_bit(tmp_path: Path) -> None:
    made = TABLE.replace(
        mean=(0.1, nan, 1 / 3), std=(1.0, inf, 2.0), clients={"a": ((1.0,), (2.0,))}, target=(1.0, 2.0)
    )
    made.write(tmp_path / "p.json")
    again = Preprocessing.read(tmp_path / "p.json")
    assert repr(again) == repr(made)
    (tmp_path / "p.json").write_text('{"columns": 3}')
    with pytest.raises(InputError, match="columns"):
        Preprocessing.read(tmp_path / "p.json")
    (tmp_path / "p.json").write_text("{")
    with pytest.raises(InputError, match=r"p\.json cannot be read as preprocessing"):
        Preprocessing.read(tmp_path / "p.json")


def test_statistics_are_of_all_clients_or_of_one() -> None:
    assert TABLE.statistics() is None
    found = Preprocessing(shape=(2,), mean=(1.0, 2.0), std=(3.0, 4.0)).statistics("anybody")
    assert found is not None
    assert torch.stack(found).tolist() == [[1.0, 2.0], [3.0, 4.0]]
    own = Preprocessing(shape=(1,), clients={"berlin": ((5.0,), (6.0,))})
    assert [part.item() for part in own.statistics("berlin") or ()] == [5.0, 6.0]
    with pytest.raises(InputError, match=r"Say whose to use\. Known: berlin\."):
        own.statistics()


def test_sites_that_prepare_rows_in_the_same_way_have_the_same_hash() -> None:
    agreed = TABLE.replace(mean=(1.0, 0.0, 0.0), std=(1.0, 1.0, 1.0), target=(5.0, 2.0))
    for used in (agreed, TABLE, TABLE.replace(target=(5.0, 2.0)), agreed.replace(target=None)):
        assert repr(agreed.as_used(used.sha256)) == repr(used)
    for other in (TABLE.replace(clients={"a": ((1.0,), (1.0,))}), TABLE.replace(columns=(Column(name="age"),))):
        assert agreed.as_used(other.sha256) is None
    assert Preprocessing().sha256 == ""


def test_the_file_is_json_for_every_reader(tmp_path: Path) -> None:
    made = Preprocessing(columns=(Column(name="x"),), marks={"": nan}, mean=(0.0,), std=(inf,))
    made.write(tmp_path / "preprocessing.json")
    json.loads((tmp_path / "preprocessing.json").read_text(), parse_constant=pytest.fail)  # no NaN, no Infinity
    read = Preprocessing.read(tmp_path / "preprocessing.json")
    assert isnan(read.marks[""])
    assert (read.std, read.sha256) == ((inf,), made.sha256)


def test_keys_that_earlier_versions_do_not_know_are_written_only_if_they_say_something(tmp_path: Path) -> None:
    path, new = tmp_path / "agreed.json", {"optional": ("bnp",), "doubts": ("a unit",), "convert": {"crp": {"": 0.1}}}
    TABLE.write(path)
    assert not new.keys() & json.loads(path.read_text()).keys()
    assert repr(Preprocessing.read(path)) == repr(TABLE)
    told = TABLE.replace(**new)
    told.write(path)
    assert new.keys() <= json.loads(path.read_text()).keys()
    assert repr(Preprocessing.read(path)) == repr(told)
    summary = Summary(columns=(), marks={}, label=("y",), classes=(), features={})
    summary.write(path)
    assert "optional" not in json.loads(path.read_text())
    assert repr(Summary.read(path)) == repr(summary)
