"""Refuses an algorithm of yours that keeps something in itself, which no checkpoint has and no worker sees."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from inspect import getattr_static
from typing import TYPE_CHECKING, Any

from fedloom.errors import TrainingError
from fedloom.user_code import has_own_class, named, own_classes

if TYPE_CHECKING:
    from fedloom.algorithm import Algorithm


@contextmanager
def keeps_nothing(algorithm: Algorithm, method: Any) -> Iterator[None]:
    """Raise if one of its methods, which runs inside, changes what an algorithm holds.

    A record is frozen, but `self.__dict__`, private attributes, attributes of its class, and lists in any of these can
    still be changed, and so can what these hold: other containers, and classes inside the class.
    """
    if not has_own_class(algorithm):
        yield
        return
    before = _held(algorithm)
    yield
    after = _held(algorithm)
    changed = [name for name in (*before, *after) if not _same(before.get(name), after.get(name))]
    if changed:
        raise TrainingError(
            f"{named(method)}, or what it calls, keeps '{changed[0]}' in the algorithm itself or its class. Workers "
            "and checkpoints do not have it, so results would depend on how the run is computed. What an algorithm "
            "remembers between rounds belongs in the state that `init` and `round` return, and what a client remembers "
            "in `own`."
        )


def _held(algorithm: Algorithm) -> dict[str, tuple[Any, ...]]:
    """Name → a value and, of a container, all that is in it. Values that are computed once from others do not count."""
    attributes = {**_of_classes(type(algorithm)), **vars(algorithm), **(algorithm.__pydantic_private__ or {})}
    cached = {name for name in attributes if isinstance(getattr_static(type(algorithm), name, None), cached_property)}
    modules = frozenset(one.__module__ for one in own_classes(type(algorithm)))
    return {name: (*_inside(value, modules, set()),) for name, value in attributes.items() if name not in cached}


def _of_classes(kind: type) -> dict[str, Any]:
    """Name → a value that classes of yours hold, besides what Python and pydantic keep there."""
    held = (item for one in reversed(own_classes(kind)) for item in vars(one).items())
    return {name: value for name, value in held if not name.startswith(("__", "_abc_"))}


def _inside(value: Any, modules: frozenset[str], seen: set[int]) -> Iterator[Any]:
    """Yield a value and all that is in it, if it is a container or a class of the algorithm's modules."""
    yield value
    if id(value) in seen:
        return
    if isinstance(value, dict):
        parts = (*value.keys(), *value.values())
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        parts = (*value,)
    elif isinstance(value, type) and value.__module__ in modules:
        held = _of_classes(value)
        parts = (*held.keys(), *held.values())
    else:
        return
    seen.add(id(value))
    for part in parts:
        yield from _inside(part, modules, seen)


def _same(one: tuple[Any, ...] | None, other: tuple[Any, ...] | None) -> bool:
    """Whether the same objects are held: tensors cannot be compared by ==."""
    if one is None or other is None or len(one) != len(other):
        return False
    return all(left is right for left, right in zip(one, other, strict=True))
