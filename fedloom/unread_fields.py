"""Find settings of an algorithm that have no effect: fields that no method that runs reads."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import cached_property
from types import FunctionType
from typing import Any

from pydantic import BaseModel

FIRST = ("init", "init_own", "round", "choose", "model", "server_model")  # what fedloom calls; these call the others
SAFE = ("type", "super")  # functions that read no field of what they are given


def unread_fields(kind: type[BaseModel]) -> list[str]:
    """Return the fields that nothing reads as `self.field`, of the methods that run and of validators of the whole.

    None are returned if such a method passes `self` on, because others may read any field then, or has no source text.
    """
    pending = [(kind, name) for name in FIRST]
    met, read = {*pending}, _in_validators(kind)
    while pending:
        owner, function = _definition(kind, *pending.pop())
        if function is None:
            continue
        try:
            seen = _Reads(function)
        except (OSError, SyntaxError, TypeError):
            return []
        if seen.passes_self_on:
            return []
        read |= seen.read
        after = _next(kind, owner)
        called = [*((kind, name) for name in seen.read), *((after, name) for name in seen.inherited if after)]
        new = [one for one in called if one not in met]
        met.update(new)
        pending += new
    return [name for name in kind.model_fields if name not in read and name != "train"]


def without_effect(kind: type[BaseModel]) -> dict[str, str]:
    """Return a sentence for each field that has no effect."""
    return {
        name: f"The setting {name} of {kind.__name__} has no effect: no method that runs reads self.{name}."
        for name in unread_fields(kind)
    }


def _definition(kind: type, start: type, name: str) -> tuple[type, FunctionType | None]:
    """Return the class and the function behind a name, looked up as Python does, beginning at a class."""
    order = kind.__mro__
    for owner in order[order.index(start) :]:
        if name in vars(owner):
            return owner, _function(vars(owner)[name])
    return start, None


def _next(kind: type, owner: type) -> type | None:
    order = kind.__mro__
    return next(iter(order[order.index(owner) + 1 :]), None)


def _function(value: Any) -> FunctionType | None:
    """Return the function of a method, a property or a validator; None for anything else."""
    for kind, inner in ((property, "fget"), (cached_property, "func"), ((classmethod, staticmethod), "__func__")):
        value = getattr(value, inner) if isinstance(value, kind) else value
    found = inspect.unwrap(value) if callable(value) else None
    return found if isinstance(found, FunctionType) else None


def _in_validators(kind: type[BaseModel]) -> set[str]:
    """Return the names in validators of the whole, which may make other fields of a field."""
    found: set[str] = set()
    for name in kind.__pydantic_decorators__.model_validators:
        function = _function(inspect.getattr_static(kind, name, None))
        if function is not None:
            found |= {*_texts(function.__code__.co_consts), *function.__code__.co_names}
    return found


def _texts(constants: tuple[Any, ...]) -> Iterator[str]:
    for one in constants:
        if isinstance(one, str):
            yield one
        elif isinstance(one, (tuple, frozenset)):
            yield from _texts(tuple(one))


class _Reads(ast.NodeVisitor):
    """What a method reads of its object: `self.name`, `super().name`, and whether it passes `self` on to others."""

    def __init__(self, function: FunctionType) -> None:
        self.read: set[str] = set()
        self.inherited: set[str] = set()
        self.passes_self_on = False
        arguments = function.__code__.co_varnames[: function.__code__.co_argcount]
        self.object = arguments[0] if arguments else ""
        self.visit(ast.parse(textwrap.dedent(inspect.getsource(function))))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.value, ast.Name) and node.value.id == self.object:
            self.read.add(node.attr)
            self.passes_self_on |= node.attr == "__dict__"
            return
        if isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Name) and node.value.func.id == "super":
            self.inherited.add(node.attr)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if not (isinstance(node.func, ast.Name) and node.func.id in SAFE):
            self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        self.passes_self_on |= node.id == self.object
