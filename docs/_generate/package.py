"""Writes the map of the package: every room and module with the first sentence of its docstring."""

from __future__ import annotations

import ast
from pathlib import Path

import fedloom

PACKAGE = Path(fedloom.__file__).parent


def first_sentence(path: Path) -> str:
    """The first line of a module's docstring."""
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n")[0]


def modules() -> str:
    """Write a section for each room."""
    lines = ["## fedloom", "", *_table(PACKAGE)]
    for folder in sorted(path.parent for path in PACKAGE.rglob("__init__.py") if path.parent != PACKAGE):
        name = ".".join(["fedloom", *folder.relative_to(PACKAGE).parts])
        lines += ["", f"## {name}", "", first_sentence(folder / "__init__.py"), "", *_table(folder)]
    return "\n".join(lines)


def _table(folder: Path) -> list[str]:
    files = [path for path in sorted(folder.glob("*.py")) if not path.stem.startswith("__")]
    if not files:
        return []
    return ["| module | |", "| --- | --- |", *(f"| `{path.stem}` | {first_sentence(path)} |" for path in files)]
