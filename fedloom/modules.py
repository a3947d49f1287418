"""Using a module without leaving traces: other tensors in its places, and its Python state as it was.

Many clients use one module, one after another. After each use its parameters and buffers are the same objects as
before, and what it keeps in Python (counters, generators, tensors that are not buffers) is as it was when it was built.
"""

from __future__ import annotations

import copy
import random
import types
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.errors import InputError
from fedloom.tree import Tree

# what torch keeps in a module's __dict__: its tensors and submodules are looked after elsewhere
_TORCHS_OWN = {*vars(nn.Module()), "_flat_weights", "_flat_weight_refs"}
_PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
# code is not state: what a function keeps in its closure or in globals is not seen here
_CODE = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType)


_MISSING = object()
KEPT_BYTES = 16_000_000  # of copies that are kept, because fresh memory takes longer than copying


class Places:
    """Where a module keeps each of its tensors: several places for tied ones and for layers with several names."""

    def __init__(self, module: nn.Module) -> None:
        self.kept: Tree = {}
        self.persistent = module.state_dict().keys()
        self.parameters: Tree = dict(module.named_parameters())
        self.buffers: Tree = dict(module.named_buffers())
        self.own: Tree = {**self.parameters, **self.buffers}
        names = {id(leaf): name for name, leaf in self.own.items()}
        self.flat: list[tuple[str, dict[str, Any], str]] = [
            (names[id(leaf)], held, key)
            for part in module.modules()
            for held in (part._parameters, part._buffers)
            for key, leaf in held.items()
            if leaf is not None
        ]

    def copies(self, weights: Mapping[str, Tensor]) -> Tree:
        """Copies of weights that may be changed, until the next are asked for: small models' are in the same memory."""
        if self.kept and all(leaf.shape == weights[name].shape for name, leaf in self.kept.items()):
            for name, leaf in self.kept.items():
                leaf.copy_(weights[name])
            return self.kept
        made = {name: weights[name].detach().clone() for name in self.own}
        if sum(leaf.numel() * leaf.element_size() for leaf in made.values()) <= KEPT_BYTES:
            self.kept = made
        return made

    @contextmanager
    def holding(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """The module with these tensors in its places; its own are back afterwards.

        A buffer that the model replaces is copied into the tensor that was given for it.
        """
        own = self.own
        try:
            for name, held, key in self.flat:
                held[key] = tensors.get(name, own[name])
            yield
            self._keep(tensors)
        finally:
            for name, held, key in self.flat:
                held[key] = own[name]

    @contextmanager
    def settled(self) -> Iterator[None]:
        """The module with its own tensors: where it puts others in their place, these come back with the new values."""
        try:
            yield
            self._keep(self.own)
        finally:
            for name, held, key in self.flat:
                held[key] = self.own[name]

    def _keep(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy what a model put into its places into the tensors that were there before."""
        for name, held, key in self.flat:
            now, tensor = held.get(key), tensors.get(name)
            if now is tensor or tensor is None:
                continue
            if now is None or (now.shape != tensor.shape and name in self.persistent):
                became = "nothing" if now is None else f"shape {tuple(now.shape)}"
                raise InputError(
                    f"The model changes its '{name}' from shape {tuple(tensor.shape)} to {became} while it is used. "
                    "What clients exchange must keep its shape: register the buffer with persistent=False, or give it "
                    "a fixed one."
                )
            set_value(tensor, now)


@torch.no_grad()
def set_value(tensor: Tensor, value: Tensor) -> None:
    """Copy a value into a tensor, which takes on its shape if it must."""
    if tensor.shape != value.shape:
        tensor.resize_(value.shape)
    tensor.copy_(value)


class PythonState:
    """What a module and a loss keep in Python beside parameters and buffers, as it was when this was made.

    >>> class Counts(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.calls = 0
    ...     def forward(self, x):
    ...         self.calls += 1
    ...         return x * self.calls
    >>> module = Counts()
    >>> state = PythonState(module)
    >>> with state.fresh():
    ...     module(torch.ones(1)), module(torch.ones(1)), state.changed()
    (tensor([1.]), tensor([2.]), True)
    >>> module.calls
    0
    """

    def __init__(self, module: nn.Module, loss: object = None) -> None:
        losses = list(loss.modules()) if isinstance(loss, nn.Module) else [loss]
        parts = [*module.modules(), *losses]
        self.owners = [vars(part) for part in parts if hasattr(part, "__dict__") and not isinstance(part, _CODE)]
        # clients do not exchange what a loss keeps in buffers: it is as good as kept in Python
        self.owners += [part._buffers for part in losses if isinstance(part, nn.Module)]
        tensors = chain(module.parameters(), module.buffers())
        self.fixed: dict[int, Any] = {id(thing): thing for thing in chain(parts, tensors)}  # referred to, never copied
        first = self._values()
        self.plain = [{key: value for key, value in held.items() if _is_plain(value)} for held in first]
        self.others = [
            {key: _detached(key, value) for key, value in held.items() if not _is_plain(value)} for held in first
        ]
        self.only_plain = not any(self.others)
        self.sizes = [len(held) for held in self.owners]
        self.others = self._copy()
        self.frozen = self._freeze()

    def changed(self) -> bool:
        """Whether anything is different from how it was at first."""
        return not self._surely_same() and self._freeze() != self.frozen

    @contextmanager
    def fresh(self) -> Iterator[None]:
        """Inside, everything begins as it was at first; afterwards it is what it was before."""
        before = None if self._surely_same() else self._values()
        if before is not None:
            self._put([{**plain, **others} for plain, others in zip(self.plain, self._copy(), strict=True)])
        try:
            yield
        finally:
            if before is not None or not self._surely_same():
                self._put(self.plain if before is None else before)

    def _surely_same(self) -> bool:
        """True if only plain values are kept, and they are the first ones: the usual case, found quickly."""
        if not self.only_plain:
            return False
        for held, plain, size in zip(self.owners, self.plain, self.sizes, strict=True):
            if len(held) != size:
                return False
            for key, value in plain.items():
                if held.get(key, _MISSING) is not value:
                    return False
        return True

    def _values(self) -> list[dict[str, Any]]:
        return [{key: held[key] for key in sorted(held) if key not in _TORCHS_OWN} for held in self.owners]

    def _copy(self) -> list[dict[str, Any]]:
        return copy.deepcopy(self.others, dict(self.fixed)) if any(self.others) else self.others

    def _put(self, values: list[dict[str, Any]]) -> None:
        for held, wanted in zip(self.owners, values, strict=True):
            for key in [key for key in held if key not in _TORCHS_OWN and key not in wanted]:
                del held[key]
            held.update(wanted)

    def _freeze(self) -> object:
        return _freeze(self._values(), set(self.fixed))


def _is_plain(value: object) -> bool:
    if type(value) is tuple:
        return all(map(_is_plain, value))
    return isinstance(value, (*_PLAIN, *_CODE))


def _detached(key: str, value: Any) -> Any:
    """A value that can be copied: a tensor without its history, or something that torch's users keep as it is."""
    if isinstance(value, Tensor) and not value.is_leaf:
        return value.detach()
    try:
        copy.deepcopy(value)
    except Exception as error:
        raise InputError(
            f"The model or the loss keeps a {type(value).__name__} as '{key}', which cannot be copied ({error}). Every "
            "client begins with a copy of its own: make it inside forward, or keep it in a global variable."
        ) from None
    return value


def _freeze(value: Any, seen: set[int]) -> object:
    """A value as something that can be compared later, when the value itself may have changed."""
    if _is_plain(value):
        return value if value == value else repr(value)  # NaN is not equal to itself
    if id(value) in seen:
        return "seen"
    seen = seen | {id(value)}
    if isinstance(value, Tensor):
        return _tensor_bits(value)
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, value.tobytes() if value.dtype != object else repr(value)
    if isinstance(value, torch.Generator):
        return _tensor_bits(value.get_state())
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator | np.random.RandomState):
        return repr(value.bit_generator.state if isinstance(value, np.random.Generator) else value.get_state())
    if isinstance(value, Mapping):
        return type(value), tuple((_freeze(key, seen), _freeze(item, seen)) for key, item in value.items())
    if isinstance(value, list | tuple | deque | set | frozenset):
        return type(value), tuple(_freeze(item, seen) for item in value)
    try:  # everything else says itself what it is made of
        return type(value), _freeze(value.__reduce_ex__(4)[1:], seen)
    except Exception:
        return object()  # not equal to anything: what cannot be looked into may have changed


def _tensor_bits(value: Tensor) -> object:
    if type(value) not in (Tensor, nn.Parameter) or value.layout != torch.strided:
        return object()
    flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return value.dtype, tuple(value.shape), flat.numpy().tobytes()
