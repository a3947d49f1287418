"""A new algorithm is one file with one import line: nothing else knows its name."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fedloom
from fedloom.algorithms import ALGORITHMS, CLASSES

NEW = '''"""Takes a random walk."""

from fedloom.algorithm import Algorithm, Clients, Cohort, Groups, Task, Update, expand, uniform


class RandomWalk(Algorithm):
    """Nobody learns anything in this algorithm: w ← w."""

    def round(self, state: Groups, cohort: Cohort) -> Groups:
        return {"model": cohort.reduce(self.client, state)["model"]}

    def client(self, task: Task, shared: Groups, own: Groups, data: Clients) -> tuple[Update, Groups]:
        sent = {"model": expand(shared["model"], len(data))}
        return Update(sent, uniform(data.examples), positions={"model": "model"}), own
'''


@pytest.mark.slow
def test_a_file_dropped_into_the_folder_is_an_algorithm_everywhere(tmp_path: Path) -> None:
    package = tmp_path / "fedloom"
    shutil.copytree(Path(fedloom.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "algorithms/random_walk.py").write_text(NEW)
    script = "import fedloom as fl; print(fl.RandomWalk.__name__, 'RandomWalk' in dir(fl), fl.__file__)"
    told = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["RandomWalk", "True", str(package / "__init__.py")]
    listed = subprocess.run(
        [sys.executable, "-m", "fedloom", "algorithms"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    names = [line.split()[0] for line in listed.stdout.splitlines() if line.strip()]
    assert sorted([*ALGORITHMS, "randomwalk"]) == names


def test_names_are_those_of_the_classes_unless_they_say_otherwise_and_in_alphabetical_order() -> None:
    assert list(ALGORITHMS) == sorted(ALGORITHMS)
    assert ALGORITHMS["fedavg"] is CLASSES["FedAvg"] is fedloom.FedAvg
    assert ALGORITHMS["local"] is CLASSES["LocalOnly"]
    assert ALGORITHMS["selective"] is CLASSES["Selective"]  # not the name that it would inherit
    assert "Search" not in CLASSES  # a base class
