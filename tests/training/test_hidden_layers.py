"""Layers in lists and dicts of Python are found and named."""

from __future__ import annotations

from torch import nn

from fedloom.training.hidden_layers import about_hidden_layers


def test_layers_in_a_list_or_a_dict_are_named_unless_torch_has_them() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    assert about_hidden_layers(module) == ""
    module.both = [module[0]]  # type: ignore[assignment]
    assert about_hidden_layers(module) == ""
    module[0].parts = {"a": nn.Linear(2, 2)}  # type: ignore[assignment]
    assert about_hidden_layers(module).startswith("Linear.parts holds layers in a dict")
    assert about_hidden_layers(module).endswith("Use nn.ModuleDict.")
