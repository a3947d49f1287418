"""The commands about data."""

from __future__ import annotations

from pathlib import Path

from tests.cli.commands import fedloom


def test_data_describe_draws_who_holds_what(folder: Path) -> None:
    done = fedloom("data", "describe", "small.toml", folder=folder)
    assert "Picture: small-data.png" in done.stdout
    assert (folder / "small-data.png").is_file()
    assert max(len(line) for line in done.stdout.splitlines()) <= 80


def test_data_get_offline_names_what_to_fetch_by_hand(folder: Path) -> None:
    (folder / "bin").mkdir()
    done = fedloom("data", "get", "nonsense", folder=folder, code=2)
    assert "mnist" in done.stderr
