"""Keyed dropout and row-masked batch normalisation for unmodified models, through one torch function mode.

Torch's own dropout draws from a global generator, so its mask would depend on the process and the lane. And a padded
batch has rows that do not exist: batch normalisation must leave them out of its statistics.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fedloom import keys

# these drop whole channels: they draw once per example and channel, which are always the first two dimensions
_CHANNEL_DROPOUT = (F.dropout1d, F.dropout2d, F.dropout3d, F.feature_alpha_dropout)


class Masked(TorchFunctionMode):
    """Inside this mode, dropout is drawn from `key`, and batch normalisation uses only rows where `mask` is true."""

    def __init__(self, key: Tensor | None, mask: Tensor | None = None, with_gradient: bool = False) -> None:
        super().__init__()
        self.key = key
        self.mask = mask
        self.with_gradient = with_gradient  # whether the result is differentiated afterwards
        self.dropouts = 0  # number of dropout calls so far
        self.norms: list[int] = []  # for every batch normalisation: values per channel and example

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.batch_norm:
            return self._batch_norm(*args, **kwargs)
        if func is F.dropout or func is F.alpha_dropout or func in _CHANNEL_DROPOUT:
            return self._dropout(func, *args, **kwargs)
        return func(*args, **kwargs)

    def _dropout(
        self, func: Callable[..., Tensor], input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        if not training or p == 0.0 or self.key is None or self._is_computed_again():
            return func(input, p, training, inplace)
        shape = tuple(input.shape)
        if func in _CHANNEL_DROPOUT:
            shape = shape[:2] + (1,) * (input.dim() - 2)
        keep = (keys.uniform(self.key, math.prod(shape), self.dropouts) >= p).reshape(shape)
        self.dropouts += 1
        if func in (F.alpha_dropout, F.feature_alpha_dropout):
            output = _alpha_dropout(input, keep, p)
        else:
            output = input * (keep.to(input.dtype) / (1.0 - p if p < 1 else 1.0))
        return input.copy_(output) if inplace else output  # the model may use its input again

    def _is_computed_again(self) -> bool:
        """Whether this part of a model is computed a second time for its gradient, as checkpointing does.

        No mode sees the second time, but torch restores its generator for it, so torch's own dropout is correct there.
        """
        hooked = torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
        return hooked or (self.with_gradient and not torch.is_grad_enabled())

    def _batch_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        values = math.prod(input.shape[2:])
        self.norms += [values] * training
        if not training or self.mask is None:
            return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
        rows = self.mask.to(input.dtype)
        over = [0, *range(2, input.dim())]
        as_channels = (1, -1) + (1,) * (input.dim() - 2)
        mask = rows.reshape(-1, *(1,) * (input.dim() - 1))
        count = (rows.sum() * values).clamp(min=1)
        mean = (input * mask).sum(over) / count
        centred = (input - mean.reshape(as_channels)) * mask
        variance = centred.square().sum(over) / count
        output = centred * torch.rsqrt(variance + eps).reshape(as_channels)
        if weight is not None:
            output = output * weight.reshape(as_channels)
        if bias is not None:
            output = output + bias.reshape(as_channels)
        if running_mean is not None and running_var is not None:
            unbiased = variance.detach() * (count / (count - 1).clamp(min=1))
            running_mean.mul_(1 - momentum).add_(mean.detach() * momentum)
            running_var.mul_(1 - momentum).add_(unbiased * momentum)
        return output


def _alpha_dropout(input: Tensor, keep: Tensor, p: float) -> Tensor:
    # dropped values become −scale·alpha of SELU; the affine correction then restores mean and variance
    floor = -1.7580993408473766
    if p == 1:
        return torch.zeros_like(input)
    a = ((1 - p) * (1 + p * floor**2)) ** -0.5
    b = -a * p * floor
    kept: Tensor = torch.where(keep, input, torch.full_like(input, floor)) * a + b
    return kept
