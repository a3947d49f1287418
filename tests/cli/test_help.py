"""The command line itself."""

from __future__ import annotations

import re
import subprocess
import sys


def test_help_and_version_do_not_load_torch() -> None:
    script = "import sys, fedloom.cli\nprint([name for name in ('torch', 'pandas', 'numpy') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    version = subprocess.run(
        [sys.executable, "-m", "fedloom.cli", "--version"], capture_output=True, text=True, check=True
    )
    assert re.match(r"fedloom \d+\.\d+\.\d+ \(torch 2\.", version.stdout)
