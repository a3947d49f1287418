"""Only what runs counts in the hash of code."""

from __future__ import annotations

import ast

import pytest

from fedloom.syntax_hash import syntax_hash


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [
        ("x = (1,\n  2)", "x = (1, 2)", True),
        ("x = 'a' 'b'", 'x = "ab"', True),
        ("class A:\n  a: int\n  'What it means.'", "class A:\n    a: int", True),
        ("x = (1,)", "x = (1)", False),
        ("x = 1", "x = 1.0", False),
        ("x = 1", "x = True", False),
        ("x = None", "x = 1", False),
        ("f(a=1)", "f(b=1)", False),
        ("if a:\n  b()\nc()", "if a:\n  b()\n  c()", False),
        ("a - (b - c)", "a - b - c", False),
        ("f'{x!r}'", "f'{x}'", False),
        ("f('text')", "f('texts')", False),
    ],
)
def test_only_what_runs_counts(before: str, after: str, same: bool) -> None:
    assert (syntax_hash(ast.parse(before)) == syntax_hash(ast.parse(after))) is same
