"""What the commands share: arguments, messages, progress, and what they print at the end of a run."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import itertools
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from fedloom.errors import FedloomError, InputError
from fedloom.results.safe_text import visible_lines

if TYPE_CHECKING:
    from rich.console import Console

    from fedloom.experiment.experiment_file import Experiment
    from fedloom.results.run_data import RunData

File = Annotated[Path, typer.Argument(help="The experiment file (TOML).", metavar="FILE")]
Folder = Annotated[Path, typer.Argument(help="A run's folder.", metavar="DIR")]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="TABLE.KEY=VALUE", help="Change a key of the file. The value is TOML. Repeatable."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Show no progress.")]
Workers = Annotated[int | None, typer.Option(help="Worker processes (default: one per core).")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")]
Out = Annotated[Path | None, typer.Option(help="The run's folder (default: runs/NAME).")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Start over; an old folder is kept beside the new one.")]

# what people type at first who know other programs, and what they want
GUESSES = {
    **dict.fromkeys(("new", "create", "template"), "init"),
    **dict.fromkeys(("train", "fit", "start", "simulate", "resume", "continue"), "run"),
    **dict.fromkeys(("validate", "lint", "estimate"), "check"),
    **dict.fromkeys(("plot", "figures", "summary"), "report"),
    **dict.fromkeys(("results", "print"), "show"),
    **dict.fromkeys(("ls", "runs"), "list"),
    **dict.fromkeys(("delete", "rm"), "remove"),
    **dict.fromkeys(("tune", "search"), "sweep"),
    **dict.fromkeys(("server", "coordinator"), "serve"),
    **dict.fromkeys(("client", "agent", "connect"), "join"),
    **{name: f"data {name}" for name in ("describe", "summarize", "agree", "get")},
    "download": "data get",
}

DEGRADED = 4  # the exit code of a run that is done, but in which some rounds did not count

Function = TypeVar("Function", bound=Callable[..., None])


class _PlainFlags:
    """A command whose help shows no type for flags, because they take no value."""

    def get_params(self, ctx: Any) -> list[Any]:
        found: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for parameter in found:
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
        return found


class Command(_PlainFlags, TyperCommand):
    """A command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments; for a wrong guess, say what to write."""
        given = [*args]  # reading takes them away
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # click's usage errors, and its exit after --help
            said = error.format_message() if hasattr(error, "format_message") else ""
            if advice := _about_arguments(said, given):
                raise InputError(advice) from None
            raise


def _about_arguments(said: str, given: list[str]) -> str:
    """Return what to write instead of arguments that were refused, or an empty string."""
    if said.startswith("No such option: --live"):
        return "There is no option --live here: `fedloom watch RUN` shows a run in the browser."
    for option, key, value in zip(given, given[1:], given[2:], strict=False):
        if "extra argument" in said and option == "--set" and "=" not in key:
            return f"--set {key} {value}: write it in one word, --set {key}={value.strip('=') or 'VALUE'}."
    return ""


class Group(_PlainFlags, TyperGroup):
    """A command that has others."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find a command; for a wrong guess, say which one does that."""
        wanted = GUESSES.get(args[0]) if ctx.parent is None else None
        if wanted is not None:
            raise InputError(f"There is no command '{args[0]}'. Did you mean `fedloom {wanted}`?")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run a command. Typer would end an interrupted one without a word."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise typer.Abort from error


def command(app: typer.Typer, name: str | None = None) -> Callable[[Function], Function]:
    """Return a decorator that adds a command; its docstring is the help.

    The docstring's first paragraph says what the command does. Each line after it, `parameter: meaning`, says what a
    parameter means. A parameter with a default is an option, and one that is False by default is a flag, unless its
    annotation says otherwise.
    """

    def add(function: Function) -> Function:
        about, _, meanings = inspect.cleandoc(function.__doc__ or "").partition("\n\n")
        hints, parameters = get_type_hints(function, include_extras=True), inspect.signature(function).parameters
        for line in meanings.splitlines():
            key, _, meaning = line.partition(": ")
            hint, default = hints[key], parameters[key].default
            kind, described = get_args(hint) if get_origin(hint) is Annotated else (hint, None)
            if described is None and default is inspect.Parameter.empty:
                described = typer.Argument(metavar=key.upper())
            elif described is None:
                described = typer.Option(f"--{key.replace('_', '-')}") if default is False else typer.Option()
            described = copy.copy(described)  # several commands may share an annotation
            described.help = _literal(meaning)
            function.__annotations__[key] = Annotated[kind, described]
        return app.command(name, help=_literal(about), cls=Command)(function)

    return add


def _literal(text: str) -> str:
    """Return a text whose [tables] typer shows; otherwise they would be marks of style."""
    return text.replace("[", r"\[")


def say(text: str) -> None:
    """Print a message on stderr. Other machines may have written a part of it."""
    print(f"{visible_lines(text)}\n", end="", file=sys.stderr, flush=True)  # one piece: several threads may write


def again() -> str:
    """Return the command that continues what this one began: as it was given, without what would start over."""
    return shlex.join(["fedloom", *(word for word in sys.argv[1:] if word != "--fresh")])


def need(what: str, extra: str, *modules: str) -> None:
    """Raise an error that says what to install if some of these modules are missing."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(f"{what} needs {', '.join(missing)}: pip install 'fedloom[{extra}]'.")


def need_network() -> None:
    """Raise an error that says what to install if the packages for networks are missing."""
    need("A real federation", "network", "fastapi", "uvicorn", "httpx", "cryptography", "zstandard")


def check_new(path: Path, force: bool) -> None:
    """Refuse to overwrite a file, unless the user says so."""
    if path.exists() and not force:
        raise InputError(f"{path} exists already. Choose another name, or use --force to overwrite it.")


def with_workers(changes: list[str] | None, workers: int | None) -> list[str] | None:
    """Return the changes of a file, with the number of worker processes if one was given."""
    return changes if workers is None else [*(changes or []), f"run.workers={workers}"]


def load(file: Path, changes: list[str] | None) -> Experiment:
    """Load the experiment in a file, with the changes from the command line."""
    from fedloom.experiment import experiment_file

    return experiment_file.load(file, parse_changes(changes))


def parse_changes(changes: list[str] | None) -> dict[str, Any]:
    """Read `table.key=value` with a TOML value; a bare word is a string.

    >>> parse_changes(["train.lr=0.1", "data.source=digits"])
    {'train.lr': 0.1, 'data.source': 'digits'}
    """
    from fedloom.files import toml_value

    parsed = {}
    for change in changes or []:
        key, equals, value = change.partition("=")
        if not equals or not key.strip():
            raise InputError(f"--set {change}: write it as table.key=value, such as --set train.lr=0.1.")
        try:
            parsed[key.strip()] = toml_value(value)
        except ValueError:
            if any(sign in value for sign in "[]{}\"'="):
                raise InputError(f"--set {change}: '{value}' is not a valid TOML value.") from None
            parsed[key.strip()] = value.strip()
    return parsed


@contextmanager
def stop_on_interrupt() -> Iterator[Any]:
    """Let the first Ctrl-C stop the run after this round, and the second one at once."""
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
    """Show a bar in a terminal, lines elsewhere, or nothing."""
    from rich.console import Console

    from fedloom.experiment.progress import Bar, Lines, Silent

    console = Console(stderr=True)
    progress: Any = Silent() if quiet else Bar(console) if console.is_terminal else Lines()
    try:
        yield progress
    finally:
        if isinstance(progress, Bar):
            progress.close()


def console(width: int) -> Console:
    """Return a console for stdout: as wide as the terminal or COLUMNS says, or `width` columns elsewhere.

    Square brackets are text: names of tables, such as [data], and of people's classes and clients have them.
    """
    from rich.console import Console

    wide = None if sys.stdout.isatty() or "COLUMNS" in os.environ else width
    return Console(width=wide, highlight=False, markup=False)


def print_result(as_json: bool, content: Any, lines: Iterable[str]) -> None:
    """Print a result as JSON, or as lines for people."""
    from fedloom.files import json_text

    for line in [json_text(content, indent=2)] if as_json else lines:
        print(visible_lines(line))


def print_json(content: Any, indent: int | None = 2, quiet: bool = False) -> Callable[[str], None]:
    """Print a result as JSON on stdout; return how to print what follows it: on stderr, or not at all."""
    from fedloom.files import json_text

    print(json_text(content, indent))
    return (lambda _: None) if quiet else say


def print_rows(table: Any, most: int = 30) -> Callable[[str], None]:
    """Print a table; return how to print what follows it."""
    from rich.table import Table

    from fedloom.results.table import missing

    made = Table(title=table.title, caption=table.note, caption_justify="left")
    # in a terminal, empty columns take the room of others; the files have them all
    filled = [not all(missing(row[place]) for row in table.rows) for place in range(len(table.columns))]
    rows = [list(itertools.compress(table.shown(row), filled)) for row in table.rows[:most]]
    for name, kind in itertools.compress(zip(table.columns, table.kinds, strict=True), filled):
        made.add_column(name, justify="left" if kind == "text" else "right", overflow="fold")
    for row in rows:
        made.add_row(*row)
    if len(table.rows) > most:
        made.add_row("…")
    out = console(120)
    widths = [max(map(len, cells)) for cells in zip(itertools.compress(table.columns, filled), *rows, strict=True)]
    if sum(widths) + 3 * len(widths) + 1 > out.width:
        made.padding = 0  # the blanks beside a border make way before words do
    out.print(made)
    return print


def print_summary(result: Any, as_json: bool, metric: str | None = None, quiet: bool = False) -> Callable[[str], None]:
    """Print a run's numbers; return how to print what follows them."""
    from fedloom.results.clients_of_seeds import about_data
    from fedloom.results.disclosure import epsilons
    from fedloom.results.report_warnings import on_screen
    from fedloom.results.run_data import RunData
    from fedloom.results.summary import table

    run = RunData.read(result.folder)
    made, cautions = table(result, metric), on_screen(run)
    if as_json:  # otherwise they were shown when the run began, with -q in the log
        cautions += about_data(run)
    if as_json:
        return print_json({**result.json(), "cautions": cautions, **epsilons(run)}, quiet=quiet)
    shown, caption, made.caption = console(100), made.caption, None
    shown.print(made)
    if caption:
        shown.print(caption)  # as wide as the screen, not as a table of two columns
    for caution in cautions:
        say(f"Caution: {caution}")
    return print


def _is_older(file: Path, run: RunData) -> bool:
    """Whether a file is there, and some of the run was computed after it was written."""
    ends = [datetime.fromisoformat(cell["finished"]).timestamp() for cell in run.cells.values() if cell["finished"]]
    return file.exists() and file.stat().st_mtime < max(ends, default=0)


def finish(
    result: Any,
    experiment: Experiment,
    folder: Path,
    as_json: bool,
    report: bool = True,
    quiet: bool = False,
) -> None:
    """Print how a run ended: its numbers, folder and picture, or the command that continues it."""
    from rich.console import Console

    from fedloom.results.disclosure import not_evaluated
    from fedloom.results.run_data import RunData

    if not result.finished:
        say(f"Stopped; everything up to here is in {folder}. Continue with: {again()}")
        if as_json:
            print_json(result.json())
        raise typer.Exit(130)
    write = print_summary(result, as_json, quiet=quiet)
    write(f"Results: {folder}")
    try:
        write(f"Picture: {result.plot(next(iter(result.metrics), 'loss'))}")
    except FedloomError as error:  # the results are there even if they cannot be drawn
        # an evaluation alone has no curve, and the table says why protections leave nothing to draw
        if any(cell.rounds for cell in result.runs) and not not_evaluated(RunData.read(folder)):
            say(f"No picture: {error}")
    if report:
        try:
            with Console(stderr=True).status("Writing the report") as status:  # shows nothing without a terminal
                path = result.report(progress=status.update)
            write(f"Report: {path}")
        except Exception as error:  # a finished run is a success even without its report
            say(f"No report: {type(error).__name__}: {error}. Try again with: fedloom report {folder}")
    elif _is_older(folder / "report.html", RunData.read(folder)):
        say(
            f"report.html and the tables are of an earlier state of this run. Write them again: fedloom report {folder}"
        )
    abandoned = sum(cell.abandoned for cell in result.runs)
    if abandoned:
        rounds = sum(cell.rounds for cell in result.runs)
        say(f"{abandoned} of {rounds} rounds did not count: too few clients took part or sent valid updates.")
        raise typer.Exit(DEGRADED)
