"""A folder with one sub-folder of pictures for each class, or a zip file of such a folder: yours, or Natural Images."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import PositiveInt

from fedloom.data.federation import Dataset
from fedloom.data.sources.archive import readable, visible
from fedloom.data.sources.base import Source, locate, locate_or_cached
from fedloom.errors import InputError

if TYPE_CHECKING:
    from PIL.Image import Image


SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
NATURAL_CLASSES = ("airplane", "car", "cat", "dog", "flower", "fruit", "motorbike", "person")
Folder: TypeAlias = "Path | zipfile.Path"  # or a file in it


class Images(Source):
    """Pictures in class folders, resized to `size` (height, width) without keeping their proportions."""

    path: Path
    """A folder or zip file with one folder of pictures per class."""
    size: tuple[PositiveInt, PositiveInt] = (80, 80)
    """The height and width that pictures are resized to."""
    channels: Literal[1, 3] = 3
    """1 for grey, 3 for colour."""

    def load(self, base: Path) -> Dataset:
        """Read the pictures. Classes and files are in the order of their names."""
        return self.read(locate(base, self.path))

    def read(self, path: Path, classes: Sequence[str] = ()) -> Dataset:
        """Read the pictures of a folder or zip file; if you give `classes`, its folders must have these names."""
        files = {folder.name: _pictures(folder) for folder in _class_folders(_opened(path), classes)}
        labels = [number for number, pictures in enumerate(files.values()) for _ in pictures]
        x = np.empty((len(labels), self.channels, *self.size), dtype=np.uint8)
        for row, file in enumerate(file for pictures in files.values() for file in pictures):
            x[row] = self._pixels(file)
        return Dataset(torch.from_numpy(x), torch.tensor(labels), classes=tuple(files), scale=1 / 255)

    def _pixels(self, file: Folder) -> NDArray[np.uint8]:
        from PIL import Image  # only pictures need Pillow

        damage = readable(f"The picture {file} cannot be read", "replace or remove it", (Exception,))
        with damage, file.open("rb") as stream, Image.open(stream) as image:  # Pillow raises many kinds of errors
            return pixels(image, self.size, self.channels)


class NaturalImages(Images):
    """Pictures of 80 × 80 in eight classes (Roy et al. 2018); `path` is the folder or the zip file."""

    path: Path | None = None  # type: ignore[assignment]
    """The folder or the zip file. By default, what `fedloom data get natural_images` downloaded."""

    def load(self, base: Path) -> Dataset:
        """Read the pictures. There must be exactly the eight classes."""
        found = locate_or_cached(base, self.path, "natural_images")
        archive = found / "natural_images.zip"
        return self.read(archive if archive.is_file() else found, NATURAL_CLASSES)


def pixels(image: Image, size: tuple[int, int], channels: int) -> NDArray[np.uint8]:
    """Return a picture as bytes of shape channels × height × width."""
    from PIL.Image import Resampling

    height, width = size
    converted = _eight_bits(image).convert("RGB" if channels == 3 else "L")
    resized = converted.resize((width, height), Resampling.BILINEAR)
    return np.moveaxis(np.array(resized, dtype=np.uint8).reshape(height, width, channels), 2, 0)


def _eight_bits(image: Any) -> Any:
    """Scale pictures of 16 bits per pixel to 8 bits: Pillow's own conversions cut them off at 255."""
    from PIL import Image

    if not image.mode.startswith("I"):
        return image
    return Image.fromarray((np.asarray(image) // 257).clip(0, 255).astype(np.uint8))


def _opened(path: Path) -> Folder:
    advice = "'path' must be one of them, with a sub-folder of pictures for each class"
    with readable(f"{path} is not a folder and cannot be read as a zip file", advice):
        return path if path.is_dir() else zipfile.Path(path)


def _class_folders(folder: Folder, wanted: Sequence[str]) -> list[Folder]:
    """Return the class folders. They may be deeper inside: archives often add a level."""
    level, roots = [folder], list[Folder]()
    while level and not roots:
        roots = [outer for outer in level if any(_has_pictures(inner) for inner in _folders(outer))]
        level = [inner for outer in level for inner in _folders(outer)]
    if len(roots) > 1:
        places = ", ".join(root.name for root in roots)
        raise InputError(f"The folder {folder} has class folders in several places: {places}. Set 'path' to one.")
    found = _folders(roots[0] if roots else folder)
    if not found:
        raise InputError(
            f"The folder {folder} has no sub-folders: there must be one for each class, with its pictures."
        )
    names = {inner.name for inner in found}
    if wanted and names != set(wanted):
        missing, unknown = sorted(set(wanted) - names), sorted(names - set(wanted))
        raise InputError(
            f"The folder {folder} must have the class folders {', '.join(wanted)}. "
            f"Missing: {', '.join(missing) or 'none'}; unknown: {', '.join(unknown) or 'none'}."
        )
    return found


def _folders(folder: Folder) -> list[Folder]:
    return sorted((inner for inner in folder.iterdir() if inner.is_dir() and visible(inner.name)), key=_name)


def _pictures(folder: Folder) -> list[Folder]:
    files = sorted((file for file in folder.iterdir() if _is_picture(file)), key=_name)
    if not files:
        raise InputError(f"The class folder {folder} has no pictures ({', '.join(SUFFIXES)}): add some or remove it.")
    for inner in _folders(folder):
        if _has_pictures(inner):
            raise InputError(
                f"Both the class folder {folder} and the folder {inner.name} in it have pictures: move them into the "
                "class folder, or out of it."
            )
    return files


def _has_pictures(folder: Folder) -> bool:
    return any(_is_picture(file) for file in folder.iterdir())


def _is_picture(file: Folder) -> bool:
    return PurePath(file.name).suffix.lower() in SUFFIXES and visible(file.name)


def _name(file: Folder) -> str:
    return file.name
