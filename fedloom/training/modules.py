"""The tensors of a module, which many clients use one after another: put others in their place, and restore them.

`python_state.py` does the same for everything else that a module keeps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fedloom.errors import InputError
from fedloom.tree import Tree, size

KEPT_BYTES = 16_000_000  # keep copies up to this size: allocating memory takes longer than copying


class ModuleTensors:
    """A module's parameters and buffers, and every dict that holds them. Tied ones are in several dicts."""

    def __init__(self, module: nn.Module) -> None:
        self._copies: Tree = {}
        self.persistent = module.state_dict().keys()
        self.parameters: Tree = dict(module.named_parameters())
        self.buffers: Tree = dict(module.named_buffers())
        self.own: Tree = {**self.parameters, **self.buffers}
        names = {id(leaf): name for name, leaf in self.own.items()}
        self.holders: list[tuple[str, dict[str, Any], str]] = [
            (names[id(leaf)], held, key)
            for part in module.modules()
            for held in (part._parameters, part._buffers)
            for key, leaf in held.items()
            if leaf is not None
        ]

    def weights(self) -> Tree:
        """Return the module's own parameters and saved buffers: not copies."""
        saved = {*self.parameters, *self.persistent}
        return {name: leaf.detach() for name, leaf in self.own.items() if name in saved}

    def sharing_memory(self) -> list[str]:
        """Return the names of tensors that share memory with another one, such as views of each other."""
        memory = [(name, leaf.untyped_storage().data_ptr()) for name, leaf in self.own.items() if leaf.numel()]
        addresses = [address for _, address in memory]
        return [name for name, address in memory if addresses.count(address) > 1]

    def copies(self, weights: Mapping[str, Tensor]) -> Tree:
        """Return copies of weights. The next call may overwrite them: copies of small models reuse the same memory."""
        if self._copies and all(leaf.shape == weights[name].shape for name, leaf in self._copies.items()):
            for name, leaf in self._copies.items():
                leaf.copy_(weights[name])
            return self._copies
        made = {name: weights[name].detach().clone() for name in self.own}
        if size(made) <= KEPT_BYTES:
            self._copies = made
        return made

    @contextmanager
    def replaced(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Use the module with these tensors instead of its own, which return afterwards.

        If the model assigns a new buffer, its value is copied into the tensor that was given.
        """
        own = self.own
        try:
            for name, held, key in self.holders:
                held[key] = tensors.get(name, own[name])
            yield
            self._copy_assigned(tensors)
        finally:
            for name, held, key in self.holders:
                held[key] = own[name]

    def _copy_assigned(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors that the model assigned into those that were there before."""
        for name, held, key in self.holders:
            now, tensor = held.get(key), tensors.get(name)
            if now is tensor or tensor is None:
                continue
            if now is None or (now.shape != tensor.shape and name in self.persistent):
                became = "nothing" if now is None else f"shape {tuple(now.shape)}"
                raise InputError(
                    f"The model changes its '{name}' from shape {tuple(tensor.shape)} to {became} while it is used. "
                    "Clients exchange it, so its shape must not change: register the buffer with persistent=False, or "
                    "give it a fixed shape."
                )
            set_value(tensor, now)


@torch.no_grad()
def set_value(tensor: Tensor, value: Tensor) -> None:
    """Copy a value into a tensor, which is resized if the shapes differ."""
    if tensor.shape != value.shape:
        tensor.resize_(value.shape)
    tensor.copy_(value)


def load(tensors: Mapping[str, Tensor], weights: Tree) -> None:
    """Copy weights into tensors of the same names."""
    for name, leaf in tensors.items():
        if name in weights:
            set_value(leaf, weights[name])
