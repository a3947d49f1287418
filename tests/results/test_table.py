"""A table in every format."""

from __future__ import annotations

import csv
from pathlib import Path

from fedloom.results.run_data import RunData
from fedloom.results.table import MOST_PRINTED, Table, show, write
from fedloom.results.tables import all_tables

ROWS = (("a_b|c", 0.5, None), ("Standard deviation", 0.02, float("nan")))
TABLE = Table("t", "T & co", ("", "x", "seeds"), ROWS, ("text", "percent", "whole"), "10 % of “all”.")


def test_csv_has_all_digits_and_nothing_where_nothing_is_known() -> None:
    assert TABLE.csv() == ",x,seeds\na_b|c,0.5,\nStandard deviation,0.02,\n"


def test_markdown_escapes_bars_and_aligns_numbers() -> None:
    assert TABLE.markdown().splitlines() == [
        "**T & co**",
        "",
        "|  | x | seeds |",
        "| --- | ---: | ---: |",
        r"| a_b\|c | 50.00 % | – |",
        "| Standard deviation | 2.00 | – |",  # points: the deviation of percentages is not one
        "",
        "10 % of “all”.",
    ]


def test_latex_escapes_what_latex_reads_as_commands() -> None:
    text = TABLE.latex()
    assert text.startswith("\\begin{table}\n  \\centering\n  \\caption{T \\& co.}\n")
    assert r"    a\_b|c & 50.00\,\% & -- \\" in text
    note = "\\par\\smallskip\n  \\parbox{\\linewidth}{\\footnotesize 10\\,\\% of ``all''.}"  # a caption stays short
    assert text.endswith(f"    \\bottomrule\n  \\end{{tabular}}\n  {note}\n\\end{{table}}\n")


def test_values_are_rounded_for_people() -> None:
    assert show(float("nan"), "percent") == "–"
    assert show(0.00004, "p") == "< 0.001"
    assert show(-0.012, "points") == "−1.20"
    assert show(-1e-9, "points") == "+0.00"
    assert [show(value, "bytes") for value in (12, 1500, 2.5e9)] == ["12 B", "1.50 kB", "2.50 GB"]
    assert [show(value, "seconds") for value in (1.234, 150)] == ["1.23 s", "2.5 min"]
    assert show(1234567, "whole") == "1,234,567"
    assert show(0.123456, "number") == "0.1235"


def test_a_table_with_many_rows_is_written_only_as_csv(tmp_path: Path) -> None:
    long = Table("long", "L", ("n",), tuple((n,) for n in range(MOST_PRINTED + 1)), ("whole",))
    assert [path.name for path in write([TABLE, long], tmp_path)] == ["t.csv", "t.md", "t.tex", "long.csv"]


def test_every_table_is_written_three_ways_and_the_csv_can_be_read_back(run: RunData, tmp_path: Path) -> None:
    written = write(all_tables(run), tmp_path)
    names = {path.stem for path in written}
    assert {"summary_accuracy_pre_fit", "summary_loss_post_fit", "universal_test_accuracy"} <= names
    assert {"round_stats_accuracy", "user_stats_loss", "differences", "target_accuracy", "fairness"} <= names
    assert len(written) == 3 * len(names)
    for table in (one.for_programs for one in all_tables(run)):
        with open(tmp_path / f"{table.name}.csv", newline="") as file:
            head, *body = csv.reader(file)
        assert tuple(head) == table.columns
        assert len(body) == len(table.rows)
        assert all(len(row) == len(table.columns) == len(table.kinds) for row in (*body, *table.rows))
        assert table.note.endswith(".")  # a sentence under every table
        latex = (tmp_path / f"{table.name}.tex").read_text()
        assert latex.count("\\\\\n") == len(table.rows) + 1
        assert rf"\label{{tab:{table.name.replace('_', '-')}}}" in latex
        assert "_" not in latex.replace(r"\_", "")
