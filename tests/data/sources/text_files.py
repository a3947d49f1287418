"""Write texts as JSON lines, load them, and read the examples as words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedloom.data.federation import Dataset
from fedloom.data.sources import source


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def load(name: str, path: Path, **fields: Any) -> Dataset:
    return source(name)(path=path.name, **fields).load(path.parent)


def read(data: Dataset) -> dict[str, list[str]]:
    """Every author's examples in words: without padding, the label last."""
    found: dict[str, list[str]] = {}
    assert data.client is not None
    for client, x, y in zip(data.client, data.x.tolist(), data.y.tolist(), strict=True):
        seen = [data.classes[word] for word in x if word]
        found.setdefault(str(client), []).append(" ".join([*seen, data.classes[y]]))
    return found
