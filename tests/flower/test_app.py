"""`fedloom flower`: the app that is written, and what is said where something is wrong. Flower itself is not needed."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedloom.errors import InputError
from fedloom.experiment.experiment_file import load
from fedloom.experiment.plan import Plan
from fedloom.files import tomllib
from fedloom.flower.app import write_app
from tests.flower.conftest import VALUES
from tests.network.conftest import write_toml


def fedloom(*arguments: str | Path, cwd: Path) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "fedloom", *map(str, arguments)], cwd=cwd, capture_output=True, text=True, timeout=300
    )
    return done.returncode, done.stdout, done.stderr


def test_an_app_is_the_same_experiment(tmp_path: Path) -> None:
    values = {**VALUES, "name": "My study_2", "algorithm": {"fedavg": {"lr": 0.5}, "peer": {}, "pooled": {}}}
    file = write_toml(tmp_path / "experiment.toml", values)
    code, out, err = fedloom("flower", "app", file, tmp_path / "app", "--set", "rounds=7", cwd=tmp_path)
    assert code == 0, err
    assert f"flwr run {tmp_path / 'app'}" in out
    assert "pooled: left out on a network" in err
    app = load(tmp_path / "app" / "experiment.toml")
    assert app.rounds == 7
    assert list(app.algorithm) == ["fedavg", "peer"]
    assert app.algorithm == {label: one for label, one in load(file).algorithm.items() if label != "pooled"}
    project = tomllib.loads((tmp_path / "app" / "pyproject.toml").read_text())
    assert project["project"]["name"] == "my-study-2"
    for part, reference in project["tool"]["flwr"]["app"]["components"].items():
        module, _, name = reference.partition(":")
        assert f"{name} = {part.removesuffix('app')}_app(" in (tmp_path / "app" / f"{module}.py").read_text()


def test_code_of_ones_own_travels_and_paths_stay_valid(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "net.py").write_text(
        "from sizes import N\nimport torch\n\ndef net():\n    return torch.nn.Linear(N, 2)\n"
    )
    (tmp_path / "code" / "sizes.py").write_text("N = 2\n")
    (tmp_path / "scores.py").write_text("def score(output, target):\n    return output[:, 0]\n")
    (tmp_path / "mine.csv").write_text("a,b,label\n1,2,0\n3,4,1\n")
    data = {"source": "csv", "path": "mine.csv", "label": "label", "partition": {"name": "iid", "clients": 2}}
    values = {**VALUES, "data": data, "task": {"model": "code/net.py:net", "metrics": ["scores.py:score"]}}
    write_app(load(write_toml(tmp_path / "experiment.toml", values)), tmp_path / "app")
    moved = load(tmp_path / "app" / "experiment.toml")
    assert moved.source.path == tmp_path / "mine.csv"  # type: ignore[attr-defined]
    for file_name in ("code/net.py", "code/sizes.py", "scores.py"):
        assert (tmp_path / "app" / file_name).read_text() == (tmp_path / file_name).read_text()


def test_what_was_left_out_of_the_data_stays_left_out(tmp_path: Path) -> None:
    np.savez(tmp_path / "mine.npz", x=np.zeros((40, 2), np.float32), y=np.arange(40) % 2)  # no column of clients
    data = {"source": "npz", "path": "mine.npz", "partition": {"name": "iid", "clients": 2}}
    write_app(load(write_toml(tmp_path / "experiment.toml", {**VALUES, "data": data})), tmp_path / "app")
    assert Plan.of(load(tmp_path / "app" / "experiment.toml")).federation(1).clients == 2


def test_code_from_elsewhere_cannot_travel(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("import torch\n\ndef net():\n    return torch.nn.Linear(2, 2)\n")
    (tmp_path / "here").mkdir()
    file = write_toml(tmp_path / "here" / "experiment.toml", {**VALUES, "task": {"model": "../net.py:net"}})
    with pytest.raises(InputError, match=r"outside the experiment's folder"):
        write_app(load(file), tmp_path / "app")


def test_a_name_that_is_also_a_folder_stays_a_name(tmp_path: Path) -> None:
    for name in ("csv", "label", "torch"):
        (tmp_path / name).mkdir()
    (tmp_path / "mine.csv").write_text("a,b,label\n1,2,0\n3,4,1\n")
    data = {"source": "csv", "path": "mine.csv", "label": "label", "partition": {"name": "iid", "clients": 2}}
    file = write_toml(tmp_path / "experiment.toml", {**VALUES, "data": data, "task": {"model": "logistic"}})
    write_app(load(file), tmp_path / "app")
    app, before = load(tmp_path / "app" / "experiment.toml"), load(file)
    assert (app.data, app.task) == (before.data, before.task)
    assert app.source.label == "label"  # type: ignore[attr-defined]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    file = write_toml(tmp_path / "experiment.toml", VALUES)
    with pytest.raises(InputError, match=r"cannot be written to .*app: Not a directory"):
        write_app(load(file), file / "app")


def test_nothing_is_written_over(tmp_path: Path) -> None:
    file = write_toml(tmp_path / "experiment.toml", VALUES)
    code, _, err = fedloom("flower", "app", file, tmp_path, cwd=tmp_path)
    assert code == 2
    assert "is not an empty folder" in err


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"privacy": {"secure_aggregation": {}}}, "may end after every message. Use `fedloom serve`"),
        ({"cohort": {"mode": "async"}}, "belongs to one round. Use `fedloom serve`"),
        ({"privacy": {"dp": {"epsilon": 8.0}}, "algorithm": {"peer": {}}}, "peer has no sum at a server"),
    ],
)
def test_an_app_that_could_not_run_is_not_written(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    uniform = {"fedavg": {"weights": "uniform"}}
    file = write_toml(tmp_path / "experiment.toml", {**VALUES, "algorithm": uniform, **changes})
    with pytest.raises(InputError, match=words):
        write_app(load(file), tmp_path / "app")
    assert not (tmp_path / "app").exists()


@pytest.mark.skipif(find_spec("flwr") is not None, reason="Flower is installed")
def test_without_flower_a_worker_says_what_to_install(tmp_path: Path) -> None:
    code, _, err = fedloom("flower", "worker", "--site", "kerry.toml", cwd=tmp_path)
    assert code == 2
    assert "pip install 'fedloom[flower]'" in err


@pytest.mark.skipif(find_spec("flwr") is None, reason="Flower is not installed: pip install 'fedloom[flower]'")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "either --site SITE.toml, or an app's folder"),
        (("app",), "whose data this is"),
        (("app", "--partition-id", "0"), "num-partitions=None"),
        (("app", "--partition-id", "0", "--num-partitions", "5"), "only 4 clients to host"),
        (("--site", "nowhere.toml"), "There is no site file nowhere.toml"),
    ],
)
def test_a_worker_that_was_told_nonsense_says_so(arguments: tuple[str, ...], words: str, tmp_path: Path) -> None:
    write_app(load(write_toml(tmp_path / "experiment.toml", VALUES)), tmp_path / "app")
    code, _, err = fedloom("flower", "worker", *arguments, cwd=tmp_path)
    assert code == 2
    assert words in err
