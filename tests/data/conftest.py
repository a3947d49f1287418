"""Real data beside the project, for the tests that want it."""

import os
from pathlib import Path

import pytest


@pytest.fixture
def real() -> Path:
    folder = Path(os.environ.get("FEDLOOM_DATA") or Path(__file__).parents[2].parent / "shared" / "data")
    if not folder.is_dir():
        pytest.skip(f"there is no real data at {folder}; set FEDLOOM_DATA")
    return folder
