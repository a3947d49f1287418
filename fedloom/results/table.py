"""A table with a note under it, as CSV, Markdown and LaTeX."""

from __future__ import annotations

import csv
import io
import math
import textwrap
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedloom.results.safe_text import for_latex, for_spreadsheet, visible

Value = str | int | float | None
# row → field of Stats
STATISTICS = {"Average": "mean", "Standard deviation": "std", "Lowest": "low", "Highest": "high"}
MOST_DECIMALS = 8  # a number that needs more has an exponent
MOST_PRINTED = 2000  # a table with more rows is written only as CSV
WIDE = 16  # letters of a column's name in one line of a paper

LATEX = Path(__file__).parent / "templates" / "table.tex"


@dataclass(frozen=True)
class Table:
    """Rows of values, how to show each column, and a note that explains them."""

    name: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Value, ...], ...]
    kinds: tuple[str, ...]  # how to show each column: text, or one of the kinds that `show` knows
    note: str = ""
    paper_note: str = ""  # what LaTeX has instead of a note that is too long for a paper
    numbers: Table | None = None  # what programs read instead of a table whose cells are texts
    findings: tuple[str, ...] = ()  # what people should not have to find in the rows, a sentence each

    @property
    def for_programs(self) -> Table:
        """The table with a number in each cell."""
        return self.numbers or self

    def csv(self) -> str:
        """The table as CSV, with all digits of every number."""
        out, table = io.StringIO(), self.for_programs
        writer = csv.writer(out, lineterminator="\n")
        for row in (table.columns, *table.rows):
            writer.writerow(["" if missing(value) else for_spreadsheet(value) for value in row])
        return out.getvalue()

    def markdown(self) -> str:
        """The table as Markdown, for a README or an issue."""

        def line(cells: Sequence[str]) -> str:
            return "| " + " | ".join(visible(cell).replace("|", "\\|") for cell in cells) + " |"

        marks = ["---" if kind == "text" else "---:" for kind in self.kinds]
        findings = [*(f"- {visible(finding)}" for finding in self.findings), ""] if self.findings else []
        rows = [line(self.columns), line(marks), *(line(self.shown(row)) for row in self.rows)]
        return "\n".join([f"**{self.title}**", "", *findings, *rows, "", self.note, ""])

    def latex(self) -> str:
        """The table as a LaTeX table environment that uses the booktabs package."""
        align = "".join("l" if kind == "text" else "r" for kind in self.kinds)
        heads = [for_latex(name) if len(name) <= WIDE else _stacked(name) for name in self.columns]
        head, *body = (
            " & ".join(row) + r" \\" for row in (heads, *(map(for_latex, self.shown(row)) for row in self.rows))
        )
        title, note = f"{for_latex(self.title)}.", for_latex(" ".join([*self.findings, self.paper_note or self.note]))
        # below the table: the list of tables of a paper shows captions, and a note may be long
        below = f"\n  \\par\\smallskip\n  \\parbox{{\\linewidth}}{{\\footnotesize {note}}}" if note else ""
        return LATEX.read_text(encoding="utf-8").format(
            caption=title,
            name=self.name.replace("_", "-"),
            align=align,
            head=head,
            body="\n    ".join(body),
            note=below,
        )

    def shown(self, row: Sequence[Value]) -> list[str]:
        """A row as text, rounded for people."""
        spread = bool(row) and row[0] == "Standard deviation"  # which is in points if values are in per cent
        return [
            show(value, "deviation" if spread and kind == "percent" else kind)
            for value, kind in zip(row, self.kinds, strict=True)
        ]


def _stacked(name: str) -> str:
    """A column's name for LaTeX in several lines, because the names of all columns must fit on a page."""
    lines = map(for_latex, textwrap.wrap(name, WIDE, break_long_words=False))
    return r"\shortstack[r]{" + r" \\ ".join(lines) + "}"


def with_column(table: Table, title: str, values: Sequence[Value], kind: str) -> Table:
    """The table with one more column after its first."""
    (first, *titles), (text, *kinds) = table.columns, table.kinds
    rows = tuple((label, value, *row) for (label, *row), value in zip(table.rows, values, strict=True))
    return replace(table, columns=(first, title, *titles), kinds=(text, kind, *kinds), rows=rows)


def from_to(counts: Collection[int]) -> int | str | None:
    """The one count, or the smallest and the largest of several.

    >>> from_to([3, 3]), from_to([4, 1, 2]), from_to([])
    (3, '1 to 4', None)
    """
    if not counts:
        return None
    least, most = min(counts), max(counts)
    return least if least == most else f"{least} to {most}"


def missing(value: Value) -> bool:
    """Whether a value is None or NaN."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def two_digits(value: float) -> str:
    """Return a number rounded to two digits, written without an exponent where people would not write one.

    >>> two_digits(123.4), two_digits(0.0456)
    ('120', '0.046')
    """
    return f"{float(f'{value:.2g}'):g}"


def with_half(mean: float, half: float) -> str:
    """Return a mean and half of its interval with the same decimals: as many as the mean needs for four digits.

    >>> with_half(0.402, 0.02737), with_half(12.5, 3.0), with_half(0.0, 0.0001), with_half(1e-12, 2e-12)
    ('0.4020 ± 0.0274', '12.50 ± 3.00', '0.0000000 ± 0.0001000', '1.000e-12 ± 2.000e-12')
    """
    largest = abs(mean) or half
    decimals = 3 - math.floor(math.log10(largest)) if largest else 3
    if not -3 <= decimals <= MOST_DECIMALS:
        return f"{mean:.3e} ± {half:.3e}"
    return f"{mean:.{max(decimals, 0)}f} ± {half:.{max(decimals, 0)}f}"


def show(value: Value, kind: str) -> str:
    """A value as text, rounded for people.

    >>> show(0.9731, "percent"), show(0.0123, "points"), show(1234567, "bytes"), show(None, "number")
    ('97.31 %', '+1.23', '1.23 MB', '–')
    """
    if missing(value):
        return "–"
    if isinstance(value, str):
        return value
    assert value is not None
    if kind == "bytes":
        for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
            if value >= size:
                return f"{value / size:.2f} {unit}"
    formats: dict[str, Callable[[float], str]] = {  # + 0.0 makes −0 to 0
        "percent": lambda v: f"{100 * v:.2f} %".replace("-", "−"),
        "deviation": lambda v: f"{100 * v:.2f}",
        "points": lambda v: f"{round(100 * v, 2) + 0.0:+.2f}".replace("-", "−"),
        "difference": lambda v: f"{v:+.4g}".replace("-", "−"),
        "p": lambda v: f"{v:.3f}" if v >= 0.001 else "< 0.001",
        "whole": lambda v: f"{v:,.0f}",
        "bytes": lambda v: f"{v:.0f} B",
        "seconds": lambda v: f"{v:.3g} s" if v < 100 else f"{v / 60:.1f} min",
        "factor": lambda v: f"{v:.2f} ×",
        "short": lambda v: f"{v:.2f}".replace("-", "−"),
    }
    return formats[kind](float(value)) if kind in formats else f"{float(value):.4g}"


def write(found: Sequence[Table], folder: Path) -> list[Path]:
    """Write tables as CSV, Markdown and LaTeX files, and return the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for table in found:
        formats = {"csv": table.csv, "md": table.markdown, "tex": table.latex}
        for ending, text in formats.items():
            if ending == "csv" or len(table.rows) <= MOST_PRINTED:
                path = folder / f"{table.name}.{ending}"
                path.write_text(text(), encoding="utf-8")
                written.append(path)
    return written
