"""Changes that are far longer than the others are found, whatever the order and the scale."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedloom.aggregation.outliers import lengths, smallest_length
from fedloom.aggregation.outliers import outliers as outliers_of
from fedloom.experiment import experiment_file
from fedloom.experiment.experiment_file import Experiment
from fedloom.experiment.plan import Plan
from fedloom.experiment.run import run_plan
from fedloom.papers import published
from fedloom.papers.reproduce import Rerun

ROOT = Path(__file__).parents[2]
CHANGES: dict[str, Any] = {"seeds": [1], "run.workers": 1, "cohort.outlier_factor": 10}  # as a network does


def outliers(changes: list[dict[str, float]], factor: float) -> list[int]:
    """Outliers among clients that have the same number of examples."""
    return outliers_of(changes, [20] * len(changes), factor)


def groups(*values: float) -> list[dict[str, float]]:
    return [{"model": value} for value in values]


def test_a_length_is_that_of_all_floating_leaves_from_their_base() -> None:
    stacked = {
        "w": torch.tensor([[[1.0, 2.0]], [[4.0, 6.0]]]),
        "b": torch.tensor([0.0, 12.0]),
        "count": torch.tensor([7, 900]),
    }
    assert lengths(stacked, {"w": torch.tensor([[1.0, 2.0]])}).tolist() == [0.0, 13.0]
    assert lengths({"count": torch.tensor([7, 900])}, {}).tolist() == [0.0, 0.0]


def test_a_length_is_exact_where_single_precision_overflows() -> None:
    found = lengths({"w": torch.full((1, 4), 3e38)}, {})
    assert found.item() == pytest.approx(2 * 3e38)


def test_complex_leaves_and_equal_infinities_have_a_length() -> None:
    assert lengths({"w": torch.tensor([[3 + 4j]])}, {}).tolist() == [5.0]
    mask = torch.tensor([0.0, -math.inf])
    assert lengths({"mask": mask.expand(2, 2), "w": torch.tensor([[2.0], [3.0]])}, {"mask": mask}).tolist() == [2, 3]


def test_short_changes_of_a_model_count_as_a_share_of_its_length() -> None:
    base = {"w": torch.tensor([3.0, 4.0]), "mask": torch.tensor([0.0, -math.inf]), "count": torch.tensor(900)}
    assert smallest_length(base) == pytest.approx(0.25)
    assert smallest_length({"count": torch.tensor(900)}) == 0.0


def test_only_changes_beyond_the_factor_are_outliers() -> None:
    assert outliers(groups(1, 1, 1, 1, 10), 10) == []
    assert outliers(groups(1, 1, 1, 1, 10.01), 10) == [4]
    assert outliers(groups(1, 1, 1, 1, math.inf), 10) == [4]
    assert outliers(groups(1, 1, 1, 3, 4), 2) == [3, 4]


def test_among_few_clients_only_a_change_that_would_ruin_the_model_is_an_outlier() -> None:
    assert outliers(groups(0.5, 1e6), 10) == []
    assert outliers(groups(0.5, 1.01e6), 10) == [1]
    assert outliers(groups(1e30, 0.1, 2.0, 1e30), 10) == [0, 3]
    assert outliers(groups(1e9, 3e9, 2e9), 10) == []  # gradients of features that are not scaled
    assert outliers(groups(1e12), 10) == []
    assert outliers(groups(1e30), 10) == [0]  # a single client has nobody to be compared with


def test_an_outlier_in_one_group_is_one() -> None:
    changes = [{"model": 1.0, "control": 1.0} for _ in range(5)]
    changes[2] = {"model": 1.0, "control": 50.0}
    assert outliers(changes, 10) == [2]


def test_clients_without_weight_in_a_group_are_not_judged_in_it() -> None:
    chosen = [{"first": 1.0}] * 4 + [{"second": 50.0}] * 2
    assert outliers(chosen, 10) == []
    assert outliers([*chosen, {"first": 11.0}], 10) == [6]


def test_a_client_with_more_examples_takes_more_steps_and_may_change_more() -> None:
    changes = groups(*[1.0] * 8, 250.0, 250.0)
    assert outliers_of(changes, [20] * 8 + [5000] * 2, 10) == []
    assert outliers_of(changes, [20] * 8 + [400, 600], 10) == [8]
    assert outliers_of(groups(1, 1, 1, 1, 11), [20, 20, 20, 20, 1], 10) == [4]


@pytest.mark.parametrize("values", [(1, 1, 1, 1000), (0, 0, 0, 1, 5), (math.inf, math.inf, math.inf, 1, 1), ()])
def test_few_updates_and_medians_that_say_nothing_make_no_outliers(values: tuple[float, ...]) -> None:
    assert outliers(groups(*values), 10) == []


@given(
    values=st.lists(st.floats(1e-3, 1e3), min_size=5, max_size=30),
    factor=st.sampled_from([2.0, 10.0]),
    scale=st.sampled_from([2.0**-20, 2.0**20]),
    seed=st.randoms(use_true_random=False),
)
def test_order_and_scale_do_not_matter_and_fewer_than_half_are_outliers(
    values: list[float], factor: float, scale: float, seed: object
) -> None:
    found = outliers(groups(*values), factor)
    assert len(found) < len(values) / 2
    assert outliers(groups(*(scale * value for value in values)), factor) == found
    order = sorted(range(len(values)), key=lambda _: seed.random())  # type: ignore[attr-defined]
    shuffled = outliers(groups(*(values[position] for position in order)), factor)
    assert sorted(order[position] for position in shuffled) == found


def left_out(experiment: Experiment, folder: Path) -> list[tuple[str, int, str]]:
    rows = run_plan(Plan.of(experiment), folder).rows("public")
    return [(row["algorithm"], row["round"], row["client"]) for row in rows if row["name"] == "outlier"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "file",
    [
        "examples/digits.toml",
        "examples/neuroevolution/digits.toml",
        "examples/neuroevolution/digits-es.toml",
        "examples/own-code/experiment.toml",
        "fedloom/experiment/templates/demo.toml",
        "fedloom/experiment/templates/experiment.toml",
    ],
)
def test_no_shipped_experiment_has_outliers(file: str, tmp_path: Path) -> None:
    assert left_out(experiment_file.load(ROOT / file, CHANGES), tmp_path / "run") == []


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("fedavg-validation", "mnist"),
        ("mcmahan-table1-2nn", "mnist"),
        ("postures-hapt", "har_hapt/hapt_features30.npz"),
        ("next-word", "reddit_2006/reddit_2006q1_by_user.jsonl.xz"),
        ("eeg-neuroevolution", "eeg_alcoholism"),
        ("images-skewed", "natural_images/natural_images_80x80_jpeg.zip"),
    ],
)
def test_no_published_experiment_has_outliers(name: str, path: str, tmp_path: Path) -> None:
    place = Path(os.environ.get("FEDLOOM_DATA") or ROOT.parent / "shared" / "data") / path
    if not place.exists():
        pytest.skip(f"there is no real data at {place}; set FEDLOOM_DATA")
    found = published.load(name)
    rerun = Rerun(found, quick=True, changes={**CHANGES, "data.path": str(place)})
    rows = {row.folder: row for row in found.row if not found.quick.rows or row.name in found.quick.rows}
    for folder, row in rows.items():
        assert left_out(rerun.experiment(row), tmp_path / folder) == []
