"""Text that others chose reaches spreadsheets, LaTeX and readers as text."""

from __future__ import annotations

import csv
import io
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom.results.export import export_csv
from fedloom.results.report_warnings import cautions
from fedloom.results.result import Result
from fedloom.results.run_data import RunData
from fedloom.results.safe_text import appearance, distinct_names, for_latex, for_spreadsheet, visible
from fedloom.results.table import Table
from tests.results.helpers import named

# mostly the signs that mean something to a spreadsheet or to LaTeX
TEXTS = st.text(st.one_of(st.sampled_from("=+-@\t\r\n;,|'\" \\{}$&#_%^~[*a1＝\u202e\u200b\ufeff"), st.characters()))


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ("=cmd|' /C calc'!A0", "'=cmd|' /C calc'!A0"),
        ("+1+1", "'+1+1"),
        ("-2+3", "'-2+3"),
        ("@SUM(A1)", "'@SUM(A1)"),
        ("\tx", "'\tx"),
        ("\r=1", "'\r'=1"),
        ("  =1", "'  =1"),
        ("\ufeff=1", "'\ufeff=1"),
        ("＝1", "'＝1"),
        ("a;=1+1", "a;'=1+1"),  # where a spreadsheet expects semicolons, the second half is a cell of its own
        ("a\n=1", "a\n'=1"),
        ("-0.5", "-0.5"),
        ("+1e-05", "+1e-05"),
        ("north-east", "north-east"),
        ("a=b", "a=b"),
        ("", ""),
    ],
)
def test_a_spreadsheet_gets_formulas_as_text_and_other_text_as_it_is(text: str, cell: str) -> None:
    assert for_spreadsheet(text) == cell


@pytest.mark.parametrize("value", [-0.5, -3, None, True, b"=1"])
def test_values_that_are_not_text_stay_as_they_are(value: object) -> None:
    assert for_spreadsheet(value) is value


@given(TEXTS, st.sampled_from(",;\t|"))
def test_no_cell_that_a_spreadsheet_reads_begins_like_a_formula(text: str, separator: str) -> None:
    written = Table("t", "T", ("name", text), ((text, -1.5),), ("text", "number")).csv()
    (head, row) = csv.reader(io.StringIO(written, newline=""))
    assert row[1] == "-1.5"
    assert [head[1].replace("'", ""), row[0].replace("'", "")] == [text.replace("'", "")] * 2
    # a spreadsheet may also split at another separator, and at line ends inside quotes
    for cell in re.split(rf"[{re.escape(separator)}\r\n]", row[0]):
        bare = re.sub(r"^[\s\u200b\u200e\u200f\ufeff]+", "", cell)
        number = re.fullmatch(r"[+-]?[0-9]+(\.[0-9]*)?(e[+-]?[0-9]+)?", row[0], re.IGNORECASE)
        assert number or not bare.startswith(("=", "+", "-", "@", "＝", "＋", "－", "＠"))


def test_latex_gets_every_special_character_escaped() -> None:
    assert for_latex("a_b & 5 % of $x^{2}$ ~ #1") == (
        r"a\_b \& 5\,\% of \$x\textasciicircum{}\{2\}\$ \textasciitilde{} \#1"
    )
    assert for_latex(r"\input{/etc/passwd}") == r"\textbackslash{}input\{/etc/passwd\}"
    assert for_latex("[1cm]*") == "{[}1cm]{*}"
    assert for_latex("p < 0.001, −1") == "p $<$ 0.001, $-$1"
    assert for_latex("a\n\nb\u202e") == r"a\textbackslash{}n\textbackslash{}nb\textbackslash{}u202e"


OWN = re.compile(
    r"\\[&%$#_{},]|\\text(backslash|asciitilde|asciicircum)\{\}|\{[\[*]\}|\$(<|>|-|\^2|\\times|\\leq|\\Sigma)\$"
)


@given(TEXTS)
def test_nothing_in_latex_is_special_except_what_the_escaping_wrote(text: str) -> None:
    rest = OWN.sub("", for_latex(text))
    assert not set(rest) & set("\\{}$&#_%^~[*")
    assert rest.isprintable() or not any(sign in rest for sign in "\0\t\r\n\u2028\u2029")


def test_a_row_that_begins_with_a_bracket_is_no_argument_of_the_row_before() -> None:
    latex = Table("t", "T", ("client",), (("[5em] a",), ("*b",)), ("text",)).latex()
    assert "    {[}5em] a \\\\\n    {*}b \\\\\n" in latex


def test_hidden_characters_are_written_as_their_numbers() -> None:
    assert visible("a\u202eb\u200b\x1b[2J\n") == r"a\u202eb\u200b\x1b[2J\n"
    assert visible("Zürich 北 “x” −1") == "Zürich 北 “x” −1"


@pytest.mark.parametrize(
    "other",
    [
        "Kerry",
        "kerry ",
        "k erry",
        "ker\u200bry",
        "\u202ekerry",
        "\u212aerry",
        "ｋｅｒｒｙ",
        "k\u0435rr\u0443",
        "kerry\x07",
    ],
)
def test_names_that_look_alike_have_the_same_appearance(other: str) -> None:
    assert appearance(other) == appearance("kerry")
    first, second = distinct_names(["kerry", other])
    assert first == "kerry [client 0]"
    assert second == f"{ascii(other)[1:-1]} [client 1]"


def test_other_names_stay_as_they_are() -> None:
    names = ["kerry", "cork", "Zürich", "Zurich", "client-1", "client-11"]
    assert distinct_names(names) == names
    assert distinct_names(["Average", "a"], taken=["average"]) == ["Average [client 0]", "a"]


@given(st.lists(TEXTS, max_size=6))
def test_marked_names_differ_for_readers(names: list[str]) -> None:
    marked = distinct_names(names)
    assert len(set(marked)) == len(names)
    assert not any(sign in name for name in marked for sign in "\u202e\u200b\n\x1b")


def with_names(run: RunData, *names: str) -> RunData:
    rows = [{**row, "name": name} for row, name in zip(run.clients, names, strict=True)]
    return replace(run, clients=tuple(rows), _read={})


def test_tables_mark_clients_that_imitate_others_and_a_caution_says_so(run: RunData) -> None:
    imitated = with_names(run, "kerry", "cork", "k\u0435rry", "Highest")
    expected = ["kerry [client 0]", "cork", r"k\u0435rry [client 2]", "Highest [client 3]"]
    assert [row[0] for row in named(imitated, "clients_accuracy").rows] == expected
    assert [row[0] for row in named(imitated, "universal_test_accuracy").rows][:4] == expected
    assert {row[2] for row in named(imitated, "user_stats_accuracy").rows} >= set(expected)
    (caution,) = (text for text in cautions(imitated) if "imitates" in text)
    assert caution.startswith(r"kerry [client 0], k\u0435rry [client 2], Highest [client 3]: names that look like")
    assert not any("imitates" in text for text in cautions(run))


def test_an_exported_database_has_no_formulas(comparison: Path, tmp_path: Path) -> None:
    import sqlite3

    folder = tmp_path / "run"
    shutil.copytree(comparison, folder)
    (database,) = folder.glob("*.db")
    with sqlite3.connect(database) as changed:
        changed.execute("UPDATE clients SET name = '=1+1' WHERE client = 0")
    changed.close()
    for path in export_csv(Result.read(folder), tmp_path):
        with open(path, newline="") as file:
            cells = {cell for row in csv.reader(file) for cell in row}
        assert not {cell for cell in cells if cell.startswith("=")}
        assert ("'=1+1" in cells) == (path.stem in ("clients", "participants", "public", "history")), path
