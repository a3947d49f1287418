"""Notes and cautions come from one file, and a sentence that lacks a value is an error."""

from __future__ import annotations

from pathlib import Path

import pytest

import fedloom
from fedloom.results.sentences import say, sentences


def test_values_are_filled_in_and_a_missing_one_is_an_error() -> None:
    assert say("caution", "unfinished", cells="a, b") == "Not finished, and left out of comparisons: a, b."
    with pytest.raises(KeyError, match="cells"):
        say("caution", "unfinished")


def test_every_sentence_is_said_somewhere_and_has_one_line() -> None:
    code = "".join(file.read_text(encoding="utf-8") for file in Path(fedloom.__file__).parent.rglob("*.py"))
    for table, names in sentences().items():
        for name, text in names.items():
            assert f'"{name}"' in code, f"nothing says {table}.{name}"
            assert "\n" not in text
            assert "  " not in text
