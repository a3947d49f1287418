from __future__ import annotations

import io
import re
from math import isnan, nan

import numpy as np
import pytest

from fedloom.data.csv_text import CsvText, Marks, cell_advice, column_advice, finite_number, numbers
from fedloom.errors import InputError


def test_an_underscore_makes_no_number() -> None:
    assert finite_number("1_000") is None
    with pytest.raises(InputError, match=r"'1_000' in column 'a'.*has separators between thousands"):
        numbers(["2", "1_000"], "a", lambda at: f"Line {at}", {})


def opened(text: str, **settings: object) -> CsvText:
    return CsvText.open(io.StringIO(text, newline=""), "data.csv", **settings)  # type: ignore[arg-type]


def where(at: int) -> str:
    return f"Row {at}"


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_the_character_between_columns_is_recognised(delimiter: str) -> None:
    table = opened(f"a{delimiter}b\n1{delimiter}2\n")
    assert (table.header, table.delimiter, table.comma_is_decimal) == (["a", "b"], delimiter, delimiter != ",")
    assert list(table.blocks()) == [([2], {"a": ("1",), "b": ("2",)})]


def test_a_delimiter_that_is_given_counts() -> None:
    assert opened("a;b;c,d\n", delimiter=",").header == ["a;b;c", "d"]
    assert opened("a;b;c,d\n").header == ["a", "b", "c,d"]


def test_blank_lines_are_left_out_and_short_ones_refused() -> None:
    assert list(opened("a,b\n1,2\n\n3,4\n").blocks()) == [([2, 4], {"a": ("1", "3"), "b": ("2", "4")})]
    with pytest.raises(InputError, match=r"^Line 3 of data\.csv has 1 cells, but there are 2 columns\. Correct it\.$"):
        list(opened("a,b\n1,2\n3\n").blocks())


def test_an_umlaut_is_one_character() -> None:
    table = opened('ja\u0308hr;b\n"u\u0308\nü";1\n;2\nK;ö\n\u037e;o\u0308\n')
    assert table.header == ["jähr", "b"]
    expected = {"jähr": ("ü\nü", "", "K", ";"), "b": ("1", "2", "ö", "ö")}
    assert list(table.blocks()) == [([3, 4, 5, 6], expected)]  # what becomes a ; is no end of a cell
    with pytest.raises(InputError, match="two columns 'ö'"):
        opened("ö,o\u0308\n")


def test_decimal_commas_are_numbers_where_commas_do_not_separate_columns() -> None:
    assert numbers(["3,5", "-0,25", "4"], "crp", where, {}, True).tolist() == [3.5, -0.25, 4.0]
    with pytest.raises(InputError, match=r"Row 0 has '3,5' in column 'crp', which is not a finite number"):
        numbers(["3,5"], "crp", where, {})


@pytest.mark.parametrize("cell", ["1.5", "1.234,5", "1,234,5", "3,"])
def test_a_column_has_one_kind_of_decimals(cell: str) -> None:
    with pytest.raises(
        InputError, match="Row 1 has .*" + ("where other cells have decimal commas" if "." in cell else "")
    ):
        numbers(["3,5", cell], "crp", where, {}, True)


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ("2.5", "Write 2,5 there."),
        ("1.234", "Write 1,234 if the point is for decimals, or 1234 if it is between thousands."),
        ("1.234.567", "Write 1234567 if it is between thousands."),
        ("1.234,5", "Write 1234,5 there."),
        ("v1.2", 'If it means "missing"'),
    ],
)
def test_a_point_among_decimal_commas_is_corrected(cell: str, said: str) -> None:
    with pytest.raises(InputError) as caught:
        numbers(["3,5", cell], "crp", where, {}, True)
    assert f"where other cells have decimal commas. {said}" in str(caught.value)


def test_marks_stand_for_numbers_or_missing_values() -> None:
    found = numbers(["?", "", " ? ", "2"], "crp", where, {"?": nan, "": 7.0}).tolist()
    assert [isnan(value) for value in found] == [True, False, True, False]
    assert (found[1], found[3]) == (7.0, 2.0)


@pytest.mark.parametrize("cell", ["-999", "-999.0", " -999 ", "-9.99e2"])
def test_a_mark_that_is_a_number_is_found_however_it_is_written(cell: str) -> None:
    found = numbers([cell, "", "-999.00"], "crp", where, {"-999.00": 3.0, "-999": nan, "": -999.0}).tolist()
    assert isnan(found[0])
    assert found[1:] == [-999.0, 3.0]  # what cells mean is not looked up again, and the same text comes first
    assert isnan(numbers([cell, "3,5"], "crp", where, {"-999": nan}, True)[0])


@pytest.mark.parametrize(("mark", "cell"), [("-99,9", "-99.9"), ("-99.9", "-99,90"), ("-99,9", "-99,9")])
def test_a_mark_may_have_a_decimal_comma(mark: str, cell: str) -> None:
    assert isnan(numbers([cell, "3"], "crp", where, {mark: nan}, True)[0])


def test_a_mark_with_thousands_is_not_taken_for_a_small_number() -> None:
    assert numbers(["1", "1.0"], "crp", where, {"1,000": nan}).tolist() == [1.0, 1.0]
    assert isnan(numbers(["1", "3"], "crp", where, {"1,000": nan}, True)[0])


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ("2024-03-31", "looks like a date.*age in years or days since admission.*drop = "),
        ("31.03.2024", "looks like a date"),
        ("3/31/24 14:05", "looks like a date"),
        ("10-Mar-2020", "looks like a date"),
        ("10 March 2020", "looks like a date"),
        ("3. Mai 2020", "looks like a date"),
        ("Mar 10, 2020", "looks like a date"),
        ("10MAR2020 08:15", "looks like a date"),
        ("2020-Dec-24", "looks like a date"),
        ("24-12-2020", "looks like a date"),
        ("2020/12/24", "looks like a date"),
        ("3 marks", "categorical"),
        ("yes", r"looks like yes or no: set categorical = \[\"x\"\]"),
        ("True", "looks like yes or no"),
        ("icu", r"missing = \{ \"icu\" = nan \}.*categorical = \[\"x\"\].*group = \"x\"; .*drop = \[\"x\"\]"),
        ("", r'Set fill = "zero" or a number, or fill = "mean" beside normalize = "federated" or "client"; or'),
        ("12.5%", "without the % sign"),
        ("1,000", "separators between thousands"),
        ("1 234 567.5", "separators between thousands"),
        ("12,34", r"Write 12\.34, with a decimal point"),
    ],
)
def test_the_advice_fits_the_cell(cell: str, said: str) -> None:
    with pytest.raises(InputError, match=f"Row 0 has .*{said}"):
        numbers([cell], "x", where, {})
    assert cell_advice(cell, "x")


def test_an_empty_file_is_called_empty() -> None:
    with pytest.raises(InputError, match=r"The file data\.csv is empty\."):
        opened("")


@pytest.mark.parametrize(
    ("cells", "asked", "offered"),
    [(["ann", "ben"] * 3, True, True), (["ann", "ben"] * 3, False, False), (["ann", "ben", "cid"], True, False)],
)
def test_a_column_of_few_texts_may_name_the_clients(cells: list[str], asked: bool, offered: bool) -> None:
    with pytest.raises(InputError) as refused:
        numbers(cells, "person", lambda at: f"Line {at}", {}, may_be_clients=asked)
    assert ('set client = "person". If it means' in str(refused.value)) is offered


def test_a_mark_with_decimals_is_found_in_single_precision() -> None:
    marks = Marks({"-99.9": 0.0})
    assert marks.of_number(float(np.float32(-99.9))) == marks.of_number(-99.9) == 0.0
    assert marks.get("-99.90") == 0.0
    assert marks.of_number(-99.91) == -99.91


@pytest.mark.parametrize(
    ("cells", "marks", "identifies", "said"),
    [
        (["1", "", "3"], {}, False, "^empty cells: fill"),
        (["1,5", "1.5", "3"], {"": 0.0}, False, "^numbers with commas"),
        (["2026-11-17", "", "2026-11-18"], {}, False, r"^dates: .*drop = \[.day.\]$"),
        (["P1", "P2", "P3"], {}, True, "^an identifier: drop = .*group"),
        (["1", "2", "NA"], {}, False, 'missing = { "NA" = nan }'),
        (["1", "2", "-", "", "3", "?"], {"?": nan}, False, 'missing = { "-" = nan }.*and fill'),
        (["f", "m", "f", "f"], {}, False, "^categories: categorical"),
        (["yes", "no"], {}, False, "^categories: categorical"),
        (["a lot", "some words", "a few"], {}, False, "^texts: drop"),
        (["5 %", "6 %"], {}, False, "write them as"),
    ],
)
def test_the_advice_about_a_column_fits_what_it_holds(
    cells: list[str], marks: dict[str, float], identifies: bool, said: str
) -> None:
    assert re.search(said, column_advice("day", cells, marks, identifies))
