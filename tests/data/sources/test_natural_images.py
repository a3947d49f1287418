from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedloom.data.build import federate
from fedloom.data.sources.natural_images import CLASSES, NaturalImages
from fedloom.errors import InputError


def folder(path: Path, classes: tuple[str, ...] = CLASSES) -> Path:
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
    assert (data.y.tolist(), data.classes) == (sorted([*range(8)] * 2), CLASSES)
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
    folder(tmp_path / "n", (*CLASSES[1:], "boat"))
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
