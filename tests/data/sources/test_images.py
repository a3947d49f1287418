from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedloom.data.build import federate
from fedloom.data.sources import source
from fedloom.data.sources.images import NATURAL_CLASSES, NaturalImages
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


def folder(path: Path, classes: tuple[str, ...] = NATURAL_CLASSES) -> Path:
    """Two pictures a class, of one colour each: the class and the number of the picture."""
    for number, name in enumerate(classes):
        (path / name).mkdir(parents=True)
        for which in range(2):
            Image.new("RGB", (30 + which, 20), (10 * number, which, 255)).save(path / name / f"{name}_{which}.png")
    return path


def packed(path: Path, *prefixes: str) -> Path:
    """As Kaggle ships it: everything twice, once inside a folder `data`."""
    target = path.with_suffix(".zip")
    with zipfile.ZipFile(target, "w") as archive:
        for prefix in prefixes:
            for file in sorted(path.rglob("*.png"), reverse=True):
                archive.write(file, prefix + file.relative_to(path).as_posix())
        archive.writestr("__MACOSX/natural_images/airplane/._a.png", b"leftovers")
    return target


@pytest.mark.parametrize("prefixes", [None, ("",), ("natural_images/",), ("data/natural_images/", "natural_images/")])
def test_a_folder_and_its_zip_files_are_the_same(tmp_path: Path, prefixes: tuple[str, ...] | None) -> None:
    path = folder(tmp_path / "natural_images")
    data = NaturalImages(path=path if prefixes is None else packed(path, *prefixes)).load(Path())
    assert (data.x.shape, data.x.dtype, data.scale) == ((16, 3, 80, 80), torch.uint8, 1 / 255)
    assert (data.y.tolist(), data.classes) == (sorted([*range(8)] * 2), NATURAL_CLASSES)
    assert data.x[:, :, 40, 40].tolist() == [[10 * kind, which, 255] for kind in range(8) for which in range(2)]


def test_with_affinity_a_class_is_at_home_with_its_client(tmp_path: Path) -> None:
    data = NaturalImages(path=folder(tmp_path / "n")).load(Path())
    federation = federate(data, partition={"name": "affinity", "probability": 1.0})
    assert [federation.y[start : start + 2].tolist() for start in federation.offsets[:-1]] == [[k, k] for k in range(8)]


def test_pictures_in_deeper_folders_are_not_left_out_silently(tmp_path: Path) -> None:
    (folder(tmp_path / "n") / "cat" / "more").mkdir()
    assert len(NaturalImages(path=tmp_path / "n").load(Path()).y) == 16
    (tmp_path / "n" / "cat" / "cat_0.png").rename(tmp_path / "n" / "cat" / "more" / "cat_0.png")
    with pytest.raises(InputError, match="cat and the folder more in it have pictures"):
        NaturalImages(path=tmp_path / "n").load(Path())


def test_wrong_folders_are_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder(tmp_path / "n", (*NATURAL_CLASSES[1:], "boat"))
    with pytest.raises(InputError, match=r"must have the class folders airplane, .*Missing: airplane; unknown: boat"):
        NaturalImages(path=tmp_path / "n").load(Path())
    (tmp_path / "n" / "boat").rename(tmp_path / "n" / "airplane")
    (tmp_path / "n" / "cat" / "cat_0.png").write_bytes(b"no picture")
    with pytest.raises(InputError, match=r"picture .*cat_0\.png cannot be read"):
        NaturalImages(path=tmp_path / "n").load(Path())
    zipped = packed(tmp_path / "n", "natural_images/")
    with pytest.raises(InputError, match=r"picture .*cat_0\.png cannot be read"):
        NaturalImages(path=zipped).load(Path())
    for file in (tmp_path / "n" / "cat").iterdir():
        file.unlink()
    with pytest.raises(InputError, match=r"class folder .*cat has no pictures"):
        NaturalImages(path=tmp_path / "n").load(Path())
    zipped.write_bytes(zipped.read_bytes()[:-40])
    with pytest.raises(InputError, match=r"n\.zip is not a folder and cannot be read as a zip file"):
        NaturalImages(path=zipped).load(Path())
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path))
    with pytest.raises(InputError, match="Run `fedloom data get natural_images`, or set 'path'"):
        NaturalImages().load(Path())


@pytest.mark.data
def test_real_natural_images(real: Path) -> None:
    data = NaturalImages(path=real / "natural_images" / "natural_images_80x80_jpeg.zip").load(Path())
    assert data.x.shape == (6_899, 3, 80, 80)
    assert data.y.bincount().tolist() == [727, 968, 885, 702, 843, 1000, 788, 986]
    federation = federate(data, partition={"name": "affinity", "probability": 0.7})
    home = [float((federation.y[a:b] == k).sum()) for k, (a, b) in enumerate(zip(*ends(federation), strict=True))]
    assert np.allclose(np.array(home) / data.y.bincount().numpy(), 0.7, atol=0.05)
    originals = NaturalImages(path=real / "natural_images" / "sample_originals").load(Path())
    assert originals.y.bincount().tolist() == [20] * 8


def ends(federation: object) -> tuple[list[int], list[int]]:
    offsets = federation.offsets.tolist()  # type: ignore[attr-defined]
    return offsets[:-1], offsets[1:]
