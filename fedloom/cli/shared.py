"""What the commands have in common: their arguments, messages, progress and how a run's end is told."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from fedloom.errors import FedloomError, InputError

if TYPE_CHECKING:
    from fedloom.experiment.experiment_file import Experiment

File = Annotated[Path, typer.Argument(help="The experiment file (TOML).", metavar="FILE")]
Folder = Annotated[Path, typer.Argument(help="A run's folder.", metavar="DIR")]
Changes = Annotated[
    Optional[list[str]],  # noqa: UP045 (typer reads this at run time, also on Python 3.10)
    typer.Option(
        "--set", metavar="TABLE.KEY=VALUE", help="Change a key of the file; the value is TOML. May be repeated."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="No progress.")]


def say(text: str) -> None:
    """A message, on stderr."""
    print(text, file=sys.stderr, flush=True)


def load(file: Path, changes: list[str] | None) -> Experiment:
    """The experiment in a file, with what the command line changes."""
    from fedloom.experiment import experiment_file

    return experiment_file.load(file, parse_changes(changes or []))


def parse_changes(changes: list[str]) -> dict[str, Any]:
    """`table.key=value` with a TOML value; a bare word is taken as a string.

    >>> parse_changes(["train.lr=0.1", "data.source=digits"])
    {'train.lr': 0.1, 'data.source': 'digits'}
    """
    from fedloom.experiment.experiment_file import tomllib

    parsed = {}
    for change in changes:
        key, equals, value = change.partition("=")
        if not equals or not key.strip():
            raise InputError(f"--set {change}: write it as table.key=value, such as --set train.lr=0.1.")
        try:
            parsed[key.strip()] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            if any(sign in value for sign in "[]{}\"'="):
                raise InputError(f"--set {change}: '{value}' is not a valid TOML value.") from None
            parsed[key.strip()] = value.strip()
    return parsed


@contextmanager
def stop_on_interrupt() -> Iterator[Any]:
    """The first Ctrl-C asks the run to stop after this round; the second one stops at once."""
    asked = False

    def ask(*_: object) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        say("Stopping after this round … (press Ctrl-C again to stop at once)")

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def showing(quiet: bool) -> Iterator[Any]:
    """Progress as suits where it is shown."""
    from rich.console import Console

    from fedloom.experiment.progress import Bar, Lines, Silent

    console = Console(stderr=True)
    progress: Any = Silent() if quiet else Bar(console) if console.is_terminal else Lines()
    try:
        yield progress
    finally:
        if isinstance(progress, Bar):
            progress.close()


def print_rows(table: Any, most: int = 30) -> None:
    """A table on screen."""
    from rich.console import Console
    from rich.table import Table

    made = Table(title=table.title, caption=table.note, caption_justify="left")
    for name, kind in zip(table.columns, table.kinds, strict=True):
        made.add_column(name, justify="left" if kind == "text" else "right")
    for row in table.rows[:most]:
        made.add_row(*table.shown(row))
    if len(table.rows) > most:
        made.add_row("…")
    Console(width=None if sys.stdout.isatty() else 120, highlight=False, markup=False).print(made)


def print_table(result: Any) -> None:
    """A run's numbers on screen."""
    from rich.console import Console

    from fedloom.results.summary import table

    width = Console().width if sys.stdout.isatty() else 100
    Console(width=width).print(table(result))


def finish(result: Any, experiment: Experiment, folder: Path, again: str, as_json: bool, report: bool = True) -> None:
    """Say how a run ended: its numbers, its folder, its picture; `again` is the command to go on with."""
    from rich.console import Console

    if result.status != "done":
        say(f"Stopped; everything up to here is in {folder}. Go on with: {again}")
        if as_json:
            print(json.dumps(result.json(), indent=2))
        raise typer.Exit(130)
    if as_json:
        print(json.dumps(result.json(), indent=2))
    else:
        print_table(result)
    tell = say if as_json else print
    tell(f"Results: {folder}")
    try:
        tell(f"Picture: {result.plot(experiment.task.metrics[0] if experiment.task.metrics else 'loss')}")
    except FedloomError as error:  # the results are there, whether or not they can be drawn
        say(f"No picture: {error}")
    if report:
        try:
            with Console(stderr=True).status("Writing the report") as status:  # shows nothing without a terminal
                path = result.report(progress=status.update)
            tell(f"Report: {path}")
        except Exception as error:  # nor does a report that cannot be written make a finished run a failure
            say(f"No report: {type(error).__name__}: {error}. Try again with: fedloom report {folder}")
