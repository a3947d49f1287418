"""What `pip install fedloom` brings is enough for experiments: extras are needed only where somebody asks for them."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from fedloom.files import tomllib

ROOT = Path(__file__).parents[1]
WITHOUT = """
import json, sys
from importlib.machinery import PathFinder
blocked = set(json.loads(sys.argv.pop(1)))
class Base(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in blocked else super().find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(PathFinder)] = Base
"""
EXPERIMENT = """
name = "base"
rounds = 2
seeds = 2
[data]
source = "digits"
partition = { name = "iid", clients = 3 }
[algorithm]
fedavg = {}
local = {}
"""


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def brought() -> set[str]:
    """The packages that a plain install brings, by name; what is not installed here is left out."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    waiting = [(Requirement(one), {""}) for one in project["dependencies"]]
    found: set[str] = set()
    while waiting:
        wanted, extras = waiting.pop()
        if wanted.marker is not None and not any(wanted.marker.evaluate({"extra": extra}) for extra in extras):
            continue
        name = plain(wanted.name)
        with contextlib.suppress(metadata.PackageNotFoundError):
            if name not in found:
                found.add(name)
                waiting += [(Requirement(one), wanted.extras or {""}) for one in metadata.requires(name) or ()]
    return found


@pytest.fixture(scope="module")
def blocked() -> str:
    """The top-level modules of all packages here that a plain install does not bring."""
    base = {*brought(), "fedloom", "optree"}  # torch imports optree if its metadata are there
    owners = metadata.packages_distributions()
    names = [module for module, packages in owners.items() if not {plain(one) for one in packages} & base]
    assert {"fastapi", "pandas", "pytest"} <= set(names)
    return json.dumps(names)


CLI = "from fedloom.cli import main\nsys.argv[0] = 'fedloom'\nmain()"
SITE = '[site]\nname = "cork"\n[data]\nsource = "digits"\n[policy]\n'


def attempt(blocked: str, code: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT + code, blocked, *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)


def run(blocked: str, code: str, *arguments: str, cwd: Path) -> str:
    found = attempt(blocked, code, *arguments, cwd=cwd)
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_every_public_name_can_be_had(blocked: str, tmp_path: Path) -> None:
    run(blocked, "import fedloom\nfor name in fedloom.__all__: getattr(fedloom, name)", cwd=tmp_path)


@pytest.mark.slow
def test_an_experiment_is_checked_run_and_reported(blocked: str, tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text(EXPERIMENT)
    (tmp_path / "patients.csv").write_text("age,dead\n" + "50,0\n60,1\n" * 10)
    (tmp_path / "site.toml").write_text('[data]\nsource = "csv"\npath = "patients.csv"\nlabel = "dead"\n[policy]\n')
    assert "base.toml is valid" in run(blocked, CLI, "check", "base.toml", cwd=tmp_path)
    found = json.loads(run(blocked, CLI, "run", "base.toml", "--json", "-q", cwd=tmp_path))
    assert found["status"] == "done"
    assert (tmp_path / "runs" / "base" / "report.html").is_file()
    assert "fedavg" in run(blocked, CLI, "algorithms", cwd=tmp_path)
    for command in (
        "data describe base.toml",
        "data export base.toml --to data.json",
        "data describe site.toml",
        "data summarize site.toml --to summary.json",
        "show runs/base",
        "list runs",
        "export runs/base --model --csv",
        "init new.toml",
    ):
        run(blocked, CLI, *command.split(), cwd=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "extra"),
    [
        ("serve base.toml", "network"),
        ("join https://127.0.0.1:1 --site site.toml", "network"),
        ("status runs", "network"),
        ("agents list runs", "network"),
        ("flower app base.toml app", "network"),
        ("watch runs", "watch"),
        ("demo --live", "watch"),
    ],
)
def test_a_command_that_needs_more_says_what_to_install(blocked: str, tmp_path: Path, command: str, extra: str) -> None:
    (tmp_path / "base.toml").write_text(EXPERIMENT)
    (tmp_path / "site.toml").write_text(SITE)
    found = attempt(blocked, CLI, *command.split(), cwd=tmp_path)
    assert found.returncode == 2
    assert found.stderr.strip().endswith(f"pip install 'fedloom[{extra}]'.")
    assert "Traceback" not in found.stderr


@pytest.mark.slow
def test_the_reference_of_keys_is_printed(blocked: str) -> None:
    code = "import runpy\nsys.argv[0] = 'show.py'\nrunpy.run_path('docs/_generate/show.py', run_name='__main__')"
    assert "outlier_factor" in run(blocked, code, "docs/reference/experiment-file.md", cwd=ROOT)


@pytest.mark.slow
def test_differential_privacy_is_refused_before_a_run(blocked: str, tmp_path: Path) -> None:
    (tmp_path / "private.toml").write_text(EXPERIMENT + "[privacy]\nexample_dp = { epsilon = 8.0 }\n")
    cli = "from fedloom.cli import main\nsys.argv[0] = 'fedloom'\nmain()"
    with pytest.raises(AssertionError, match=r"Differential privacy needs dp_accounting, opacus: pip install"):
        run(blocked, cli, "check", "private.toml", cwd=tmp_path)
