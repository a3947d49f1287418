"""Messages between a process and its workers: pickles, with tensors beside them that are not copied."""

from __future__ import annotations

import functools
import inspect
import io
import pickle
import socket
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress
from types import FunctionType, ModuleType
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch import Tensor

from fedloom.code_values import imports_inside
from fedloom.errors import InputError
from fedloom.user_code import PREFIX, is_own, is_own_module, kind_of

Message = list[Any]  # the pickle, then the tensors' bytes
DEEPEST = 9  # how far to look inside of what cannot be pickled: it may contain itself
_NUMPY = {torch.from_numpy(np.empty(0, kind)).dtype for kind in ["?", "i1", "i2", "i4", "i8", "u1", "f2", "f4", "f8"]}

_Cached = type(functools.lru_cache(len))
_by_value: set[str] = set()  # your modules that are sent as they are in this process
_by_name: set[str] = set()  # those that cannot be sent: workers import them
_imported: dict[str, str] = {}  # those that workers have imported since somebody asked, and why
LOCKED = "it holds something that cannot be sent to them, such as a lock: make that inside of the function that uses it"
LATE = "a function imports it inside of itself: import it at the top of the file"


def pack(payload: Any, by_value: bool = True) -> Message:
    """Pack anything that can be pickled, also functions and classes of a script.

    Your own modules are sent as they are now: a program may have set a value that differs from their files'. Workers
    answer with names, because the process that gets the answer has the modules.
    """
    met: set[str] = set()
    if by_value:
        with suppress(Exception):
            return _packed(payload, met)
    met |= {name for name in _by_value if any(one.startswith(f"{name}.") for one in met)}
    for name in met & _by_value:
        cloudpickle.unregister_pickle_by_value(ModuleType(name))
    _by_value.difference_update(met)
    _by_name.update(met)
    _imported.update(dict.fromkeys(met, LOCKED))
    try:
        return _packed(payload, None)
    except (TypeError, AttributeError, ValueError, pickle.PicklingError) as error:
        refusal = InputError(
            f"Worker processes cannot have {_culprit(payload)}: {error}. Make it inside of the function that uses it, "
            'or set backend = "serial", which computes in this process.'
        )
        _by_name.difference_update(met)  # it fails in both ways: the modules are not to blame
        for name in met:
            _imported.pop(name, None)
        raise refusal from error


def imported_by_workers() -> dict[str, str]:
    """Return your modules that workers have imported since the last call, and why they were not sent."""
    found = dict(sorted(_imported.items()))
    _imported.clear()
    return found


def _packed(payload: Any, met: set[str] | None) -> Message:
    file = io.BytesIO()
    beside: list[pickle.PickleBuffer] = []
    pickler = _Pickler(file, protocol=5, buffer_callback=beside.append)
    pickler.met = met
    pickler.dump(payload)
    return [file.getvalue(), *(buffer.raw() for buffer in beside)]


def _send_by_value(name: str, met: set[str]) -> None:
    """Let a module's functions, classes and values be sent, if it is your own. Add its name to those that are."""
    module = sys.modules.get(name)
    if name not in _by_value:
        _imported.update(dict.fromkeys({name} & _by_name, LOCKED))
        if name in ("__main__", *_by_name) or name.startswith(PREFIX) or not isinstance(module, ModuleType):
            return
        compiled = (getattr(module, "__file__", None) or "").endswith((".so", ".pyd"))
        if module.__name__ != name or compiled or not is_own_module(module):
            return
        if name in cloudpickle.list_registry_pickle_by_value():  # by your program
            return
        cloudpickle.register_pickle_by_value(module)
        _by_value.add(name)
    met.add(name)


def _culprit(value: Any, name: str = "", depth: int = 0) -> str:
    """Name what cannot be pickled, by the way that leads to it, as in `loss.lock`."""
    parts: dict[Any, Any] = getattr(value, "__dict__", {}) if not isinstance(value, type) else {}
    if isinstance(value, FunctionType):
        used = inspect.getclosurevars(value)
        parts = {**used.globals, **used.nonlocals}
    elif isinstance(value, (tuple, list, dict)):
        parts = value if isinstance(value, dict) else dict(enumerate(value))
    for key, part in parts.items() if depth < DEEPEST else ():
        try:
            cloudpickle.dumps(part)
        except Exception:
            return _culprit(part, ".".join(one for one in (name, key) if one and isinstance(one, str)), depth + 1)
    return f"`{name}`, {kind_of(value)}"


def _cached(function: Any, maxsize: int | None, typed: bool) -> Any:
    """Return a function of yours that remembers its answers. By its name alone, a worker could not find it."""
    return functools.lru_cache(maxsize, typed)(function)


def unpack(message: Message) -> Any:
    """Unpack a message."""
    return pickle.loads(message[0], buffers=message[1:])


def send(to: socket.socket, message: Message) -> None:
    """Send a whole message."""
    sizes = [memoryview(part).nbytes for part in message]
    to.sendall(struct.pack(f"<Q{len(sizes)}Q", len(sizes), *sizes))
    for part in message:
        to.sendall(part)


def receive(source: socket.socket) -> Message:
    """Receive the next message. Raise EOFError if the other side closed the connection."""
    (count,) = struct.unpack("<Q", _read(source, 8))
    sizes: Sequence[int] = struct.unpack(f"<{count}Q", _read(source, 8 * count))
    return [_read(source, size) for size in sizes]


def _read(source: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    rest = memoryview(data)
    while rest:
        read = source.recv_into(rest)
        if not read:
            raise EOFError
        rest = rest[read:]
    return data


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    met: set[str] | None = None  # your modules that were met, or None to send all by name

    def reducer_override(self, value: Any) -> Any:
        if self.met is not None and isinstance(value, (FunctionType, type, ModuleType)):
            _send_by_value(value.__name__ if isinstance(value, ModuleType) else str(value.__module__), self.met)
            if isinstance(value, FunctionType) and is_own(value.__code__.co_filename):
                late = imports_inside(value.__code__, value.__globals__)
                _imported.update((module.__name__, LATE) for module in late if module.__name__ not in _imported)
        if isinstance(value, _Cached) and self.met is not None and is_own(inspect.unwrap(value).__code__.co_filename):
            return _cached, (value.__wrapped__, *value.cache_parameters().values())
        plain = type(value) is Tensor and value.layout is torch.strided and value.dtype in _NUMPY
        if plain and value.device.type == "cpu" and not value.requires_grad and not value.is_conj() and value.numel():
            return torch.from_numpy, (value.contiguous().numpy(),)
        return super().reducer_override(value)
