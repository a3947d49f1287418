"""Values that a module and a loss keep in Python. Every client starts with its own copy of them."""

from __future__ import annotations

import copy
import types
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fedloom.errors import InputError

# what torch keeps in a module's __dict__: handled one by one below, or by `modules.ModuleTensors`
_TORCHS_OWN = frozenset({*vars(nn.Module()), "_flat_weights", "_flat_weight_refs"})
_PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
# code is not state: values in a function's closure or in globals are not handled here
_CODE = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)
_MISSING = object()

Values = list[dict[Any, Any]]


class PythonState:
    """The values that a module and a loss keep in Python, besides parameters and buffers, as they are now.

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

    def __init__(self, module: nn.Module, held_loss: dict[str, Any] | None = None) -> None:
        """`held_loss` is a dict that holds the loss function, so that a copy can replace it there."""
        held_loss = held_loss or {}
        losses = [part for loss in held_loss.values() if isinstance(loss, nn.Module) for part in loss.modules()]
        self.parts = [*module.modules(), *losses]
        tensors = chain(module.parameters(), module.buffers())
        self.fixed: dict[int, Any] = {id(thing): thing for thing in chain(self.parts, tensors)}  # never copied
        self.gradients = [(leaf, leaf.requires_grad) for leaf in module.parameters()]
        # dicts to restore, and the keys in them to leave alone
        self.owners: list[tuple[dict[Any, Any], frozenset[str]]] = [(held_loss, frozenset())]
        self.hooks: list[dict[Any, Any]] = []  # dicts of hooks that are empty at first
        for part in self.parts:
            self.owners += [(vars(part), _TORCHS_OWN), (part._modules, frozenset())]
            # `modules.py` exchanges buffers, except those of a loss and those that are None at first
            exchanged = () if part in losses else [key for key, leaf in part._buffers.items() if leaf is not None]
            self.owners.append((part._buffers, frozenset(exchanged)))
            hooks = [value for key, value in vars(part).items() if key.endswith("_hooks") and value is not None]
            self.owners += [(found, frozenset()) for found in hooks]
            self.hooks += [found for found in hooks if not found]
        first = self._values()
        self.plain = [{k: v for k, v in held.items() if _is_plain(v, self.fixed)} for held in first]
        self.others = [{k: _copyable(k, v) for k, v in held.items() if not _is_plain(v, self.fixed)} for held in first]
        self.only_plain = not any(self.others)
        self.quick = [
            (held, plain, len(held)) for (held, _), plain in zip(self.owners, self.plain, strict=True) if held
        ]
        self.others = self._copy()
        self.frozen = self._freeze()

    def changed(self) -> bool:
        """Whether any value differs from the first one."""
        return not self._surely_same() and self._freeze() != self.frozen

    @contextmanager
    def fresh(self) -> Iterator[None]:
        """Inside, all values start as they were at first. Afterwards they are what they were before."""
        modes = [part.training for part in self.parts]
        before = None if self._surely_same() else (self._values(), [leaf.requires_grad for leaf, _ in self.gradients])
        learns = [wanted for _, wanted in self.gradients]
        if before is not None:
            first = [{**plain, **others} for plain, others in zip(self.plain, self._copy(), strict=True)]
            self._put(first, learns)
        try:
            yield
        finally:
            if before is not None or not self._surely_same():
                self._put(*(before or (self.plain, learns)))
            for part, training in zip(self.parts, modes, strict=True):
                if part.training is not training:
                    part.training = training

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over tensors that are attributes, or in lists and dicts that are attributes, at any depth."""
        for held in self._values():
            for key, value in held.items():
                for leaf in tree_leaves(value):
                    if isinstance(leaf, Tensor) and id(leaf) not in self.fixed:
                        yield str(key), leaf

    def _surely_same(self) -> bool:
        """True if there are only plain values and they are still the first ones: the usual case, which must be fast."""
        if not self.only_plain or any(self.hooks):
            return False
        for held, plain, size in self.quick:
            if len(held) != size:
                return False
            for key, value in plain.items():
                if held.get(key, _MISSING) is not value:
                    return False
        return all(leaf.requires_grad is wanted for leaf, wanted in self.gradients)

    def _values(self) -> Values:
        return [{key: held[key] for key in sorted(held, key=str) if key not in skip} for held, skip in self.owners]

    def _copy(self) -> Values:
        return copy.deepcopy(self.others, dict(self.fixed)) if any(self.others) else self.others

    def _put(self, values: Values, learns: list[bool]) -> None:
        for (held, skip), wanted in zip(self.owners, values, strict=True):
            for key in [key for key in held if key not in skip and key not in wanted]:
                del held[key]
            held.update(wanted)
        for (leaf, _), wanted_gradient in zip(self.gradients, learns, strict=True):
            leaf.requires_grad_(wanted_gradient)

    def _freeze(self) -> object:
        return [leaf.requires_grad for leaf, _ in self.gradients], _freeze(self._values(), self.fixed, set())


def _is_plain(value: object, fixed: Mapping[int, Any]) -> bool:
    """Whether a value is immutable: a number, a function, or a part of the module that is never replaced."""
    if type(value) is tuple:
        return all(_is_plain(item, fixed) for item in value)
    if isinstance(value, types.MethodType):
        return id(value.__self__) in fixed or isinstance(value.__self__, _CODE)
    return isinstance(value, (*_PLAIN, *_CODE)) or (isinstance(value, nn.Module) and id(value) in fixed)


def _copyable(key: object, value: Any) -> Any:
    """Return a value that can be copied for every client: a tensor without its history, or the value itself."""
    if isinstance(value, Tensor) and not value.is_leaf:
        return value.detach()
    try:
        copy.deepcopy(value)
    except Exception as error:
        raise InputError(
            f"The model or the loss keeps a {type(value).__name__} as '{key}', which cannot be copied ({error}). Every "
            "client starts with its own copy: make it inside forward, or keep it in a global variable."
        ) from None
    return value


def _freeze(value: Any, fixed: Mapping[int, Any], seen: set[int]) -> object:
    """Return something to compare with later, when the value itself may have changed."""
    if id(value) in fixed:
        return id(value)
    if _is_plain(value, fixed):
        return value if value == value else repr(value)  # NaN is not equal to itself
    if id(value) in seen:
        return "seen"
    seen = seen | {id(value)}
    if isinstance(value, Tensor):
        return _bits(value)
    if isinstance(value, torch.Generator):
        return _bits(value.get_state())
    if isinstance(value, Mapping):
        return type(value), tuple((_freeze(k, fixed, seen), _freeze(v, fixed, seen)) for k, v in value.items())
    if isinstance(value, list | tuple | deque | set | frozenset):
        return type(value), tuple(_freeze(item, fixed, seen) for item in value)
    try:  # any other object, such as an array or a generator, says how to pickle it
        return type(value), _freeze(value.__reduce_ex__(4)[1:], fixed, seen)
    except Exception:
        return object()  # equal to nothing: an object that cannot be inspected may have changed


def _bits(value: Tensor) -> object:
    if type(value) not in (Tensor, nn.Parameter) or value.layout != torch.strided:
        return object()
    flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return value.dtype, tuple(value.shape), flat.numpy().tobytes()
