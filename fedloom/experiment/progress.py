"""What a user sees during a run: a bar in a terminal, a line every ten seconds elsewhere, or nothing."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

from fedloom.metrics import is_percentage

SECONDS_BETWEEN_LINES = 10.0
# among the values of a round
CLOCK = "clock"  # virtual seconds since the run began
AFTER_TRAINING = "after local training"  # there if the numbers are about clients' models then
ON_SERVER = "on the server's test"  # there if they are about the global model on the server's data
ON_ALL_TESTS = "on all tests together"  # there instead for a model that all data trained in one place
TOOK_PART, ASKED = "took part", "asked"  # how many clients, if not all that were asked took part


class Progress:
    """Receives what happens in a run, and shows nothing; several cells may run at once."""

    def expect(self, cells: int, rounds: int) -> None:
        """Announce how many cells and rounds there are, before the first one starts."""

    def begin(self, cell: str, done: int, rounds: int) -> None:
        """Announce that a cell starts, or continues after `done` rounds."""

    def step(self, cell: str, round: int, values: dict[str, float], seconds: float) -> None:
        """Report a finished round."""

    def note(self, text: str) -> None:
        """Show something that the user should know."""

    def once(self, text: str) -> None:
        """Show a note, unless it was shown before: a sweep trains many times on the same data."""
        shown: set[str] = vars(self).setdefault("_shown", set())
        if text not in shown:
            shown.add(text)
            self.note(text)

    def caution(self, text: str) -> None:
        """Show a caution, unless it was shown before."""
        self.once(f"Caution: {text}")

    def end(self, cell: str, done: bool = True) -> None:
        """Announce that a cell has ended: it is done, or it was stopped or failed."""


class Silent(Progress):
    """Shows no progress; notes go to the log."""

    def note(self, text: str) -> None:
        logging.getLogger("fedloom").warning(text)


class Lines(Progress):
    """Prints a line every ten seconds and one for every cell that has ended: for logs."""

    def __init__(self, stream: Any = None) -> None:
        self.stream = stream or sys.stderr
        self.last, self.cells, self.over = time.monotonic(), 0, 0
        self.rounds: dict[str, int] = {}
        self.texts: dict[str, str] = {}

    def expect(self, cells: int, rounds: int) -> None:
        self.cells, self.over = cells, 0

    def begin(self, cell: str, done: int, rounds: int) -> None:
        self.rounds[cell] = rounds

    def step(self, cell: str, round: int, values: dict[str, float], seconds: float) -> None:
        words = [f"{cell}: round {round} of {self.rounds[cell]}", describe(values), f"{_rough(seconds)} s a round"]
        self.texts[cell] = ", ".join(word for word in words if word)
        if time.monotonic() - self.last >= SECONDS_BETWEEN_LINES:
            self.note(self.texts.pop(cell))
            self.last = time.monotonic()

    def note(self, text: str) -> None:
        print(f"{text}\n", end="", file=self.stream, flush=True)  # one piece: several threads may write

    def end(self, cell: str, done: bool = True) -> None:
        self.over += done
        text = self.texts.pop(cell, "")
        if text:
            self.note(text + (f" ({self.over} of {self.cells} cells)" if self.cells > 1 else ""))


class Bar(Progress):
    """Shows a bar for all cells together, and one for each running cell with loss, metrics and seconds per round."""

    MOST = 8  # how many finished cells stay on screen
    WIDE = 100  # in fewer columns, numbers take the place of bars, and a metric that of the loss

    def __init__(self, console: Any) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self.narrow = console.width < self.WIDE
        self.progress = RichProgress(
            TextColumn("{task.description}", markup=False),
            *([] if self.narrow else [BarColumn(bar_width=None)]),
            MofNCompleteColumn(),
            TextColumn("{task.fields[values]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            expand=True,
        )
        self.all: Any = None
        self.cells, self.over = 0, 0
        self.tasks: dict[str, Any] = {}
        self.rounds: dict[str, int] = {}  # how many are done

    def expect(self, cells: int, rounds: int) -> None:
        for earlier in self.progress.task_ids:  # of another run: a sweep has many
            self.progress.remove_task(earlier)
        self.cells, self.over, self.all = cells, 0, None
        if cells > 1:
            self.all = self.progress.add_task("all rounds", total=cells * rounds, values=f"0 of {cells} cells")

    def begin(self, cell: str, done: int, rounds: int) -> None:
        self.progress.start()
        self.rounds[cell] = done
        self._forward(done)
        self.tasks[cell] = self.progress.add_task(cell, total=rounds, completed=done, values="")

    def step(self, cell: str, round: int, values: dict[str, float], seconds: float) -> None:
        if self.narrow and any(name != "loss" for name in values):
            values = {name: value for name, value in values.items() if name != "loss"}
        words = describe(values) + ("" if self.narrow else f" {_rough(seconds)} s/round")
        self.progress.update(self.tasks[cell], completed=round, values=words)
        self._forward(round - self.rounds[cell])
        self.rounds[cell] = round

    def _forward(self, rounds: int) -> None:
        if self.all is not None:
            self.progress.update(self.all, advance=rounds)

    def note(self, text: str) -> None:
        self.progress.console.print(text, highlight=False, markup=False)  # a note may contain brackets

    def end(self, cell: str, done: bool = True) -> None:
        self.over += done
        if self.all is not None:
            self.progress.update(self.all, values=f"{self.over} of {self.cells} cells")
        if self.cells > self.MOST:
            self.progress.update(self.tasks[cell], visible=False)
        self.progress.refresh()

    def close(self) -> None:
        """Restore the terminal."""
        self.progress.stop()


def describe(values: dict[str, float]) -> str:
    """Write loss and metrics in a few words.

    >>> describe({"loss": 0.51234, "accuracy": 0.98765})
    'loss 0.512 accuracy 98.8 %'
    >>> describe({"accuracy": 0.824, AFTER_TRAINING: 1, TOOK_PART: 1, ASKED: 3})
    'accuracy 82.4 % after local training over 1 of 3 clients'
    >>> describe({"accuracy": 0.824, ON_ALL_TESTS: 1})
    'accuracy 82.4 % on all tests together'
    """
    words = []
    for name, value in values.items():
        if name == CLOCK:
            words.append(f"clock {virtual_time(value)}")
        elif name in (AFTER_TRAINING, ON_ALL_TESTS, ON_SERVER):
            words.append(name)
        elif name == TOOK_PART:
            words.append(f"over {value} of {values[ASKED]} clients")
        elif name != ASKED:
            words.append(f"{name} {100 * value:.1f} %" if is_percentage(name) else f"{name} {value:.3g}")
    return " ".join(words)


def _rough(seconds: float) -> str:
    """Write two digits, and never an exponent for long rounds.

    >>> _rough(0.0283), _rough(4), _rough(113.2)
    ('0.028', '4', '110')
    """
    return f"{float(f'{seconds:.2g}'):g}"


def virtual_time(seconds: float) -> str:
    """Write virtual seconds in the unit that fits.

    >>> virtual_time(12.3456), virtual_time(600), virtual_time(90_000)
    ('12.3 s', '10.0 min', '25.0 h')
    """
    if seconds < 100:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.1f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
