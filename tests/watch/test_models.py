"""The models of a run as pictures: the weights of a checkpoint, and what clients hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedloom.errors import InputError
from fedloom.experiment import checkpoint
from fedloom.results.run_data import RunData
from fedloom.training.evaluation import Measured
from fedloom.watch.models import models
from tests.watch.growing_run import GrowingRun

HELD = {"classes": ["0", "1"], "counts": [[3, 1], [0, 4], [2, 2]]}


def shown(run: GrowingRun, label: str = "fedavg") -> dict[str, object]:
    return models(RunData.read(run.folder), label, 1, "accuracy", "post_fit")


def test_without_a_checkpoint_there_are_clients_but_no_pictures(tmp_path: Path) -> None:
    run = GrowingRun(tmp_path, facts={"labels": HELD}).add(1)
    found = shown(run)
    assert (found["round"], found["shared"], found["classes"]) == (None, {}, ["0", "1"])
    assert [one["holds"] for one in found["clients"]] == HELD["counts"]  # type: ignore[attr-defined]
    assert [one["picture"] for one in found["clients"]] == [None] * 3  # type: ignore[attr-defined]
    (tmp_path / "cells" / "fedavg-1").mkdir(parents=True)
    (tmp_path / "cells" / "fedavg-1" / "round-000001.json").write_text("{")  # damaged, or half replaced
    assert shown(run)["round"] is None


def test_numbers_are_those_of_the_model_that_is_drawn_or_say_what_they_are_of(tmp_path: Path) -> None:
    run = GrowingRun(tmp_path)
    assert (shown(run)["measured"], shown(run)["final"]) == ("", False)
    run.add(2)
    checkpoint.save(checkpoint.of_cell(tmp_path, "fedavg", 1), 2, {"model": {"w": torch.ones(2, 2)}}, {})
    found = shown(run)
    assert found["measured"] == (
        "Each client's accuracy was measured after local training of round 2: "
        "it is not of the weights that are drawn here."
    )
    assert found["final"] is False
    tested = {"test": Measured(10, {"loss": 1.0, "accuracy": 9.75})}
    run.add(1, clients={"final": dict.fromkeys(range(3), tested)})
    found = shown(run)
    assert (found["measured"], found["final"]) == (
        "Each client's accuracy is that of the final model on the client's own test.",
        True,
    )
    assert [one["value"] for one in found["clients"]] == [0.975] * 3  # type: ignore[attr-defined]


def test_the_rows_of_a_layer_that_sees_squares_are_squares(tmp_path: Path) -> None:
    run = GrowingRun(tmp_path).add(1)
    weight = torch.arange(18.0).reshape(2, 9) - 17
    model = {"bias": torch.zeros(2), "weight": weight}
    checkpoint.save(checkpoint.of_cell(tmp_path, "fedavg", 1), 1, {"model": model}, {})
    found = shown(run)
    picture = found["shared"]["everybody's model"]  # type: ignore[index]
    assert (found["round"], picture["shape"]) == (1, [2, 3, 3])
    assert picture["values"] == [round(127 * float(one) / 17) for one in weight.flatten()]
    assert [one["distance"] for one in found["clients"]] == [None] * 3  # type: ignore[attr-defined]


def test_clients_with_models_of_their_own_have_pictures_and_distances_from_the_mean(tmp_path: Path) -> None:
    run = GrowingRun(tmp_path).add(1)
    own = {client: {"model": {"w": torch.full((2, 5), float(value))}} for client, value in ((0, 1.0), (1, 3.0))}
    checkpoint.save(checkpoint.of_cell(tmp_path, "local", 1), 1, {}, own)
    clients = shown(run, "local")["clients"]
    assert [one["distance"] for one in clients] == [0.5, 0.5, None]  # type: ignore[attr-defined]
    assert clients[0]["picture"] == {"shape": [1, 2, 5], "values": [127] * 10}  # type: ignore[index]
    assert clients[2]["picture"] is None  # type: ignore[index]


def test_a_model_without_a_matrix_has_no_picture_and_many_clients_are_cut(tmp_path: Path) -> None:
    run = GrowingRun(tmp_path, clients=[f"c{number}" for number in range(70)]).add(1)
    checkpoint.save(checkpoint.of_cell(tmp_path, "fedavg", 1), 1, {"model": {"w": torch.zeros(4)}}, {})
    found = shown(run)
    assert (found["shared"], len(found["clients"]), found["all"]) == ({"everybody's model": None}, 64, 70)  # type: ignore[arg-type]


def test_weights_that_are_all_zero_are_pale(tmp_path: Path) -> None:
    run = GrowingRun(tmp_path).add(1)
    checkpoint.save(checkpoint.of_cell(tmp_path, "fedavg", 1), 1, {"model": {"w": torch.zeros(2, 2)}}, {})
    assert shown(run)["shared"]["everybody's model"]["values"] == [0] * 4  # type: ignore[index]


def test_checkpoints_of_other_folders_are_not_read(tmp_path: Path) -> None:
    run = GrowingRun(tmp_path / "run").add(1)
    checkpoint.save(checkpoint.of_cell(tmp_path / "other", "fedavg", 1), 1, {"model": {"w": torch.ones(2)}}, {})
    for label in ("../../other/cells/fedavg", str(tmp_path / "other" / "cells" / "fedavg")):
        with pytest.raises(InputError, match="The run has no algorithm"):
            shown(run, label)
