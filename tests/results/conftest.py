"""The small finished comparison as `RunData`."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedloom.results.run_data import RunData
from tests.experiment.conftest import federation, task  # noqa: F401 (fixtures for small runs)


@pytest.fixture
def run(comparison: Path) -> RunData:
    return RunData.read(comparison)
