"""Code that reads environment variables is found by its text."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from fedloom.environment_reads import cautions, reading_lines
from fedloom.experiment import experiment_file
from fedloom.tuning.estimate import estimate


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("import os\nWIDTH = int(os.environ.get('WIDTH', 16))", [2]),
        ("import os as system\ndef f():\n    return system.getenv('A'), system.environ['B']", [3]),
        ("from os import environ, getenv as asks\nif 'A' in environ:\n    b = asks('B')", [2, 3]),
        ("import os\nos.environ['KERAS_BACKEND'] = 'torch'\nos.environ.setdefault('A', '1')\ndel os.environ['B']", []),
        ("import os\nfolder = os.path.join('a', os.sep)", []),
        ("class Space:\n    environ = 1\nx = Space().environ", []),
    ],
)
def test_lines_that_read_the_environment(text: str, lines: list[int]) -> None:
    assert reading_lines(ast.parse(text)) == lines


def test_a_file_that_cannot_be_read_is_left_to_those_who_load_it(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("def :")
    assert list(cautions([tmp_path / "net.py", tmp_path / "missing.py"])) == []


def test_an_experiment_whose_code_reads_the_environment_is_cautioned(tmp_path: Path) -> None:
    """Also where a file that the named one imports reads it."""
    (tmp_path / "settings.py").write_text("import os\n\nWIDTH = int(os.environ.get('WIDTH', 16))\n")
    (tmp_path / "net.py").write_text(
        "from settings import WIDTH\nfrom torch import nn\n\n"
        "def net():\n    return nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))\n"
    )
    values = {
        "data": {"source": "digits", "partition": {"name": "iid", "clients": 3}},
        "task": {"model": "net.py:net"},
        "algorithm": {"fedavg": {}},
    }
    found = estimate(experiment_file.parse(values, tmp_path)).cautions
    assert any("settings.py reads environment variables (line 3)" in text for text in found), found
