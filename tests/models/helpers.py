"""What the tests of several models need."""

from torch import nn


def parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
