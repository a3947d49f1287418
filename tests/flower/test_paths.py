"""Where fedloom's files are on a machine that runs Flower."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedloom.flower.paths import data_mark, partition, state_folder


def test_data_is_told_apart_by_what_it_is_made_of(tmp_path: Path) -> None:
    def mark(loader: str = "a", **config: Any) -> str:
        (tmp_path / "mine.py").write_text(loader)
        (tmp_path / "experiment.toml").write_text('[data]\nsource = "mine.py:load"\n')
        return data_mark(tmp_path, {"partition-id": 0, "num-partitions": 2, **config})

    assert mark() == mark()
    assert mark() != mark("b")
    assert mark(site="kerry.toml") == ""


def test_where_a_node_keeps_its_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    assert state_folder({"site": "/data/kerry.toml"}) == Path("/data/kerry-state")
    assert state_folder({"site": "/data/kerry.toml", "state": "/var/kerry"}) == Path("/var/kerry")
    config = {"partition-id": 1, "num-partitions": 3}
    assert partition(config) == (1, 3)
    assert state_folder(config) == tmp_path / "fedloom" / "partitions" / "1-of-3"
