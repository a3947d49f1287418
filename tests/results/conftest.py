"""The small finished comparison as `RunData`."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedloom.results.run_data import RunData


@pytest.fixture
def run(comparison: Path) -> RunData:
    return RunData.read(comparison)
