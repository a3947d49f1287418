"""`fedloom watch` as a user types it."""

from __future__ import annotations

import os
import re
import signal
import socket
from pathlib import Path

import httpx
import pytest

from fedloom.cli import watching
from tests.cli.commands import fedloom, in_this_process, wait_for
from tests.forked import Forked
from tests.watch.growing_run import GrowingRun


def test_it_serves_the_page_of_several_runs_until_it_is_interrupted(tmp_path: Path) -> None:
    for name in ("one", "two"):
        GrowingRun(tmp_path / name).add(1).store.close()
    log = tmp_path / "log.txt"
    process = Forked(["watch", "one", "two", "--port", "0", "--no-browser"], tmp_path, {}, log, log)
    wait_for(lambda: "enter this token" in log.read_text(), process)  # type: ignore[arg-type]
    found = re.search(r"Watching at (http://127\.0\.0\.1:\d+/)\n", log.read_text())
    assert found is not None
    assert [one["folder"] for one in httpx.get(f"{found[1]}api/runs").json()] == ["one", "two"]
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(60) == 130


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    GrowingRun(tmp_path / "run").add(1).store.close()
    assert (
        "nothing is not a run folder: there is no such folder."
        in fedloom("watch", "nothing", folder=tmp_path, code=1).stderr
    )
    assert "run is named twice" in fedloom("watch", "run", "./run", folder=tmp_path, code=2).stderr
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        said = fedloom("watch", "run", "--port", port, folder=tmp_path, code=2).stderr
    assert f"The page cannot use 127.0.0.1, port {port}: Address already in use. Choose another with --port." in said


def test_a_missing_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = watching.need.__globals__["importlib"].util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "uvicorn" else found(name))
    in_this_process("watch", str(tmp_path), monkeypatch=monkeypatch, code=2)
    assert "The page needs uvicorn: pip install 'fedloom[watch]'." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variables", "screen"), [({}, False), ({"DISPLAY": ":0"}, True), ({"WAYLAND_DISPLAY": "w"}, True)]
)
def test_a_browser_is_opened_only_on_a_screen(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], screen: bool
) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert watching.has_screen() == screen


def test_the_demo_can_be_watched_live(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    process = Forked(["demo", "--live", "--port", "0", "--out", "run", "-q"], tmp_path, {}, log, log)
    wait_for(lambda: "enter this token" in log.read_text(), process)  # type: ignore[arg-type]
    found = re.search(r"Watching at (http://127\.0\.0\.1:\d+/)\n", log.read_text())
    assert found is not None
    begun = (tmp_path / "run" / "cells").exists
    wait_for(lambda: begun() and list((tmp_path / "run" / "cells").glob("*/round-*.json")), process)  # type: ignore[arg-type]
    (run,) = httpx.get(f"{found[1]}api/runs").json()
    assert run["folder"] == "run"
    labels = {one["label"] for one in run["labels"]}
    assert {"pooled", "local", "peer-weighted"} <= labels
    process.kill()
    process.wait(20)
