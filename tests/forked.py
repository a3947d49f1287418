"""`fedloom` processes that start at once: they are forked from a server that has imported fedloom and torch already.

Starting Python and importing torch takes seconds of a core, a fork some milliseconds. Apart from that these are
processes like any other, with memory, files, sockets and signals of their own. Only functions that are registered with
`atexit` do not run at their end.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from unittest.mock import patch

import fedloom.cli
from fedloom import faults

ROOT = Path(__file__).parents[1]
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["tests.preloaded"])


class Forked:
    """A forked `fedloom` process with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, arguments: list[str], cwd: Path, env: Mapping[str, str], out: Path, err: Path) -> None:
        self.arguments = arguments
        for path in (out, err):
            path.touch()  # tests read it before the process writes
        given = (arguments, cwd, {**os.environ, "PYTHONPATH": str(ROOT), **env}, out, err)
        self._process = _SERVER.Process(target=_run, args=given, daemon=True)
        with patch.dict(os.environ, OMP_NUM_THREADS="1"):  # for the server, which the first process starts
            self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(["fedloom", *self.arguments], timeout or 0.0)
        return code

    def kill(self) -> None:
        self._process.kill()

    def terminate(self) -> None:
        self._process.terminate()


def run_forked(*arguments: str, cwd: Path, timeout: float = 180.0, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command and wait for it, as `subprocess.run` does with `capture_output`."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        process = Forked(list(arguments), cwd, env, out, err)
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
        return subprocess.CompletedProcess(["fedloom", *arguments], code, out.read_text(), err.read_text())


def _run(arguments: list[str], cwd: Path, env: dict[str, str], out: Path, err: Path) -> None:
    """Become `python -m fedloom ARGUMENTS` in the forked process."""
    for path, number in ((out, 1), (err, 2)):
        with open(path, "ab") as file:
            os.dup2(file.fileno(), number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    importlib.reload(faults)  # it reads the environment when it is imported
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests that a shell runs in the background ignore it
    sys.argv = ["fedloom", *arguments]
    fedloom.cli.main()
