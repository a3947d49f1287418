"""The work of a verb: what is cut into parts, sent, summed and reported."""

import random
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch

from fedloom import tree
from fedloom.aggregation.outliers import with_lengths
from fedloom.algorithm import Update
from fedloom.algorithms import FedAvg, LocalOnly
from fedloom.backends.serial import Serial
from fedloom.federation.engine import fit
from fedloom.federation.work import ClientWork, Report
from fedloom.task import Task
from fedloom.training.clients import Setup
from tests.conftest import Dense, federation, last
from tests.federation.helpers import LIGHT, SIZES


def test_a_report_counts_the_bytes_that_travel() -> None:
    task, data = Task(Dense), federation(SIZES)
    size = tree.size(task.initial())
    record = last(fit(data, task, FedAvg(**LIGHT), 1))
    assert [report.client for report in record.reports] == [0, 1, 2, 3]
    assert {report.bytes_down for report in record.reports} == {size}
    assert {report.bytes_up for report in record.reports} == {size + 8}
    nothing = last(fit(data, task, LocalOnly(**LIGHT), 1))
    assert {(report.bytes_up, report.bytes_down) for report in nothing.reports} == {(0, 0)}
    assert all(len(report.history) == 1 for report in record.reports)


@pytest.mark.parametrize("keep", ["sum", "stack"])
def test_work_that_is_cut_and_merged_gives_the_bits_of_the_whole(keep: Literal["sum", "stack"]) -> None:
    task, data = Task(Dense), federation(SIZES)
    place, model = Serial(data, task).place, {"model": task.initial()}
    work = ClientWork(FedAvg(**LIGHT), "client", model, (0, 1, 2, 3), {}, seed=1, round=1, call=0, keep=keep)
    assert list(work.costs(place)) == [int(count) + 1 for count in data.counts((0, 1, 2, 3), "train")]
    whole = work.perform(place)
    merged = work.merge(work.part(begin, begin + 1).perform(place) for begin in range(4))
    assert [report.client for report in merged.reports] == [report.client for report in whole.reports] == [0, 1, 2, 3]
    assert merged.positions == whole.positions == {"model": "model"}
    assert merged.sums.keys() == whole.sums.keys()
    assert bool(whole.sums) == (keep == "sum")
    assert bool(whole.stack) == (keep == "stack")
    for node, summed in whole.sums.items():
        assert tree.sha256(merged.sums[node]) == tree.sha256(summed)
    for group, stacked in whole.stack.items():
        assert tree.sha256(merged.stack[group]) == tree.sha256(stacked)


@pytest.mark.parametrize(("weights", "found"), [("examples", [6, 15, 12, 15]), ("uniform", [1, 1, 1, 1])])
def test_a_client_with_many_examples_weighs_as_much_as_the_cap_allows(weights: Any, found: list[int]) -> None:
    task, data = Task(Dense), federation(SIZES)
    algorithm, model = FedAvg(weights=weights, **LIGHT), {"model": task.initial()}
    work = ClientWork(algorithm, "client", model, (0, 1, 2, 3), {}, seed=1, round=1, call=0, keep="stack")
    place = Serial(data, task).place
    capped = replace(work, max_examples=15, report_lengths=True).perform(place)
    assert capped.weights["model"].tolist() == found
    assert [report.examples for report in capped.reports] == [6, 15, 12, 15]
    assert tree.sha256(capped.stack["model"]) == tree.sha256(work.perform(place).stack["model"])  # it trains with all


def test_a_part_knows_its_place_in_the_cohort_and_only_its_own_clients() -> None:
    graph = torch.eye(3, dtype=torch.bool)
    own = {"kept": {"w": torch.arange(3.0)}}
    work = ClientWork(FedAvg(), "client", {}, (5, 7, 9), own, seed=1, round=1, call=0, keep="sum", graph=graph)
    part = work.part(1, 3)
    assert part.ids == (7, 9)
    assert part.first == 1
    assert part.own["kept"]["w"].tolist() == [1.0, 2.0]
    assert part.graph is not None
    assert part.graph.tolist() == [[False, True, False], [False, False, True]]
    assert part.part(1, 2).first == 2


def test_only_changes_of_the_model_have_a_length_and_everything_pulls() -> None:
    task = Task(Dense)
    name = task.trainable[0]
    groups = {
        "gradient": {name: torch.tensor([[3.0, 4.0]])},
        "buffers": {"running": torch.tensor([[2.0]])},  # a position
        "cluster": {name: torch.tensor([[1.0]])},  # without weight
        "fitness": {"fitness": torch.tensor([[100.0]])},  # no change of the model
    }
    weights = {"gradient": 2.0, "buffers": 1.0, "cluster": 0.0, "fitness": 3.0}
    update = Update(groups, {g: torch.tensor([w]) for g, w in weights.items()}, positions={"buffers": "model"})
    (found,) = with_lengths([Report(0)], update, {"model": {"running": torch.tensor([0.5])}}, task, [20])
    assert (found.lengths, found.pull, found.examples) == ({"gradient": 5.0, "buffers": 1.5}, 300.0, 20)
    (small,) = with_lengths([Report(0)], update, {"model": {"running": torch.tensor([1.9])}}, task, [20])
    assert small.lengths["buffers"] == pytest.approx(0.1)
    (smaller,) = with_lengths([Report(0)], update, {"model": {"running": torch.tensor([1.99])}}, task, [20])
    assert smaller.lengths["buffers"] == pytest.approx(0.05 * 1.99)  # as long as 5 % of the model


class _Drawing(FedAvg):
    """FedAvg whose clients send what they draw from a global generator, before and after they train."""

    library: str = "torch"

    def client(self, task: Any, shared: Any, own: Any, data: Any) -> Any:
        first = self._drawn(len(data))
        _, kept = super().client(task, shared, own, data)
        drawn = torch.stack([first, self._drawn(len(data))], dim=1)
        return Update({"drawn": {"numbers": drawn}}, data.examples), kept

    def _drawn(self, count: int) -> torch.Tensor:
        draws = {"torch": torch.rand, "numpy": lambda n: torch.from_numpy(np.random.rand(n)), "python": _from_python}
        return draws[self.library](count)


def _from_python(count: int) -> torch.Tensor:
    return torch.tensor([random.random() for _ in range(count)])


@pytest.mark.parametrize("library", ["torch", "numpy", "python"])
@pytest.mark.parametrize("group", [1, 4])
def test_what_clients_draw_depends_on_seed_round_and_client_alone(library: str, group: int) -> None:
    task, data = Task(Dense), federation(SIZES)
    place = Serial(data, task, Setup(group=group)).place
    model = {"model": task.initial()}

    def drawn(seed: int = 1, round: int = 1, ids: tuple[int, ...] = (0, 1, 2, 3)) -> list[list[float]]:
        algorithm = _Drawing(library=library, **LIGHT)
        work = ClientWork(algorithm, "client", model, ids, {}, seed=seed, round=round, call=0, keep="stack")
        found: list[list[float]] = work.perform(place).stack["drawn"]["numbers"].tolist()
        return found

    together = drawn()
    assert together == [*drawn(ids=(0,)), *drawn(ids=(1, 2)), *drawn(ids=(3,))]
    numbers = [number for found in (together, drawn(seed=2), drawn(round=2)) for pair in found for number in pair]
    assert len({*numbers}) == len(numbers) == 24
