"""A folder with a small experiment."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.commands import EXPERIMENT


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "small.toml").write_text(EXPERIMENT)
    return tmp_path
