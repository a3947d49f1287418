"""A folder with one sub-folder of pictures for each class, or a zip file of it."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import PositiveInt

from fedloom.data.federation import Dataset
from fedloom.data.sources.archive import UNREADABLE, visible
from fedloom.data.sources.base import Progress, Source, locate
from fedloom.errors import InputError

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
Place: TypeAlias = "Path | zipfile.Path"


class Images(Source):
    """Pictures in class folders, resized to `size` (height, width) without keeping their proportions."""

    path: Path
    """A folder or zip file with one folder of pictures per class."""
    size: tuple[PositiveInt, PositiveInt] = (80, 80)
    """The height and width that pictures are resized to."""
    channels: Literal[1, 3] = 3
    """1 for grey, 3 for colour."""

    def load(self, base: Path, progress: Progress | None = None) -> Dataset:
        """Classes and files in the order of their names; `progress` is called after every picture."""
        return self.read(locate(base, self.path), progress)

    def read(self, path: Path, progress: Progress | None = None, classes: Sequence[str] = ()) -> Dataset:
        """The pictures of a folder or zip file; `classes` are the names that its folders must have."""
        folder = _opened(path)
        files = {place.name: _pictures(place) for place in _classes(folder, classes)}
        labels = [number for number, pictures in enumerate(files.values()) for _ in pictures]
        x = np.empty((len(labels), self.channels, *self.size), dtype=np.uint8)
        for place, file in enumerate(file for pictures in files.values() for file in pictures):
            x[place] = self._pixels(file)
            if progress is not None:
                progress(path.name, place + 1, len(labels))
        return Dataset(torch.from_numpy(x), torch.tensor(labels), classes=tuple(files), scale=1 / 255)

    def _pixels(self, file: Place) -> NDArray[np.uint8]:
        from PIL import Image  # only pictures need Pillow

        try:
            with file.open("rb") as stream, Image.open(stream) as image:
                return pixels(image, self.size, self.channels)
        except Exception as error:  # Pillow's decoders raise what they like: OSError, SyntaxError, struct.error, …
            raise InputError(f"The picture {file} cannot be read ({error}): replace or remove it.") from None


def pixels(image: Image, size: tuple[int, int], channels: int) -> NDArray[np.uint8]:
    """A picture as bytes of shape channels × height × width."""
    from PIL.Image import Resampling

    height, width = size
    converted = _eight_bits(image).convert("RGB" if channels == 3 else "L")
    resized = converted.resize((width, height), Resampling.BILINEAR)
    return np.moveaxis(np.array(resized, dtype=np.uint8).reshape(height, width, channels), 2, 0)


def _eight_bits(image: Any) -> Any:
    """A picture, with 16 bits a pixel brought to 8: Pillow's own conversions cut them off at 255."""
    from PIL import Image

    if not image.mode.startswith("I"):
        return image
    return Image.fromarray((np.asarray(image) // 257).clip(0, 255).astype(np.uint8))


def _opened(path: Path) -> Place:
    if path.is_dir():
        return path
    try:
        return zipfile.Path(path)
    except UNREADABLE as error:
        raise InputError(
            f"{path} is not a folder, and cannot be read as a zip file either ({error}): 'path' must be one of them, "
            "with a sub-folder of pictures for each class."
        ) from None


def _classes(folder: Place, wanted: Sequence[str]) -> list[Place]:
    """The class folders, in the outermost folder that has sub-folders with pictures: archives often add a level."""
    found = _folders(_root(folder))
    names = [place.name for place in found]
    if not found:
        raise InputError(
            f"The folder {folder} has no sub-folders: there must be one for each class, with its pictures."
        )
    if wanted and names != list(wanted):
        missing, more = sorted(set(wanted) - set(names)), sorted(set(names) - set(wanted))
        raise InputError(
            f"The folder {folder} must have the class folders {', '.join(wanted)}. "
            f"Missing: {', '.join(missing) or 'none'}; unknown: {', '.join(more) or 'none'}."
        )
    return found


def _root(folder: Place) -> Place:
    level = [folder]
    while level:
        found = [place for place in level if _has_classes(place)]
        if len(found) > 1:
            names = ", ".join(place.name for place in found)
            raise InputError(f"The folder {folder} has class folders in several places: {names}. Set 'path' to one.")
        if found:
            return found[0]
        level = [inner for place in level for inner in _folders(place)]
    return folder


def _has_classes(folder: Place) -> bool:
    return any(_is_picture(file) for inner in _folders(folder) for file in inner.iterdir())


def _folders(folder: Place) -> list[Place]:
    inside: Iterator[Place] = iter(folder.iterdir())
    return sorted((place for place in inside if place.is_dir() and visible(place.name)), key=lambda place: place.name)


def _pictures(folder: Place) -> list[Place]:
    files = sorted((file for file in folder.iterdir() if _is_picture(file)), key=lambda file: file.name)
    if not files:
        raise InputError(f"The class folder {folder} has no pictures ({', '.join(SUFFIXES)}): add some or remove it.")
    deeper = next((inner for inner in _folders(folder) if any(map(_is_picture, inner.iterdir()))), None)
    if deeper is not None:
        raise InputError(
            f"The class folder {folder} has pictures, and so has the folder {deeper.name} in it: move them into the "
            "class folder, or out of it."
        )
    return files


def _is_picture(file: Place) -> bool:
    return PurePath(file.name).suffix.lower() in SUFFIXES and visible(file.name)
