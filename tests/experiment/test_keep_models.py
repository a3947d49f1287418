"""The global model of every round, or the fittest of every generation, kept on disk."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import fedloom as fl
from fedloom import tree
from fedloom.experiment import experiment_file
from fedloom.tuning import estimate
from tests.conftest import Dense, federation

TASK = fl.Task(Dense)


def run(out: Path, rounds: int = 3, **more: Any) -> Any:
    algorithms = {"evolution": fl.Neuroevolution(population=4, parents=2), "local": fl.LocalOnly()}
    return fl.run(federation((9, 12)), TASK, algorithms, rounds, out=out, backend="serial", keep_models=True, **more)


def test_the_best_of_every_generation_is_kept(tmp_path: Path) -> None:
    result = run(tmp_path / "kept")
    files = sorted((tmp_path / "kept" / "cells" / "evolution-1" / "models").iterdir())
    assert [file.name for file in files] == [f"round-{number:06d}.safetensors" for number in (1, 2, 3)]
    assert (
        tree.sha256(load_file(files[-1])) == next(r for r in result.runs if r.algorithm == "evolution").weights_sha256
    )
    assert sum(leaf.numel() for leaf in load_file(files[0]).values()) == TASK.parameters


def test_where_there_is_no_global_model_nothing_is_kept(tmp_path: Path) -> None:
    run(tmp_path / "kept")
    assert not (tmp_path / "kept" / "cells" / "local-1" / "models").exists()


def test_going_on_keeps_the_same_models(tmp_path: Path) -> None:
    run(tmp_path / "whole", rounds=4)
    run(tmp_path / "parts", rounds=2)
    run(tmp_path / "parts", rounds=4)
    folders = [tmp_path / name / "cells" / "evolution-1" / "models" for name in ("whole", "parts")]
    one, other = ({file.name: file.read_bytes() for file in folder.iterdir()} for folder in folders)
    assert one == other
    assert len(one) == 4


@pytest.mark.parametrize(("keep", "bytes"), [(True, 2410 * 4 * 7), (False, 0)])
def test_a_check_says_how_much_disk_that_takes(keep: bool, bytes: int) -> None:
    experiment = experiment_file.parse(
        {
            "rounds": 7,
            "data": {"partition": {"name": "iid", "clients": 3}},
            "algorithm": {"neuroevolution": {}},
            "run": {"keep_models": keep, "backend": "serial"},
        }
    )
    found = estimate.estimate(experiment)
    assert found.kept_bytes == bytes
    assert any("of disk" in line for line in found.lines()) is keep
