"""An interval that covers most of a metric's scale gets a caution; a narrow one at the scale's end does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fedloom.results import wide_intervals
from fedloom.results.comparisons import comparisons
from fedloom.results.report_warnings import cautions
from fedloom.results.run_data import RunData


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([0.20, 0.31], "2 seeds say little about accuracy: they differ so much"),  # 25.5 % ± 69.9
        ([0.99, 0.992], ""),  # it reaches beyond 100 %, and says a lot
        ([0.5], ""),
    ],
)
def test_intervals_as_wide_as_the_scale(
    run: RunData, values: list[float], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = replace(comparisons(run, "accuracy")[0], values={"fedavg": dict(enumerate(values))})
    monkeypatch.setattr(wide_intervals, "comparisons", lambda run, metric: [found] if metric == "accuracy" else [])
    shown = list(wide_intervals.cautions(run))
    assert len(shown) == bool(said)
    if said:
        assert shown[0].startswith(said)
        assert "fedavg (−44.38 % to 95.38 %)" in shown[0]
        assert shown[0] in cautions(run)
