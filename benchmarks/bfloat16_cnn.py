"""The published CNNs with channels last and products in bfloat16; weights, optimiser and loss stay in float32."""

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from fedloom.models.mnist_cnn import MnistCNN
from fedloom.models.natural_images_cnn import NaturalImagesCNN


class _Bfloat16(nn.Module):
    """A net of pictures, computed faster and less exactly."""

    def forward(self, x: Tensor) -> Tensor:
        """Return one logit per class, in the numbers of the input."""
        pictures = x.reshape(-1, *self.inputs).contiguous(memory_format=torch.channels_last)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            return self._logits(pictures).to(x.dtype)

    def _logits(self, pictures: Tensor) -> Tensor:
        return super().forward(pictures)


class Bfloat16CNN(_Bfloat16, NaturalImagesCNN):
    """NaturalImagesCNN, for `images-iid` and `images-skewed`."""


class Bfloat16MnistCNN(_Bfloat16, MnistCNN):
    """MnistCNN, for `mcmahan-table1-cnn`, `mcmahan-table2` and `mcmahan-figure2`."""

    def _logits(self, pictures: Tensor) -> Tensor:
        if self.training:
            return super()._logits(pictures)
        # half of an evaluation is torch's max_pool2d, which also looks for the place of each maximum
        seen = relu(_largest_of_four(self.first(pictures)))
        seen = relu(_largest_of_four(self.second(seen)))
        return self.out(relu(self.hidden(seen.flatten(1))))


def _largest_of_four(x: Tensor) -> Tensor:
    rows = torch.maximum(x[:, :, ::2], x[:, :, 1::2])
    return torch.maximum(rows[..., ::2], rows[..., 1::2])
