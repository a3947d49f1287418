"""What a user sees while a run goes on: a bar in a terminal, a line every ten seconds elsewhere, or nothing."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any, Protocol

SECONDS_BETWEEN_LINES = 10.0


class Progress(Protocol):
    """Told about a run as it happens."""

    def begin(self, cell: str, done: int, rounds: int) -> None:
        """A cell starts, or goes on after `done` rounds."""

    def step(self, round: int, values: dict[str, float], seconds: float) -> None:
        """A round is over."""

    def note(self, text: str) -> None:
        """Something the user should know."""

    def end(self) -> None:
        """The cell is over."""


class Silent:
    """No progress; what the user should know goes to the log."""

    def begin(self, cell: str, done: int, rounds: int) -> None: ...
    def step(self, round: int, values: dict[str, float], seconds: float) -> None: ...
    def end(self) -> None: ...

    def note(self, text: str) -> None:
        logging.getLogger("fedloom").warning(text)


class Lines:
    """One line every ten seconds, for logs."""

    def __init__(self, stream: Any = None) -> None:
        self.stream = stream or sys.stderr
        self.cell, self.rounds, self.last, self.round, self.text = "", 0, 0.0, 0, ""

    def begin(self, cell: str, done: int, rounds: int) -> None:
        self.cell, self.rounds, self.last, self.text = cell, rounds, time.monotonic(), ""

    def step(self, round: int, values: dict[str, float], seconds: float) -> None:
        words = [f"{self.cell}: round {round} of {self.rounds}", describe(values), f"{seconds:.2g} s a round"]
        self.text = ", ".join(word for word in words if word)
        if time.monotonic() - self.last >= SECONDS_BETWEEN_LINES:
            self.note(self.text)
            self.last, self.text = time.monotonic(), ""

    def note(self, text: str) -> None:
        print(text, file=self.stream, flush=True)

    def end(self) -> None:
        if self.text:
            self.note(self.text)


class Bar:
    """A progress bar with rounds, loss, accuracy, seconds a round and time left."""

    def __init__(self, console: Any) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self.progress = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[values]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            expand=True,
        )
        self.task: Any = None

    def begin(self, cell: str, done: int, rounds: int) -> None:
        if self.task is None:
            self.progress.start()
        self.task = self.progress.add_task(cell, total=rounds, completed=done, values="")

    def step(self, round: int, values: dict[str, float], seconds: float) -> None:
        self.progress.update(self.task, completed=round, values=f"{describe(values)} {seconds:.2g} s/round")

    def note(self, text: str) -> None:
        self.progress.console.print(text, highlight=False)

    def end(self) -> None:
        self.progress.refresh()

    def close(self) -> None:
        """Leave the terminal as it was."""
        self.progress.stop()


def describe(values: dict[str, float]) -> str:
    """Loss and metrics in a few words.

    >>> describe({"loss": 0.51234, "accuracy": 0.98765})
    'loss 0.512 accuracy 98.8 %'
    """
    words = []
    for name, value in values.items():
        share = name == "accuracy" or name.startswith("top_")
        words.append(f"{name} {100 * value:.1f} %" if share else f"{name} {value:.3g}")
    return " ".join(words)
