"""The net of Szegedi 2019 for EEG trials."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d, logsigmoid

from fedloom.errors import InputError

ELECTRODES, SAMPLES = 64, 256
SMALLEST = 1e-6  # replaces a power of zero, whose logarithm would be infinite


class EegCNN(nn.Module):
    """Convolutions over time and electrodes, their power, and a dense layer of 2, for EEG trials of 64 × 256."""

    inputs = (ELECTRODES, SAMPLES)  # the shape of an example

    # There is no activation between the first two convolutions, so together they are one convolution, whose kernel is
    # the product of theirs. With `composed`, this one is computed: the same function of the same parameters, with the
    # same gradients, but without 30 maps of 64 × 232 values in between. Under vmap over individuals, which differ only
    # in their kernels, it is one convolution for the whole population.

    def __init__(self, output: Literal["sigmoid", "log_sigmoid"] = "sigmoid", composed: bool = True) -> None:
        super().__init__()
        if output not in ("sigmoid", "log_sigmoid"):
            raise InputError(f"The 'output' of eeg_cnn must be 'sigmoid' or 'log_sigmoid'. Got {output!r} instead.")
        self.time = nn.Conv2d(1, 30, (1, 25))
        self.space = nn.Conv2d(30, 10, (ELECTRODES, 1))
        self.power = nn.Conv2d(10, 2, (1, 8))  # the published dilation of 15 is along a dimension of one row
        self.norm = nn.BatchNorm2d(2, eps=1e-3, momentum=0.9)
        self.out = nn.Linear(2 * 211, 2)
        self.output, self.composed = output, composed

    def forward(self, x: Tensor) -> Tensor:
        """Return one value per class: from 0 to 1, or its logarithm, whose cross-entropy is Keras's categorical one."""
        x = x.reshape(-1, 1, ELECTRODES, SAMPLES)
        seen = self._composed(x) if self.composed else self.space(self.time(x))
        power = mean_of_15(seen.square())
        answer: Tensor = self.out(self.norm(self.power(power.clamp(min=SMALLEST).log())).flatten(1))
        return logsigmoid(answer) if self.output == "log_sigmoid" else torch.sigmoid(answer)

    def _composed(self, x: Tensor) -> Tensor:
        over_space, over_time = self.space.weight[..., 0], self.time.weight[:, 0, 0]
        kernel = torch.einsum("och,ct->oht", over_space, over_time)
        assert self.space.bias is not None
        bias = self.space.bias + torch.einsum("och,c->o", over_space, self.time.bias)
        return conv1d(x.squeeze(1), kernel, bias).unsqueeze(2)


def mean_of_15(x: Tensor) -> Tensor:
    """Return the mean of each 15 neighbours along the last dimension: torch's avg_pool1d, in a fifth of its time."""
    two = x[..., :-1] + x[..., 1:]
    four = two[..., :-2] + two[..., 2:]
    eight = four[..., :-4] + four[..., 4:]
    return (eight[..., :-7] + eight[..., 7:] - x[..., 7:-7]) / 15  # both halves have the value in the middle
