"""A hash of what your own code uses: arguments, closures, globals and attributes, besides its text.

Two models with the same text differ if one of them has another temperature. `fedloom run` reads this in the
experiment file. In a program such values can be anywhere, and results of other values would be wrong in silence.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import importlib.util
import inspect
import pickle
import sys
import types
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from fedloom.user_code import code_fingerprint, is_own, is_own_module

PLAIN = (str, bytes, bool, int, float, complex, Path, type(None), type(...), np.generic)
# known by their versions
LIBRARIES = ("fedloom", "torch", "numpy", "builtins", "functools", "pydantic", "typing", "abc")
DEEPEST = 8  # values inside of values


def values_fingerprint(thing: Any) -> str:
    """Return a hash of an object and of everything that it uses, as far as it is yours.

    >>> values_fingerprint(functools.partial(max, 1)) == values_fingerprint(functools.partial(max, 2))
    False
    """
    digest = hashlib.sha256()
    for part in _parts(thing, (), 0, set()):
        digest.update(f"{len(part)} ".encode() + part)
    return digest.hexdigest()


def _parts(thing: Any, seen: tuple[int, ...], depth: int, done: set[int]) -> Iterator[bytes]:
    """Yield what tells an object from another of its kind: all of a function or class the first time, then its name."""
    if isinstance(thing, PLAIN):
        yield repr(thing).encode()
        return
    if isinstance(thing, (Tensor, np.ndarray)):
        array = thing.detach().cpu().numpy() if isinstance(thing, Tensor) else thing
        yield f"{array.dtype} {array.shape}".encode()
        yield array.tobytes() if array.dtype != object else repr(array.tolist()).encode()
        return
    if isinstance(thing, (types.FunctionType, type)):
        if id(thing) in done:
            yield f"{thing.__module__}.{thing.__qualname__}".encode()
            return
        done.add(id(thing))
        inside = functools.partial(_parts, seen=(), depth=0, done=done)
        yield from _of_class(thing, inside) if isinstance(thing, type) else _of_function(thing, inside)
        return
    if id(thing) in seen or depth > DEEPEST:  # it holds itself
        yield b"..."
        return
    inside = functools.partial(_parts, seen=(*seen, id(thing)), depth=depth + 1, done=done)
    if isinstance(thing, (list, tuple, deque)):
        yield type(thing).__name__.encode()
        for one in thing:
            yield from inside(one)
    elif isinstance(thing, (set, frozenset)):
        yield from sorted(b" ".join(inside(one)) for one in thing)
    elif isinstance(thing, Mapping):
        yield from sorted(b" ".join((*inside(key), *inside(value))) for key, value in thing.items())
    elif isinstance(thing, functools.partial):
        yield from inside([thing.func, thing.args, thing.keywords])
    elif isinstance(thing, types.MethodType):
        yield from inside([thing.__func__, thing.__self__])
    elif isinstance(thing, Enum):
        yield from inside([type(thing).__qualname__, thing.name, thing.value])
    elif isinstance(thing, (types.ModuleType, types.BuiltinFunctionType)):
        yield str(getattr(thing, "__qualname__", getattr(thing, "__name__", thing))).encode()
    elif callable(thing) and hasattr(thing, "__wrapped__"):  # such as functools.cache
        yield from inside([type(thing).__name__, thing.__wrapped__])
    else:
        yield from inside(type(thing))
        attributes = _attributes(thing)
        yield from inside(attributes)
        if not attributes and _is_known(type(thing)):  # its values are in C, as those of a frame or a date
            with suppress(Exception):
                yield pickle.dumps(thing)


def _of_function(thing: types.FunctionType, inside: Any) -> Iterator[bytes]:
    names = set(_names(thing.__code__))
    if known := _is_known(thing):
        yield f"{thing.__module__}.{thing.__qualname__}".encode()
        if _top(thing) in LIBRARIES:
            return
    else:
        yield code_fingerprint(thing).encode()
        yield from inside([thing.__defaults__, thing.__kwdefaults__, vars(thing)])
    for cell in thing.__closure__ or ():  # a function that a package made may call yours
        try:
            yield from _used(cell.cell_contents, names, inside, set())
        except ValueError:  # it is not filled yet
            yield b"empty"
    for name in sorted(set(_globals(thing.__code__))) if not known else ():
        if name in thing.__globals__:
            yield name.encode()
            yield from _used(thing.__globals__[name], names, inside, set())
    for module in imports_inside(thing.__code__, thing.__globals__) if not known else ():
        yield from _used(module, names, inside, set())


def _used(value: Any, names: set[str], inside: Any, done: set[int]) -> Iterator[bytes]:
    """Yield the parts of what code uses: of your own module, those of its attributes that the code mentions."""
    if not isinstance(value, types.ModuleType) or id(value) in done or not is_own_module(value):
        yield from inside(value)
        return
    done.add(id(value))
    yield value.__name__.encode()
    for name in sorted(names & vars(value).keys()):
        yield name.encode()
        yield from _used(vars(value)[name], names, inside, done)


def _names(code: types.CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes that code mentions, also in functions inside of it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _globals(code: types.CodeType) -> Iterator[str]:
    """Yield the names of the globals that code reads, also in functions inside of it."""
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield str(step.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _globals(constant)


def imports_inside(code: types.CodeType, home: dict[str, Any]) -> Iterator[types.ModuleType]:
    """Yield your own modules that code imports where it runs. They are imported now, as they will be then."""
    steps = list(dis.get_instructions(code))
    for level, named, step in zip(steps, steps[1:], steps[2:], strict=False):
        if step.opname == "IMPORT_NAME":
            top = str(step.argval).partition(".")[0]
            with suppress(Exception):  # a module that is missing or fails may never be used
                if level.argval or _is_own_spec(importlib.util.find_spec(top)):
                    yield __import__(str(step.argval), home, None, named.argval or (), level.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from imports_inside(constant, home)


def _is_own_spec(spec: ModuleSpec | None) -> bool:
    places = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or ())]
    return is_own(next(filter(None, places), "<frozen "))


def _of_class(thing: type, inside: Any) -> Iterator[bytes]:
    yield f"{thing.__module__}.{thing.__qualname__}".encode()
    for kind in thing.__mro__:
        if _is_known(kind):
            continue
        yield code_fingerprint(kind).encode()
        for name, value in sorted(vars(kind).items()):
            plain = inspect.unwrap(getattr(value, "__func__", getattr(value, "fget", value)))
            if isinstance(plain, types.FunctionType):
                yield from inside(plain)
            elif not name.startswith("__") and isinstance(value, (*PLAIN, list, tuple, dict, Tensor, np.ndarray)):
                yield name.encode()  # it may have been set after the class was made
                yield from inside(value)
        for name, private in sorted(vars(kind).get("__private_attributes__", {}).items()):  # constants of an algorithm
            yield name.encode()
            yield from inside(private.default)


def _attributes(thing: Any) -> dict[str, Any]:
    """Return the values that an object has: of a module, without its hooks and what training changes."""
    if isinstance(thing, nn.Module):
        own = {name: value for name, value in vars(thing).items() if not name.startswith("_") and name != "training"}
        return {**own, "modules": dict(thing.named_children()), "buffers": dict(thing.named_buffers(recurse=False))}
    slots = [name for kind in type(thing).__mro__ for name in _slots(kind) if hasattr(thing, name)]
    found = {**{name: getattr(thing, name) for name in slots}, **getattr(thing, "__dict__", {})}
    return {name: value for name, value in found.items() if not name.startswith("__")}


def _slots(kind: type) -> Sequence[str]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _is_known(thing: Any) -> bool:
    """Whether a function or class is named only: that of an installed package, or of Python itself."""
    module = sys.modules.get(str(thing.__module__))
    if module is None:  # made by a program
        own = is_own(thing.__code__.co_filename) if isinstance(thing, types.FunctionType) else True
    else:  # not the file of the code: a package's decorator gives your function code of its own
        own = is_own_module(module)
    return _top(thing) in LIBRARIES or not own


def _top(thing: Any) -> str:
    return str(thing.__module__).partition(".")[0]
