from __future__ import annotations

import torch

from tests.data.sources.loading import load


def test_digits_are_bytes_with_a_scale() -> None:
    data = load("digits")
    assert (data.x.shape, data.x.dtype, data.scale) == ((1797, 64), torch.uint8, 1 / 16)
    assert data.x.max() == 16
    assert data.classes == tuple("0123456789")
    assert data.y.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    image = load("digits", image=True)
    assert image.x.shape == (1797, 1, 8, 8)
    assert image.x.reshape(1797, 64).equal(data.x)
