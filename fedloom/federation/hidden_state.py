"""Refuses an algorithm of yours that keeps something in itself, which no checkpoint has and no worker sees."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from inspect import getattr_static
from typing import TYPE_CHECKING, Any

from fedloom.errors import TrainingError
from fedloom.user_code import has_own_class, named

if TYPE_CHECKING:
    from fedloom.algorithm import Algorithm


@contextmanager
def keeps_nothing(algorithm: Algorithm, method: Any) -> Iterator[None]:
    """Raise if one of its methods, which runs inside, changes what an algorithm holds.

    A record is frozen, but `self.__dict__`, private attributes and lists in fields can still be changed.
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
            f"{named(method)}, or what it calls, keeps '{changed[0]}' in the algorithm itself. Workers and checkpoints "
            "do not have it, so results would depend on how the run is computed. What an algorithm remembers between "
            "rounds belongs in the state that `init` and `round` return, and what a client remembers in `own`."
        )


def _held(algorithm: Algorithm) -> dict[str, tuple[Any, ...]]:
    """Name → a value and, of a container, what is in it. Values that are computed once from others do not count."""
    attributes = {**vars(algorithm), **(algorithm.__pydantic_private__ or {})}
    cached = {name for name in attributes if isinstance(getattr_static(type(algorithm), name, None), cached_property)}
    return {name: (value, *_inside(value)) for name, value in attributes.items() if name not in cached}


def _inside(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.keys()
        yield from value.values()
    elif isinstance(value, (list, set)):
        yield from value


def _same(one: tuple[Any, ...] | None, other: tuple[Any, ...] | None) -> bool:
    """Whether the same objects are held: tensors cannot be compared by ==."""
    if one is None or other is None or len(one) != len(other):
        return False
    return all(left is right for left, right in zip(one, other, strict=True))
