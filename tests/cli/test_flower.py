"""The Flower commands. tests/flower runs what they write."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.cli.commands import in_this_process


def test_an_experiment_is_written_as_an_app(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    in_this_process("flower", "app", "small.toml", "app", "--set", "rounds=2", monkeypatch=monkeypatch)
    assert 'name = "small"' in (folder / "app" / "pyproject.toml").read_text()


@pytest.mark.parametrize("arguments", [(), ("app", "--site", "site.toml")])
def test_a_worker_needs_a_site_or_an_app_and_not_both(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("flwr")
    in_this_process("flower", "worker", *arguments, monkeypatch=monkeypatch, code=2)
    assert "Give either --site SITE.toml, or an app's folder" in capsys.readouterr().err


def test_without_flower_a_worker_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    in_this_process("flower", "worker", monkeypatch=monkeypatch, code=2)
    assert "pip install 'fedloom[flower]'" in capsys.readouterr().err
