"""Figures and tables of virtual time, from runs whose times are known."""

from pathlib import Path

import pytest
from matplotlib.colors import to_hex

import fedloom as fl
from fedloom.results import figures, round_figure, tables
from fedloom.results.run_data import RunData
from tests.conftest import ALL_TRAIN, Dense, federation
from tests.results.drawn_runs import write_run


@pytest.fixture(scope="module")
def timed(tmp_path_factory: pytest.TempPathFactory) -> RunData:
    """Four clients that take 1, 2, 3 and 4 seconds, of which the two fastest count."""
    folder = tmp_path_factory.mktemp("timed")
    data = federation((10, 20, 30, 40), split=ALL_TRAIN, server={"test": (federation((9,)).x, federation((9,)).y)})
    fl.run(
        data,
        fl.Task(Dense, metrics=["accuracy"]),
        {"fedavg": fl.FedAvg(batch_size=10), "pooled": fl.Pooled()},
        rounds=3,
        system=fl.System(step=1.0),
        cohort=fl.Sampling(count=2, over_select=1.0),
        evaluate=fl.experiment.tables.EvaluateTable(splits=(), target={"accuracy": 0.01}),
        out=folder,
        backend="serial",
    )
    return RunData.read(folder)


def test_times_are_those_of_the_schedule(timed: RunData) -> None:
    times = timed.times("fedavg", 1)
    assert times.began.tolist() == [0.0, 2.0, 4.0]
    assert times.ended.tolist() == [2.0, 4.0, 6.0]
    assert timed.has_clock
    assert not len(timed.times("pooled", 1).rounds)


def test_the_table_says_how_much_of_their_time_clients_work(timed: RunData) -> None:
    (found,) = tables.virtual_time(timed)
    (row,) = found.rows
    # in each round of 2 seconds, clients work 1 + 2 + 2 + 2 of 8 seconds, 4 of them in vain
    assert row == ("fedavg", 3.0, 6.0, 2.0, pytest.approx(7 / 8), pytest.approx(4 / 7), 0.0)


def test_time_to_a_target_is_virtual_too(timed: RunData) -> None:
    (found,) = tables.targets(timed)
    row = dict(zip(found.columns, found.rows[0], strict=True))
    assert row["virtual time"] == 2.0 * row["first round"]


def test_the_figures_have_the_times(timed: RunData) -> None:
    bars = round_figure.draw(timed)
    assert bars is not None
    (axes,) = bars.figure.axes
    widths = sorted(patch.get_width() for patch in axes.patches)
    assert widths == pytest.approx([1.0, 2.0, 2.0, 2.0])
    curve = figures.against_time(timed, "accuracy")
    assert curve is not None
    (line, _) = curve.figure.axes[0].lines
    assert line.get_xdata().tolist() == pytest.approx([2.0, 4.0, 6.0])
    assert curve.figure.axes[0].get_xlabel() == "Virtual seconds"


def test_a_round_of_many_clients_shows_those_that_were_late(tmp_path: Path) -> None:
    run = write_run(tmp_path, "large", clock=True)  # 60 clients, of which every seventh is late
    bars = round_figure.draw(run)
    assert bars is not None
    first = bars.figure.axes[0].patches
    assert len(first) == round_figure.MOST_BARS
    assert {to_hex(patch.get_facecolor()) for patch in first} == {*round_figure.COLOURS.values()}


def test_a_run_without_a_clock_has_neither(tmp_path: Path) -> None:
    run = write_run(tmp_path, "small")
    assert round_figure.draw(run) is None
    assert figures.against_time(run, "accuracy") is None
    assert [*tables.virtual_time(run)] == []
    assert "virtual time" not in next(iter(tables.targets(run))).columns
