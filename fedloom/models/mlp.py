"""Dense nets of any size."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn
from torch.nn.functional import relu

from fedloom.errors import InputError


class MLP(nn.Module):
    """Dense layers of any widths with ReLU between them: features, the hidden ones, classes."""

    def __init__(self, features: int | None = None, hidden: Sequence[int] = (100,), classes: int = 2) -> None:
        super().__init__()
        if not isinstance(hidden, Sequence) or isinstance(hidden, str):
            raise InputError(
                f"The 'hidden' parameter of mlp must be a list of widths, such as [200, 200]. Got {hidden!r}."
            )
        check_sizes("mlp", classes=classes, **{f"hidden[{i}]": width for i, width in enumerate(hidden)})
        widths = (*hidden, classes)
        self.layers = nn.ModuleList(
            [linear("mlp", features, widths[0]), *(nn.Linear(*two) for two in pairwise(widths))]
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return one logit per class."""
        x = x.flatten(1)
        for layer in self.layers[:-1]:
            x = relu(layer(x))
        logits: Tensor = self.layers[-1](x)
        return logits


def linear(model: str, features: int | None, width: int) -> nn.Linear:
    """Return the first layer of a model. Without `features`, the first examples give it its size."""
    if features is None:
        return nn.LazyLinear(width)
    check_sizes(model, features=features)
    return nn.Linear(features, width)


def check_sizes(model: str, **sizes: int) -> None:
    """Raise if a width is not a whole number from 1."""
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise InputError(f"The '{name}' parameter of {model} must be a whole number from 1. Got {size!r} instead.")
