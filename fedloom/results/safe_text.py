"""Text that other people chose, such as the names of clients, made safe for spreadsheets, LaTeX and readers."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")
NUMBER = re.compile(r"[+-]?\d+(\.\d*)?(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
# Where a spreadsheet may see a cell begin, even if it splits at other separators than commas: before the signs, in both
# widths, that make it read the cell as a formula.
FORMULA = re.compile(r"(?:^|(?<=[,;|\t\r\n]))(?=[\s\x00-\x1f\u200b-\u200f\u2060\ufeff\"']*[=+\-@＝＋－＠])|^(?=[\t\r])")

LATEX = str.maketrans(
    {
        **{sign: f"\\{sign}" for sign in "&%$#_{}"},
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": "$<$",
        ">": "$>$",
        "[": "{[}",  # at the beginning of a row, LaTeX would read [ or * as an argument of the \\ before it
        "*": "{*}",
        "−": "$-$",
        "×": r"$\times$",
        "≤": r"$\leq$",
        "²": "$^2$",
        "Σ": r"$\Sigma$",
        "–": "--",
        "“": "``",
        "”": "''",
        "’": "'",
    }
)

# Cyrillic and Greek letters that look like Latin ones
LOOKALIKES = str.maketrans("авеікмнорстухѕјԁһԛԝαβεικνορτυχ", "abeikmhopctyxsjdhqwabeikvoptux")
LONGEST = 2000  # characters of a message from another machine
HIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # Unicode's categories of control, format and surrogate characters, line ends


def for_spreadsheet(value: T) -> T | str:
    """Put an apostrophe before text that a spreadsheet would evaluate. Numbers stay as they are, even in text.

    >>> for_spreadsheet("=1+1"), for_spreadsheet("-0.5"), for_spreadsheet(-0.5), for_spreadsheet("north-east")
    ("'=1+1", '-0.5', -0.5, 'north-east')
    """
    if not isinstance(value, str) or NUMBER.fullmatch(value):
        return value
    return FORMULA.sub("'", value)


def for_latex(text: str) -> str:
    r"""Escape text for LaTeX.

    >>> for_latex(r"50 % of a_b\c")
    '50\\,\\% of a\\_b\\textbackslash{}c'
    """
    return visible(text).translate(LATEX).replace(" \\%", r"\,\%")


def visible(text: str) -> str:
    r"""Write characters that do not show, or that change the order of others, as their numbers.

    >>> visible("a\u202eb"), visible("Zürich")
    ('a\\u202eb', 'Zürich')
    """
    if text.isprintable():  # no hidden character: the common case
        return text
    hidden = (unicodedata.category(sign) in HIDDEN for sign in text)
    return "".join(ascii(sign)[1:-1] if hide else sign for sign, hide in zip(text, hidden, strict=True))


def plain(text: str) -> str:
    r"""Return another machine's text, unable to move the cursor, reorder a line, or pass for a line of its own.

    >>> plain("\x1b[2Jgone\u202e\nround 9 is done")
    '\\x1b[2Jgone\\u202e\n  | round 9 is done'
    """
    return "\n  | ".join(visible(line) for line in text[:LONGEST].split("\n"))


def visible_lines(text: str) -> str:
    """Make the lines of a text visible; only line feeds stay."""
    return "\n".join(map(visible, text.split("\n")))


def appearance(name: str) -> str:
    """Return the same text for names that look alike: case, spaces and hidden characters do not count.

    >>> appearance("Kerry") == appearance("k\u0435rry\u200b") == appearance("kerry ")
    True
    """
    if not name.isascii():
        name = "".join(sign for sign in unicodedata.normalize("NFKC", name) if unicodedata.category(sign) not in HIDDEN)
        name = unicodedata.normalize("NFKC", name.casefold()).translate(LOOKALIKES)
    return re.sub(r"[\s\x00-\x1f\x7f]+", "", name.casefold())


def distinct_names(names: Sequence[str], taken: Sequence[str] = ()) -> list[str]:
    r"""Mark the names of clients that look like another one, or like one that is taken, with the client's number.

    >>> distinct_names(["kerry", "cork", "k\u0435rry"])
    ['kerry [client 0]', 'cork', 'k\\u0435rry [client 2]']
    """
    looks = [appearance(name) for name in names]
    count = Counter([*looks, *map(appearance, taken)])
    return [
        f"{ascii(name)[1:-1]} [client {client}]" if count[look] > 1 else visible(name)
        for client, (name, look) in enumerate(zip(names, looks, strict=True))
    ]
