"""A run with a model that is mostly frozen: what it stores and counts, and folders that earlier versions wrote."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import fedloom as fl
from fedloom import tree
from fedloom.errors import InputError, StoreError
from fedloom.experiment import checkpoint
from fedloom.experiment.run_folder import remove
from fedloom.tree import Groups
from tests.experiment.small_run import run

ALGORITHMS = {
    "fedavg": fl.FedAvg(lr=0.2, batch_size=4),
    "fedprox": fl.FedProx(lr=0.2, batch_size=4, mu=0.1),
    "scaffold": fl.Scaffold(lr=0.2, batch_size=4),
    "ditto": fl.Ditto(lr=0.2, batch_size=4),
    "fedadam": fl.FedAdam(lr=0.2, batch_size=4),
    "peer": fl.Peer(lr=0.2, batch_size=4),
    "fedsgd": fl.FedSGD(lr=0.2),
    "openai_es": fl.OpenAIES(population=4),
}
FROZEN, LEARNT = 4 * (3 * 3000 + 3000), 4 * (3000 * 2 + 2)  # bytes


class Adapted(nn.Module):
    """A backbone that nobody trains, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Linear(3, 3000).requires_grad_(False)
        self.head = nn.Linear(3000, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.backbone(x)))


@pytest.fixture
def task() -> fl.Task:
    return fl.Task(Adapted)


def stored(folder: Path, label: str) -> Any:
    loaded = checkpoint.load(checkpoint.of_cell(folder, label, 1))
    assert loaded is not None
    return loaded


def as_before(folder: Path, label: str, frozen: tree.Tree) -> None:
    """Write the last checkpoint of a cell as earlier versions did: with frozen parameters in every model."""

    def whole(groups: Groups) -> Groups:
        return {group: {**frozen, **leaves} if "head.bias" in leaves else leaves for group, leaves in groups.items()}

    cell, loaded = checkpoint.of_cell(folder, label, 1), stored(folder, label)
    snapshot, extra = loaded.snapshot, {key: value for key, value in loaded.extra.items() if key != checkpoint.FROZEN}
    own = {client: whole(kept) for client, kept in snapshot.own.items()}
    checkpoint.forget_after(cell, 0)
    checkpoint.save(cell, snapshot.round, whole(snapshot.state), own, extra, since=0)
    checkpoint.frozen_file(folder, tree.sha256(frozen)).unlink(missing_ok=True)


@pytest.mark.slow
def test_workers_get_the_frozen_part_with_the_task(federation: fl.Federation, tmp_path: Path) -> None:
    drawn = iter(range(1000))

    def unseeded() -> nn.Module:  # building it again gives another one
        module = Adapted()
        module.backbone.bias.data.fill_(0.01 * next(drawn))
        return module

    task = fl.Task(unseeded)
    assert task.frozen
    found = {
        backend: run(federation, task, tmp_path / backend, 2, algorithms=ALGORITHMS, backend=backend, workers=2)
        for backend in ("serial", "vector")
    }
    hashes = {backend: {cell.algorithm: cell.weights_sha256 for cell in one.runs} for backend, one in found.items()}
    assert hashes["serial"] == hashes["vector"]
    for label in ("fedavg", "ditto"):
        model = found["serial"].weights(label)["model"]
        if label == "fedavg":  # the other hash is also about clients' own models
            assert tree.sha256(model) == hashes["serial"][label]
        assert tree.sha256(tree.select(model, task.frozen)) == task.frozen_sha256


def test_a_client_receives_the_frozen_part_in_its_first_round(
    federation: fl.Federation, task: fl.Task, tmp_path: Path
) -> None:
    cohort = fl.Sampling(count=2)
    settings: dict[str, Any] = {"algorithms": ALGORITHMS["fedavg"], "cohort": cohort}
    run(federation, task, tmp_path, 2, **settings)
    result = run(federation, task, tmp_path, 5, **settings)
    seen: set[str] = set()
    for row in result.rows("participants"):
        assert row["bytes_down"] == LEARNT + (0 if row["client"] in seen else FROZEN), row
        assert row["bytes_up"] == LEARNT + 8
        seen.add(row["client"])
    assert len(seen) == 3
    rounds = result.rows("rounds")
    assert sum(row["bytes_down"] for row in rounds) == 5 * 2 * LEARNT + 3 * FROZEN
    assert sum(row["bytes_up"] for row in rounds) == 5 * 2 * (LEARNT + 8)


def test_a_folder_holds_the_frozen_part_once(federation: fl.Federation, task: fl.Task, tmp_path: Path) -> None:
    result = run(federation, task, tmp_path, 2, algorithms=ALGORITHMS)
    files = list(tmp_path.glob("*.safetensors"))
    assert files == [checkpoint.frozen_file(tmp_path, task.frozen_sha256)]
    for label in ("fedavg", "fedprox", "peer"):
        snapshot = stored(tmp_path, label).snapshot
        groups = (snapshot.state, *snapshot.own.values())
        kept = sum(tree.size(leaves) for trees in groups for leaves in trees.values())
        assert kept == LEARNT * (3 if label == "peer" else 1)
    alone = fl.load(tmp_path)  # without the code of the model
    assert set(alone.weights("fedavg")["model"]) == set(task.form)
    assert [set(model) for model in alone.weights("peer").values()] == [set(task.form)] * 3
    assert torch.equal(result.model("fedavg").backbone.weight, task.frozen["backbone.weight"])
    files[0].write_bytes(files[0].read_bytes()[:-4] + b"none")
    with pytest.raises(StoreError, match="does not have the frozen parameters that the run trained with"):
        alone.weights("fedavg")
    files[0].unlink()
    with pytest.raises(StoreError, match=r"frozen parameters in .* cannot be read"):
        alone.weights("fedavg")
    run(federation, task, tmp_path, 3, algorithms=ALGORITHMS)
    assert files[0].is_file()
    assert remove(tmp_path) == []


@pytest.mark.parametrize("label", ["fedavg", "scaffold", "ditto", "peer"])
def test_a_run_that_an_earlier_version_began_is_read_and_continued(
    federation: fl.Federation, task: fl.Task, tmp_path: Path, label: str
) -> None:
    settings: dict[str, Any] = {"algorithms": {label: ALGORITHMS[label]}, "cohort": fl.Sampling(count=2)}
    wanted = run(federation, task, tmp_path / "whole", 4, **settings)
    began = run(federation, task, tmp_path / "old", 2, **settings)
    before = began.weights(label)
    as_before(tmp_path / "old", label, task.frozen)
    assert {name: tree.sha256(model) for name, model in fl.load(tmp_path / "old").weights(label).items()} == {
        name: tree.sha256(model) for name, model in before.items()
    }
    found = run(federation, task, tmp_path / "old", 4, **settings)
    assert found.weights_sha256 == wanted.weights_sha256
    assert not stored(tmp_path / "old", label).snapshot.state.get("model", {}).keys() & task.frozen.keys()


def test_other_frozen_values_than_those_of_the_run_are_refused(
    federation: fl.Federation, task: fl.Task, tmp_path: Path
) -> None:
    run(federation, task, tmp_path, 1, algorithms=ALGORITHMS["fedavg"])
    as_before(tmp_path, "fedavg", tree.scale(task.frozen, 2.0))
    with pytest.raises(InputError, match=r"other values of the frozen parameter 'backbone\.\w+' in 'model'"):
        run(federation, task, tmp_path, 2, algorithms=ALGORITHMS["fedavg"])


def test_a_run_is_not_continued_with_other_frozen_parameters(
    federation: fl.Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the values of the first seed are part of what a run in a folder is, and nobody sees where a file changed."""
    settings: dict[str, Any] = {"algorithms": ALGORITHMS["fedavg"], "seeds": [1, 2]}
    for seed in (1, 2):
        monkeypatch.setenv(f"BIAS_{seed}", str(seed))

    def task(seed: int) -> fl.Task:
        def model() -> nn.Module:
            module = Adapted()
            module.backbone.bias.data.fill_(float(os.environ[f"BIAS_{seed}"]))
            return module

        return fl.Task(model)

    run(federation, task, tmp_path, 1, **settings)
    files = {*tmp_path.glob("frozen-*")}
    monkeypatch.setenv("BIAS_2", "3")
    with pytest.raises(InputError, match=r"frozen parameters are not those that fedavg \(seed 2\) began with"):
        run(federation, task, tmp_path, 2, **settings)
    assert {*tmp_path.glob("frozen-*")} == files
    monkeypatch.setenv("BIAS_2", "2")
    run(federation, task, tmp_path, 2, **settings)


def test_an_asynchronous_run_that_an_earlier_version_began_is_continued(
    federation: fl.Federation, task: fl.Task, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {
        "algorithms": ALGORITHMS["fedavg"],
        "cohort": fl.Sampling(mode="async", buffer=1, concurrency=2),
        "system": fl.System(step=1.0, speed={"name": "lognormal", "sigma": 1.0}),
    }
    wanted = run(federation, task, tmp_path / "whole", 5, **settings)
    run(federation, task, tmp_path / "old", 2, **settings)
    as_before(tmp_path / "old", "fedavg", task.frozen)
    cell, loaded = checkpoint.of_cell(tmp_path / "old", "fedavg", 1), stored(tmp_path / "old", "fedavg")
    clock = loaded.snapshot.state["clock"]
    places = {name.removesuffix("head.bias") for name in clock if name.endswith("/head.bias")}
    assert places
    older = {f"{place}{name}": leaf for place in places for name, leaf in task.frozen.items()}
    checkpoint.forget_after(cell, 0)
    state = {**loaded.snapshot.state, "clock": {**clock, **older}}
    checkpoint.save(cell, 2, state, loaded.snapshot.own, loaded.extra, since=0)
    assert run(federation, task, tmp_path / "old", 5, **settings).weights_sha256 == wanted.weights_sha256


def test_kept_models_and_fingerprints_are_whole(federation: fl.Federation, task: fl.Task, tmp_path: Path) -> None:
    result = run(federation, task, tmp_path, 1, algorithms=ALGORITHMS["fedavg"], keep_models=True)
    kept = load_file(checkpoint.of_cell(tmp_path, "fedavg", 1) / "models" / "round-000001.safetensors")
    assert tree.sha256(kept) == result.runs[0].weights_sha256
    assert set(kept) == set(task.form)
