"""Where your own code reads environment variables. Their values are no part of an experiment, so a run may mix them."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

READING = ("environ", "environb", "getenv", "getenvb")
WRITING = ("setdefault", "update", "pop", "clear")  # methods of os.environ: code that sets a value knows it


def cautions(files: Iterable[Path]) -> Iterator[str]:
    """Name the files that read environment variables. Nothing is run."""
    for file in dict.fromkeys(files):
        try:
            lines = reading_lines(ast.parse(file.read_bytes()))
        except (OSError, SyntaxError, ValueError):  # loading it says what is wrong
            continue
        if lines:
            where = f"line {lines[0]}" + (f" and {len(lines) - 1} more" if len(lines) > 1 else "")
            yield (
                f"{file.name} reads environment variables ({where}), and their values do not count as part of the "
                "experiment: with other values, a finished run is shown as it is, and an unfinished one goes on with "
                "them. Give such a value as an argument: args in [task], or a setting of the algorithm."
            )


def reading_lines(code: ast.Module) -> list[int]:
    """Return the lines that read environment variables.

    >>> reading_lines(ast.parse("import os\\nos.environ['A'] = '1'\\nb = os.environ['B']"))
    [3]
    """
    imported = {
        alias.asname or alias.name
        for node in ast.walk(code)
        if isinstance(node, ast.ImportFrom) and node.module == "os"
        for alias in node.names
        if alias.name in READING
    }
    modules = {
        alias.asname or alias.name
        for node in ast.walk(code)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name == "os"
    }
    written = {id(found) for node in ast.walk(code) if (found := _written(node)) is not None}

    def reads(node: ast.Attribute | ast.Name) -> bool:
        if isinstance(node, ast.Name):
            return node.id in imported
        return node.attr in READING and isinstance(node.value, ast.Name) and node.value.id in modules

    nodes = [node for node in ast.walk(code) if isinstance(node, (ast.Attribute, ast.Name))]
    return sorted({node.lineno for node in nodes if reads(node) and id(node) not in written})


def _written(node: ast.AST) -> ast.AST | None:
    """Return what a node changes, if it changes something."""
    if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
        return node.value
    return node.value if isinstance(node, ast.Attribute) and node.attr in WRITING else None
