"""Using a module without leaving traces in its tensors: others in their places, and the same objects afterwards.

Many clients use one module, one after another. What it keeps in Python is looked after in `python_state.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fedloom.errors import InputError
from fedloom.tree import Tree

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

    def sharing(self) -> list[str]:
        """Names of tensors that have their memory in common with another one, such as views of each other."""
        memory = [(name, leaf.untyped_storage().data_ptr()) for name, leaf in self.own.items() if leaf.numel()]
        found = [place for _, place in memory]
        return [name for name, place in memory if found.count(place) > 1]

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
