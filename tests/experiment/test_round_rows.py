"""The rows of the database that a round becomes."""

from __future__ import annotations

import numpy as np
import pytest

from fedloom.data.federation import Federation
from fedloom.experiment.round_rows import tabulate
from fedloom.federation.work import Report
from tests.experiment.round_records import TASK, final, measured, record


def test_a_round_adds_up_the_bytes_of_its_calls_and_numbers_the_epochs_of_a_client() -> None:
    one = Report(0, 10, 20, ({"loss": 3.0}, {"loss": 2.0}))
    two = Report(0, 1, 2, ({"loss": 1.0},))
    rows = tabulate(record(7, reports=(one, Report(1, 10, 20), two)), TASK)
    assert rows["rounds"] == [(7, 0.25, 2, True, 21, 42)]
    assert rows["participants"] == [(7, 0, 11, 22), (7, 1, 10, 20)]
    assert rows["history"] == [(7, 0, 1, "loss", 3.0), (7, 0, 2, "loss", 2.0), (7, 0, 3, "loss", 1.0)]


def test_a_pooled_model_is_sent_to_nobody() -> None:
    x, y = np.zeros((10, 4), np.float32), np.zeros(10, np.int64)
    federation = Federation.from_arrays(x, y, client=["ann"] * 4 + ["bob"] * 6)
    rows = tabulate(record(1, reports=(Report(federation.everyone, 10, 20),), federation=federation), TASK)
    assert rows["rounds"] == [(1, 0.25, 1, True, 0, 0)]
    assert rows["participants"] == [(1, 2, 0, 0)]


def test_metrics_of_clients_are_kept_one_by_one_and_pooled_by_examples() -> None:
    rows = tabulate(record(1), TASK)
    assert (1, 0, "pre_fit", "test", "accuracy", 0.8, 10) in rows["client_metrics"]
    assert (1, 1, "pre_fit", "test", "accuracy", 0.4, 30) in rows["client_metrics"]
    pooled = {row[1:4]: row[4:] for row in rows["pooled_metrics"]}
    assert pooled["post_fit", "test", "accuracy"] == (pytest.approx(0.5), 40)


def test_models_measured_on_everyones_test_data_are_a_phase_that_is_never_pooled() -> None:
    rows = tabulate(final(3, 0.5), TASK)
    universal = [row for row in rows["client_metrics"] if row[2:5] == ("universal", "test", "accuracy")]
    assert universal == [
        (3, 0, "universal", "test", "accuracy", 0.5, 40),
        (3, 1, "universal", "test", "accuracy", 0, 40),
    ]
    assert {row[1] for row in rows["pooled_metrics"]} == {"pre_fit", "post_fit", "final"}


def test_what_the_server_notes_and_whom_it_leaves_out_are_rows_too() -> None:
    noted = record(
        2,
        server={"test": measured(4, 0.5)},
        notes={"clip": 0.1},
        public=((0, "score", 1, 0.7),),
        left_out=(1,),
        absences={0: "late"},
    )
    rows = tabulate(noted, TASK)
    assert rows["server_metrics"] == [
        (2, "test", "loss", 1.0, 4),
        (2, "test", "accuracy", 0.5, 4),
        (2, "notes", "clip", 0.1, 1),
    ]
    assert rows["public_numbers"] == [(2, 0, "score", 1, 0.7), (2, 1, "left_out", 1, 1.0), (2, 0, "late", 0, 1.0)]
