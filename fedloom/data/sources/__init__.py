"""Where examples come from: one loader per file, found by the name that experiment files use."""

from __future__ import annotations

from fedloom.data.sources.base import Progress, Source
from fedloom.data.sources.csv import Csv
from fedloom.data.sources.custom import custom
from fedloom.data.sources.digits import Digits
from fedloom.data.sources.eeg import Eeg
from fedloom.data.sources.femnist import Femnist
from fedloom.data.sources.hdf5 import Hdf5
from fedloom.data.sources.heart_disease import HeartDisease
from fedloom.data.sources.huggingface import HuggingFace
from fedloom.data.sources.idx import FashionMnist, Mnist
from fedloom.data.sources.images import Images
from fedloom.data.sources.leaf import Leaf
from fedloom.data.sources.leaf_reddit import LeafReddit
from fedloom.data.sources.natural_images import NaturalImages
from fedloom.data.sources.npz import Npz
from fedloom.data.sources.postures import Postures
from fedloom.data.sources.shakespeare import Shakespeare
from fedloom.data.sources.texts import Texts
from fedloom.errors import InputError, nearest

__all__ = ["SOURCES", "Progress", "Source", "source"]

SOURCES: dict[str, type[Source]] = {
    "digits": Digits,
    "mnist": Mnist,
    "fashion_mnist": FashionMnist,
    "csv": Csv,
    "images": Images,
    "npz": Npz,
    "eeg": Eeg,
    "femnist": Femnist,
    "hdf5": Hdf5,
    "texts": Texts,
    "leaf_reddit": LeafReddit,
    "shakespeare": Shakespeare,
    "heart_disease": HeartDisease,
    "huggingface": HuggingFace,
    "leaf": Leaf,
    "natural_images": NaturalImages,
    "postures": Postures,
}


def source(name: str) -> type[Source]:
    """The source of that name, or the one that calls `my_module:loader` or `file.py:loader`.

    >>> source("digits")(image=True)
    Digits(image=True)
    """
    if ":" in name:
        return custom(name)
    if name not in SOURCES:
        raise InputError(
            f"There is no source '{name}'. Known: {', '.join(SOURCES)}, or a function of your own as "
            f"'my_module:loader' or 'file.py:loader'.{nearest(name, SOURCES)}"
        )
    return SOURCES[name]
