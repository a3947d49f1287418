"""What a user sees while several cells are under way."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from fedloom.experiment import progress
from fedloom.experiment.progress import AFTER_TRAINING, Bar, Lines


def test_lines_name_the_cell_and_count_those_that_are_over() -> None:
    out = io.StringIO()
    lines = Lines(out)
    lines.expect(2, rounds=3)
    lines.begin("a", 0, 3)
    lines.begin("b", 0, 3)
    for round in (1, 2, 3):
        for cell in ("a", "b"):
            lines.step(cell, round, {"loss": 0.5 / round}, 0.1)
    lines.end("b")
    lines.end("a")
    assert out.getvalue().splitlines() == [
        "b: round 3 of 3, loss 0.167, 0.1 s a round (1 of 2 cells)",
        "a: round 3 of 3, loss 0.167, 0.1 s a round (2 of 2 cells)",
    ]


def test_a_cell_that_was_stopped_is_not_counted() -> None:
    lines, bar = Lines(io.StringIO()), Bar(Console(file=io.StringIO(), force_terminal=True, width=100))
    for shown in (lines, bar):
        shown.expect(2, rounds=3)
        for cell in ("a", "b"):
            shown.begin(cell, 0, 3)
            shown.step(cell, 1, {"loss": 0.5}, 0.1)
        shown.end("a")
        shown.end("b", done=False)
    assert lines.stream.getvalue().splitlines()[-1] == "b: round 1 of 3, loss 0.5, 0.1 s a round (1 of 2 cells)"
    assert bar.progress.tasks[0].fields["values"] == "1 of 2 cells"
    bar.close()


def test_lines_come_at_most_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    out = io.StringIO()
    lines = Lines(out)
    lines.expect(1, rounds=5)
    lines.begin("a", 0, 5)
    for round in range(1, 6):
        now += 4
        lines.step("a", round, {}, 4.0)
    assert out.getvalue() == "a: round 3 of 5, 4 s a round\n"


def test_one_bar_counts_the_rounds_of_all_cells() -> None:
    bar = Bar(Console(file=io.StringIO(), force_terminal=True, width=100))
    bar.expect(3, rounds=10)
    bar.begin("done before", 10, 10)
    bar.end("done before")
    bar.begin("a", 4, 10)
    bar.begin("b", 0, 10)
    bar.step("a", 5, {"accuracy": 0.5}, 0.1)
    bar.step("b", 1, {"accuracy": 0.5}, 0.1)
    bar.step("a", 6, {"accuracy": 0.5}, 0.1)
    whole = bar.progress.tasks[0]
    assert (whole.completed, whole.total) == (10 + 6 + 1, 30)
    assert whole.fields["values"] == "1 of 3 cells"
    assert [task.description for task in bar.progress.tasks] == ["all rounds", "done before", "a", "b"]
    bar.close()


def test_numbers_are_whole_in_80_columns() -> None:
    out = io.StringIO()
    bar = Bar(Console(file=out, force_terminal=True, width=80, color_system=None))
    bar.expect(21, rounds=30)
    bar.begin("central-standard (seed 1)", 0, 30)
    bar.step("central-standard (seed 1)", 29, {"loss": 0.207, "accuracy": 0.934, AFTER_TRAINING: 1}, 0.61)
    bar.close()
    assert "29/30 accuracy 93.4 % after local training --:--" in " ".join(out.getvalue().split())


def test_the_bars_of_a_run_replace_those_of_the_run_before() -> None:
    bar = Bar(Console(file=io.StringIO(), force_terminal=True))
    for cells in (2, 1):  # a sweep runs one setting after another
        bar.expect(cells, rounds=1)
        for number in range(cells):
            bar.begin(f"{number} of {cells}", 0, 1)
            bar.step(f"{number} of {cells}", 1, {}, 0.1)
            bar.end(f"{number} of {cells}")
    assert [task.description for task in bar.progress.tasks] == ["0 of 1"]
    bar.close()


def test_many_finished_cells_do_not_fill_the_screen() -> None:
    bar = Bar(Console(file=io.StringIO(), force_terminal=True))
    bar.expect(20, rounds=1)
    for number in range(20):
        bar.begin(str(number), 0, 1)
        bar.step(str(number), 1, {}, 0.1)
        bar.end(str(number))
    assert sum(task.visible for task in bar.progress.tasks) == 1
    bar.close()


def test_a_caution_is_shown_once() -> None:
    out = io.StringIO()
    lines = Lines(out)
    for text in ("few examples", "few examples", "one class"):
        lines.caution(text)
    assert out.getvalue() == "Caution: few examples\nCaution: one class\n"


def test_a_note_is_written_in_one_piece_so_that_threads_do_not_share_a_line() -> None:
    pieces: list[str] = []

    class Stream(io.StringIO):
        def write(self, text: str) -> int:
            pieces.append(text)
            return len(text)

    Lines(Stream()).note("alpha is ready")
    assert [piece for piece in pieces if piece] == ["alpha is ready\n"]
