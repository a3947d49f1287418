"""Natural Images: 6,899 pictures of eight kinds of things, one folder each."""

from __future__ import annotations

from pathlib import Path

from fedloom.data.federation import Dataset
from fedloom.data.sources.base import locate_or_cached
from fedloom.data.sources.images import Images

CLASSES = ("airplane", "car", "cat", "dog", "flower", "fruit", "motorbike", "person")


class NaturalImages(Images):
    """Pictures of 80 × 80 in eight classes (Roy et al. 2018); `path` is the folder or the zip file."""

    path: Path | None = None  # type: ignore[assignment]
    """The folder or the zip file. By default, what `fedloom data get natural_images` downloaded."""

    def load(self, base: Path) -> Dataset:
        """Read the pictures. There must be exactly the eight classes."""
        found = locate_or_cached(base, self.path, "natural_images")
        archive = found / "natural_images.zip"
        return self.read(archive if archive.is_file() else found, CLASSES)
