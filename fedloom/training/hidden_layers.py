"""Layers that torch does not find, because a list or a dict of Python holds them."""

from __future__ import annotations

from torch import nn


def about_hidden_layers(module: nn.Module) -> str:
    """Say so if layers are in a list or a dict of Python, where torch does not find them."""
    known = {id(leaf) for leaf in module.parameters()}
    for part in module.modules():
        for name, value in vars(part).items():
            if name.startswith("_") or not isinstance(value, (list, tuple, dict)):
                continue
            held = value.values() if isinstance(value, dict) else value
            layers = [one for one in held if isinstance(one, nn.Module)]
            if any(id(leaf) not in known for layer in layers for leaf in layer.parameters()):
                kind = "ModuleDict" if isinstance(value, dict) else "ModuleList"
                return (
                    f"{type(part).__name__}.{name} holds layers in a {type(value).__name__}, where torch does not find "
                    f"them: they are never trained, sent or saved. Use nn.{kind}."
                )
    return ""
