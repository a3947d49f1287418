"""Marks that only these tests have."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "crosscheck: compares with other people's packages, where they are installed")
