"""Run commands as a user types them: processes, exit codes, stdout and stderr apart."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fedloom import cli
from tests.forked import run_forked

EXPERIMENT = """
name = "small"
rounds = 4
[data]
source = "digits"
partition = { name = "affinity", clients = 10, probability = 0.7 }
[train]
lr = 0.3
batch_size = 16
[cohort]
count = 5
[algorithm]
fedavg = {}
local = {}
[run]
workers = 1
"""


def fedloom(
    *arguments: str, folder: Path, code: int | None = 0, **environment: str
) -> subprocess.CompletedProcess[str]:
    done = run_forked(*arguments, cwd=folder, COLUMNS="120", **environment)
    assert code is None or done.returncode == code, done.stdout + done.stderr
    return done


def shas(text: str) -> list[str]:
    result = json.loads(text)
    assert result["status"] == "done"
    return [result["weights_sha256"], *(run["weights_sha256"] for run in result["runs"])]


def in_this_process(*arguments: str, monkeypatch: pytest.MonkeyPatch, code: int = 0) -> None:

    monkeypatch.setattr(sys, "argv", ["fedloom", *arguments])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == code


def wait_for(condition: Any, process: subprocess.Popen[Any]) -> None:
    """Poll until something is on disk; the process that makes it must still be alive."""
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, "the process ended before it could be stopped"
        assert time.monotonic() < deadline
        time.sleep(0.005)
