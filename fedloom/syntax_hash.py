"""A hash of Python code that comments, docstrings and formatting do not change.

It covers the syntax tree, and is the same in every version of Python that can read the code, because fields that a
newer version adds to the tree are empty in such code.
"""

from __future__ import annotations

import ast
import hashlib
from typing import Any

IGNORED_FIELDS = ("type_comment", "kind", "ctx")  # they follow from the rest of the tree or do not change what runs


def syntax_hash(tree: ast.Module) -> str:
    """Return the hash of a module's code.

    >>> one, other = "def f():\\n    return 1", "def f():\\n    '''One.'''\\n    return (1)  # always"
    >>> syntax_hash(ast.parse(one)) == syntax_hash(ast.parse(other))
    True
    """
    parts: list[str] = []
    _write(tree, parts)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _write(value: Any, parts: list[str]) -> None:
    """Write a syntax tree as text, without docstrings and without fields that are empty."""
    if isinstance(value, ast.AST):
        parts.append(type(value).__name__)
        for name in value._fields:
            child = getattr(value, name, None)
            if isinstance(child, list):
                child = [one for one in child if not _is_documentation(one)]
            if child is not None and child != [] and name not in IGNORED_FIELDS:
                parts.append(name)
                _write(child, parts)
        parts.append(")")
    elif isinstance(value, list):
        for child in value:
            _write(child, parts)
        parts.append("]")
    else:
        parts.append(ascii(value))  # repr depends on the version's table of printable characters


def _is_documentation(node: Any) -> bool:
    """Return whether a statement is a bare string: a docstring, or the description of a field."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
