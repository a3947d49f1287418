"""The net for pictures has the published layers."""

from __future__ import annotations

from fedloom.models import build
from tests.models.helpers import parameters


def test_the_net_for_pictures_has_the_published_layers() -> None:
    counts = {name: parameters(part) for name, part in build("natural_images_cnn").named_children()}
    assert list(counts.values()) == [896, 18_496, 73_856, 147_584, 295_168, 2_359_552, 2_056]
