"""A release is whole: the wheel holds all data files, and fedloom works from it where the sources are not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import fedloom

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that a release would upload, built from a copy of the sources."""
    folder = tmp_path_factory.mktemp("release")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    shutil.copytree(ROOT / "fedloom", folder / "fedloom", ignore=shutil.ignore_patterns("__pycache__"))
    # the build uses this environment's setuptools, so that nothing is fetched
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet", "-w", "dist", "."]
    subprocess.run(command, cwd=folder, check=True)
    (built,) = (folder / "dist").glob("*.whl")
    return built


def test_the_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "fedloom").rglob("*") if path.is_file()}
    expected = {name for name in sources if "__pycache__" not in name}
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("fedloom/")}
    assert expected - packed == set()
    assert packed - expected == set()
    assert {Path(name).suffix for name in packed} >= {".py", ".toml", ".typed"}


def test_fedloom_works_when_it_is_installed_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet", "--target", str(site)]
    subprocess.run([*install, str(wheel)], check=True)
    # `-P` and a folder of its own: neither the sources nor an editable installation of them can be imported instead
    environment = {**os.environ, "PYTHONPATH": str(site), "PYTHONSAFEPATH": "1"}

    def call(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert call("-c", "import fedloom; print(fedloom.__file__)").startswith(str(site))
    assert call(str(site / "bin" / "fedloom"), "--version").startswith(f"fedloom {fedloom.__version__} ")
    call("-m", "fedloom", "init", "first.toml")
    assert "rounds = " in (tmp_path / "first.toml").read_text(encoding="utf-8")
    call("-m", "fedloom", "run", "first.toml", "-q", "--workers", "1", "--set", "rounds=1", "--out", "out")
    assert "<style" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "mcmahan-table1-2nn" in call("-m", "fedloom", "reproduce")
