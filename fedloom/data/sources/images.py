"""A folder with one sub-folder of pictures for each class."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import PositiveInt

from fedloom.data.federation import Dataset
from fedloom.data.sources.base import Progress, Source, locate
from fedloom.errors import InputError

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")


class Images(Source):
    """Pictures in class folders, resized to `size` (height, width) without keeping their proportions."""

    path: Path
    size: tuple[PositiveInt, PositiveInt] = (80, 80)
    channels: Literal[1, 3] = 3

    def load(self, base: Path, progress: Progress | None = None) -> Dataset:
        """Classes and files in the order of their names; `progress` is called after every picture."""
        folder = locate(base, self.path)
        files = {name: _pictures(folder / name) for name in _classes(folder)}
        labels = [number for number, pictures in enumerate(files.values()) for _ in pictures]
        x = np.empty((len(labels), self.channels, *self.size), dtype=np.uint8)
        for place, file in enumerate(file for pictures in files.values() for file in pictures):
            x[place] = self._pixels(file)
            if progress is not None:
                progress(folder.name, place + 1, len(labels))
        return Dataset(torch.from_numpy(x), torch.tensor(labels), classes=tuple(files), scale=1 / 255)

    def _pixels(self, file: Path) -> NDArray[np.uint8]:
        from PIL import Image  # only this source needs Pillow

        height, width = self.size
        try:
            with Image.open(file) as image:
                mode = "RGB" if self.channels == 3 else "L"
                resized = image.convert(mode).resize((width, height), Image.Resampling.BILINEAR)
                pixels = np.array(resized, dtype=np.uint8).reshape(height, width, self.channels)
        except Exception as error:  # Pillow's decoders raise what they like: OSError, SyntaxError, struct.error, …
            raise InputError(f"The picture {file} cannot be read ({error}): replace or remove it.") from None
        return np.moveaxis(pixels, 2, 0)


def _classes(folder: Path) -> list[str]:
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder: 'path' must be one, with a sub-folder of pictures for each class.")
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not names:
        raise InputError(
            f"The folder {folder} has no sub-folders: there must be one for each class, with its pictures."
        )
    return names


def _pictures(folder: Path) -> list[Path]:
    files = sorted(
        file for file in folder.iterdir() if file.suffix.lower() in SUFFIXES and not file.name.startswith(".")
    )
    if not files:
        raise InputError(f"The class folder {folder} has no pictures ({', '.join(SUFFIXES)}): add some or remove it.")
    return files
