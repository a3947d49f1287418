from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedloom.data.sources import source
from fedloom.errors import InputError
from tests.data.sources.loading import load

TABLE = "Class,User,X0,Y0\n1,b,0.5,?\n2,a,1,2\n\n1,b,-3e2, 4 \n"


def table(folder: Path, text: str = TABLE, name: str = "data.csv") -> Path:
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


def picture(path: Path, colour: tuple[int, int, int], size: tuple[int, int] = (6, 4)) -> None:
    path.parent.mkdir(exist_ok=True, parents=True)
    Image.new("RGB", size, colour).save(path)


def test_folders_of_pictures(tmp_path: Path) -> None:
    picture(tmp_path / "dog" / "b.png", (10, 20, 30))
    picture(tmp_path / "cat" / "z.png", (1, 2, 3), size=(50, 2))
    picture(tmp_path / "dog" / "a.PNG", (40, 50, 60))
    (tmp_path / "dog" / "notes.txt").write_text("no picture")
    (tmp_path / ".hidden").mkdir()
    data = source("images")(path=".", size=[2, 3]).load(tmp_path)
    assert (data.x.shape, data.x.dtype, data.scale) == ((3, 3, 2, 3), torch.uint8, 1 / 255)
    assert (data.y.tolist(), data.classes) == ([0, 1, 1], ("cat", "dog"))
    assert data.x[:, :, 1, 2].tolist() == [[1, 2, 3], [40, 50, 60], [10, 20, 30]]


def test_grey_pictures(tmp_path: Path) -> None:
    picture(tmp_path / "a" / "1.png", (90, 90, 90))
    data = load("images", path=tmp_path, size=[5, 5], channels=1)
    assert data.x.shape == (1, 1, 5, 5)
    assert data.x.unique().tolist() == [90]


def test_pixels_keep_their_place(tmp_path: Path) -> None:
    values = np.arange(24, dtype=np.uint8).reshape(2, 4, 3) * 10
    (tmp_path / "a").mkdir()
    Image.fromarray(values).save(tmp_path / "a" / "1.png")
    assert load("images", path=tmp_path, size=[2, 4]).x[0].permute(1, 2, 0).tolist() == values.tolist()


@pytest.mark.parametrize("suffix", ["png", "tif", "pgm"])
def test_sixteen_bits_become_eight(tmp_path: Path, suffix: str) -> None:
    values = (np.arange(8, dtype=np.uint16).reshape(2, 4) * 257 * 30) + 100
    (tmp_path / "a").mkdir()
    Image.fromarray(values).save(tmp_path / "a" / f"1.{suffix}")
    assert load("images", path=tmp_path, size=[2, 4], channels=1).x[0, 0].flatten().tolist() == list(range(0, 240, 30))


def test_class_folders_in_two_places_are_not_guessed_at(tmp_path: Path) -> None:
    for part in ("train", "test"):
        picture(tmp_path / "pictures" / part / "cat" / "1.png", (1, 2, 3))
    with pytest.raises(InputError, match=r"in several places: test, train\. Set 'path' to one"):
        load("images", path=tmp_path)
    assert len(load("images", path=tmp_path / "pictures" / "train").y) == 1


@pytest.mark.parametrize("content", [b"not a picture", b"", b"\x89PNG\r\n\x1a\n" + bytes(40)])
def test_a_broken_picture_is_named(tmp_path: Path, content: bytes) -> None:
    picture(tmp_path / "a" / "1.png", (1, 1, 1))
    (tmp_path / "a" / "2.png").write_bytes(content)
    with pytest.raises(InputError, match=r"picture .*2\.png cannot be read .*replace or remove it"):
        load("images", path=tmp_path)


def test_a_cut_off_picture_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    noise = np.random.default_rng(1).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "a" / "1.jpg")
    whole = (tmp_path / "a" / "1.jpg").read_bytes()
    (tmp_path / "a" / "1.jpg").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=r"1\.jpg cannot be read"):
        load("images", path=tmp_path)


def test_folders_without_pictures(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no sub-folders"):
        load("images", path=tmp_path)
    (tmp_path / "a").mkdir()
    with pytest.raises(InputError, match=r"class folder .*a has no pictures"):
        load("images", path=tmp_path)
    with pytest.raises(InputError, match="is not a folder"):
        load("images", path=table(tmp_path))


@pytest.mark.parametrize("fields", [{"size": [80]}, {"size": 80}, {"size": [80, 0]}, {"channels": 2}])
def test_wrong_image_fields_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"'{next(iter(fields))}"):
        source("images")(path=".", **fields)
