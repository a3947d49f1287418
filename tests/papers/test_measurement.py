"""One number of a finished run: which curve, over which clients, in which rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedloom.errors import InputError
from fedloom.papers.measurement import Measure, named, over_clients
from fedloom.results.run_data import RunData


@pytest.fixture
def run(comparison: Path) -> RunData:
    return RunData.read(comparison)


def value(run: RunData, **measure: Any) -> float | None:
    return Measure(**measure).value(run, "fedavg", 2)


def test_a_measure_takes_its_number_from_the_servers_curve(run: RunData) -> None:
    rounds, values = run.server_values("fedavg", 2, "loss")
    curve = {"of": "server", "metric": "loss"}
    assert value(run, kind="last", rounds=2, **curve) == pytest.approx(values[-2:].mean())
    assert value(run, kind="peak", **curve) == values.min()  # the lower the loss, the better
    assert value(run, kind="trough", **curve) == values.max()
    assert value(run, kind="peak_round", **curve) == rounds[values.argmin()]
    assert value(run, kind="rounds_to", target=float(values[2]), **curve) == rounds[np.argmax(values <= values[2])]
    assert value(run, kind="rounds_to", target=-1.0, **curve) is None
    assert value(run, kind="last", of="server", split="validation") is None


@pytest.mark.parametrize("statistic", ["mean", "std", "lowest", "highest"])
def test_of_each_round_one_number_is_taken_over_clients(run: RunData, statistic: Any) -> None:
    series = run.client_values("fedavg", 2, "post_fit", "accuracy")
    stats = series.by_round()
    expected = {"mean": stats.mean, "std": stats.std, "lowest": stats.low, "highest": stats.high}[statistic]
    rounds, values = over_clients(series, statistic)
    assert (rounds.tolist(), values.tolist()) == (stats.index.tolist(), expected.tolist())
    assert value(run, kind="last", of="post_fit", clients=statistic) == values[-1]


def test_numbers_at_the_end_have_names_and_percentages_are_shown_as_such(run: RunData) -> None:
    (cell,) = (one for one in run.result.runs if (one.algorithm, one.seed) == ("fedavg", 2))
    expected = cell.final["server_test_accuracy"]
    assert value(run, kind="final", key="server_test_accuracy") == expected
    assert value(run, kind="final", key="server_test_accuracy", percent=True) == 100 * expected
    assert value(run, kind="final", key="unknown") is None
    at = value(run, kind="peak_round", of="server")
    assert value(run, kind="peak_round", of="server", percent=True) == at  # a count of rounds is not a share


def test_a_measure_that_lacks_what_its_kind_needs_is_refused() -> None:
    with pytest.raises(InputError, match="kind 'crossing' needs a 'target'"):
        Measure(kind="crossing")
    with pytest.raises(InputError, match="kind 'final' needs a 'key'"):
        Measure(kind="final")


def test_several_measures_each_need_their_own_name() -> None:
    one, two = Measure(kind="last"), Measure(kind="peak", name="best")
    assert named((one,)) == (one,)
    for wrong in ((one, two), (two, two)):
        with pytest.raises(InputError, match="each need their own name"):
            named(wrong)
