"""Return a run to an earlier round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fedloom as fl
from fedloom.errors import InputError
from fedloom.experiment import checkpoint
from fedloom.experiment.rollback import roll_back
from fedloom.results.result import Result
from tests.experiment.small_run import StopAfter, run


def kept(folder: Path, cell: str) -> list[int]:
    return checkpoint.whole_rounds(folder / "cells" / cell)


def test_a_run_that_returned_to_an_earlier_round_ends_with_the_same_bits(
    federation: fl.Federation, task: fl.Task, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"algorithms": fl.Scaffold(lr=0.1), "keep_checkpoints": 3, "keep_models": True}
    whole = run(federation, task, tmp_path, rounds=5, **settings)
    assert kept(tmp_path, "scaffold-1") == [3, 4, 5]
    assert roll_back(tmp_path, 3) == {"scaffold-1": 5}
    before = Result.read(tmp_path)
    assert (before.status, before.runs[0].rounds, before.weights_sha256) == ("stopped", 3, None)
    assert {row["round"] for row in before.rows("clients")} == {1, 2, 3}
    assert kept(tmp_path, "scaffold-1") == [3]
    assert len(list((tmp_path / "cells" / "scaffold-1" / "models").iterdir())) == 3
    again = run(federation, task, tmp_path, rounds=5, **settings)
    assert again.weights_sha256 == whole.weights_sha256
    assert again.runs[0].final == whole.runs[0].final


def test_what_cannot_be_rolled_back_is_refused_and_nothing_changes(
    federation: fl.Federation, task: fl.Task, tmp_path: Path
) -> None:
    algorithms = {"a": fl.FedAvg(lr=0.1), "b": fl.FedAvg(lr=0.2)}
    run(federation, task, tmp_path, rounds=6, algorithms=algorithms, should_stop=StopAfter(8))
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "cells").rglob("*")}
    with pytest.raises(InputError, match=r"a-1 has no checkpoint of round 2. Kept: 5, 6. Set \[run\] keep_checkpoints"):
        roll_back(tmp_path, 2)
    with pytest.raises(InputError, match=r"There is no cell 'c-1'. Known: a-1, b-1"):
        roll_back(tmp_path, 2, "c-1")
    with pytest.raises(InputError, match=r"Nothing came after round 6: a-1 has 6, b-1 has 3 rounds"):
        roll_back(tmp_path, 6)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cells").rglob("*")} == files
    assert roll_back(tmp_path, 2, "b-1") == {"b-1": 3}
    assert (kept(tmp_path, "a-1"), kept(tmp_path, "b-1")) == ([5, 6], [2])
