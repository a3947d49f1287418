"""The reference work as numpy arrays, the same for every peer: numpy and the standard library only."""

from __future__ import annotations

import argparse
import gzip
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Work:
    """How many clients there are, how many take part, and how each of them trains."""

    clients: int
    cohort: int
    batch: int = 10
    epochs: int = 1
    lr: float = 0.1


WORKS = {
    "2nn": Work(clients=100, cohort=10),
    "cnn": Work(clients=100, cohort=10),
    "lstm": Work(clients=200, cohort=20),
}
VOCABULARY, LENGTH = 10_000, 10
IMAGES, LABELS = "images-idx3-ubyte", "labels-idx1-ubyte"


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The options that all measured processes share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--work", choices=WORKS, default="2nn")
    parser.add_argument("--data", help="folder with MNIST's four idx files, gzipped or not, or the folder above it")
    parser.add_argument("--partition", choices=["iid", "shards"], default="iid")
    parser.add_argument("--evaluate", action="store_true", help="test accuracy after every round")
    parser.add_argument("--lr", type=float, help="learning rate (default: that of the work)")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def mnist_folder(given: str | None) -> Path:
    """The folder with the idx files: as given, or from MNIST_DIR or FEDLOOM_DATA."""
    roots = [root for root in (given, os.environ.get("MNIST_DIR"), os.environ.get("FEDLOOM_DATA")) if root]
    for root in roots:
        for folder in (Path(root), Path(root) / "mnist"):
            if _find(folder, f"train-{IMAGES}") is not None:
                return folder.resolve()
    tried = ", ".join(roots) or "nothing"
    raise SystemExit(f"MNIST's idx files were not found (tried: {tried}). Give --data, MNIST_DIR or FEDLOOM_DATA.")


def mnist(folder: Path, part: str = "train") -> tuple[np.ndarray, np.ndarray]:
    """Images as floats between 0 and 1, and their labels."""
    images, labels = (_read(folder, f"{part}-{kind}") for kind in (IMAGES, LABELS))
    return (images / np.float32(255)).reshape(-1, 28, 28), labels.astype(np.int64)


def deal(x: np.ndarray, y: np.ndarray, partition: str, clients: int) -> tuple[np.ndarray, np.ndarray]:
    """Equal parts with the client as first dimension: at random, or two shards of the examples sorted by label each."""
    random = np.random.default_rng(0)
    if partition == "iid":
        order = random.permutation(len(y)).reshape(clients, -1)
    else:
        shards = np.argsort(y, kind="stable").reshape(2 * clients, -1)
        order = shards[random.permutation(2 * clients)].reshape(clients, -1)
        # pfl-research takes batches in the order of the data, which must not be that of the labels
        order = random.permuted(order, axis=1)
    return x[order], y[order]


def sequences() -> list[tuple[np.ndarray, np.ndarray]]:
    """Random tokens for every client, 80 to 120 sequences each, with the next word as label: only speed matters."""
    random = np.random.default_rng(0)
    sizes = random.integers(80, 121, WORKS["lstm"].clients)
    return [(random.integers(0, VOCABULARY, (n, LENGTH)), random.integers(0, VOCABULARY, n)) for n in sizes]


def _find(folder: Path, name: str) -> Path | None:
    spellings = [name + end for name in (name, name.replace("-idx", ".idx")) for end in ("", ".gz")]
    return next((folder / file for file in spellings if (folder / file).is_file()), None)


def _read(folder: Path, name: str) -> np.ndarray:
    path = _find(folder, name)
    if path is None:
        raise SystemExit(f"{folder} has no {name}, neither plain nor gzipped.")
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    dimensions = raw[3]
    shape = np.frombuffer(raw, ">i4", count=dimensions, offset=4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * dimensions).reshape(shape)
