from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedloom.data.build import federate
from fedloom.data.federation import Dataset, Federation
from fedloom.data.figure import _doubling, _step, plot, shorten, shorten_all


def small() -> Federation:
    """a: five of label 0; b: three of label 0 and seven of label 1; c: one of label 1."""
    labels = torch.tensor([0] * 5 + [0] * 3 + [1] * 7 + [1])
    client = np.array(["a"] * 5 + ["b"] * 10 + ["c"])
    return federate(Dataset(torch.zeros(16, 1), labels, client=client, classes=("no", "yes", "maybe")))


@pytest.mark.parametrize("clients", [1, 4, 10, 100, 10_000])
@pytest.mark.parametrize("kind", ["classes", "words", "regression"])
def test_pictures_of_all_sizes(tmp_path: Path, clients: int, kind: str) -> None:
    numbers = torch.arange(20_000)
    data = {
        "classes": Dataset(torch.zeros(20_000, 1), numbers % 10, classes=tuple("0123456789")),
        "words": Dataset(torch.zeros(20_000, 1), numbers % 5000, classes=tuple(map(str, range(5000)))),
        "regression": Dataset(torch.zeros(20_000, 1), numbers.float().sin()),
    }[kind]
    plot(federate(data, partition={"name": "quantity", "clients": clients}), tmp_path / "picture.png")
    with Image.open(tmp_path / "picture.png") as picture:
        assert picture.width == 1500
        assert len(set(picture.convert("L").resize((150, 100)).tobytes())) > 10


def test_pictures_in_other_formats(tmp_path: Path) -> None:
    plot(small(), tmp_path / "picture.svg")
    assert "<svg" in (tmp_path / "picture.svg").read_text()
    plot(small(), tmp_path / "picture.pdf")
    assert b"/FontFile2" in (tmp_path / "picture.pdf").read_bytes()  # TrueType


def test_the_legend_names_the_splits_that_there_are(tmp_path: Path) -> None:
    data = Dataset(torch.zeros(20, 1), torch.arange(20) % 2, classes=("no", "yes"))
    plot(federate(data, partition={"name": "iid", "clients": 2}, split=[0.5, 0, 0.5]), tmp_path / "picture.svg")
    picture = (tmp_path / "picture.svg").read_text()  # every text is there as a comment beside its outlines
    assert "<!-- train -->" in picture
    assert "<!-- test -->" in picture
    assert "validation" not in picture


def test_bins_of_sizes_cover_every_client() -> None:
    assert _doubling(1, 9).tolist() == [1, 2, 3, 4, 6, 8, 12]
    for low, high in ((1, 1), (1, 60), (3, 200), (17, 4096), (5, 6143)):
        edges = _doubling(low, high)
        assert edges[0] <= low
        assert edges[-1] > high
        assert (np.diff(edges) > 0).all()


def test_ticks_and_names_are_thinned() -> None:
    assert [_step(count, 25) for count in (1, 25, 26, 100, 200, 251)] == [1, 1, 2, 5, 10, 20]
    assert shorten("a hospital, number 17", 10) == "a hos…r 17"
    assert shorten("short", 10) == "short"
    assert shorten("client-000000017", 10) == "clien…0017"
    assert shorten("a$b", 10) == r"a\$b"


def test_shortened_names_of_a_figure_stay_different() -> None:
    sites = [f"東京大学医学部附属病院 {number} with a long name" for number in (0, 1, 11, 14, 110)]
    for length in (8, 10, 14, 18):
        short = shorten_all([*sites, "Zürich"], length)
        assert len({*short}) == 6
        assert max(map(len, short)) <= length
        assert [name.strip("東京大学医部附属病院…") for name in short[:5]] == ["0", "1", "11", "14", "110"]
    both_ends = [f"{start} of a hospital of the city {end}" for start in ("north", "south") for end in ("east", "west")]
    assert len({*shorten_all(both_ends, 8)}) == 4
    assert shorten_all(["one", "a hospital, number 17"], 10) == ["one", "a hos…r 17"]
