"""The published CNNs with channels last and products in bfloat16; weights, optimiser and loss stay in float32."""

import torch
from torch import Tensor, nn

from fedloom.models.mnist_cnn import MnistCNN
from fedloom.models.natural_images_cnn import NaturalImagesCNN


class _Bfloat16(nn.Module):
    """A net of pictures, computed faster and less exactly."""

    def forward(self, x: Tensor) -> Tensor:
        """Return one logit per class, in the numbers of the input."""
        pictures = x.reshape(-1, *self.inputs).contiguous(memory_format=torch.channels_last)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            return super().forward(pictures).to(x.dtype)


class Bfloat16CNN(_Bfloat16, NaturalImagesCNN):
    """NaturalImagesCNN, for `images-iid` and `images-skewed`."""


class Bfloat16MnistCNN(_Bfloat16, MnistCNN):
    """MnistCNN, for `mcmahan-table1-cnn`, `mcmahan-table2` and `mcmahan-figure2`."""
