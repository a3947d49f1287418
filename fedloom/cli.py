"""The command line. Results go to stdout, progress and messages to stderr; errors are one message and an exit code."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from fedloom import __version__, cli_network
from fedloom.errors import FedloomError, InputError

if TYPE_CHECKING:
    from fedloom.experiment.spec import Experiment

app = typer.Typer(
    no_args_is_help=True,
    help="Federated learning: one experiment file in, trained models, tables and a picture out.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
data_app = typer.Typer(no_args_is_help=True, help="Look at data, or fetch it.")
app.add_typer(data_app, name="data")
cli_network.register(app)

File = Annotated[Path, typer.Argument(help="The experiment file (TOML).", metavar="FILE")]
Changes = Annotated[
    Optional[list[str]],  # noqa: UP045 (typer reads this at run time, also on Python 3.10)
    typer.Option(
        "--set", metavar="TABLE.KEY=VALUE", help="Change a key of the file; the value is TOML. May be repeated."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


class Fill(str, Enum):
    """What is shaded in sausage graphs."""

    min_max = "min-max"
    std = "std"


Folder = Annotated[Path, typer.Argument(help="A run's folder.", metavar="DIR")]


def main() -> None:
    """Entry point: turns fedloom's own errors into a message and an exit code."""
    try:
        code = app(standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except FedloomError as error:
        _say(f"error: {error}")
        sys.exit(error.exit_code)
    except typer.Exit as stop:
        sys.exit(stop.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        _say("Interrupted.")
        sys.exit(130)
    except Exception as error:
        if hasattr(error, "format_message"):  # click's usage errors
            if error.format_message():
                _say(f"error: {error.format_message()}")
            sys.exit(getattr(error, "exit_code", 2))
        raise


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            torch = version("torch")  # the package's own record: importing torch takes a second
        except PackageNotFoundError:
            torch = "not installed"
        print(f"fedloom {__version__} (torch {torch}, Python {sys.version.split()[0]})")
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show versions.")
    ] = False,
) -> None:
    """Options of the command itself."""


def _load(file: Path, changes: list[str] | None) -> Experiment:
    from fedloom.experiment import spec

    return spec.load(file, _parse_changes(changes or []))


def _parse_changes(changes: list[str]) -> dict[str, Any]:
    """`table.key=value` with a TOML value; a bare word is taken as a string.

    >>> _parse_changes(["train.lr=0.1", "data.source=digits"])
    {'train.lr': 0.1, 'data.source': 'digits'}
    """
    from fedloom.experiment.spec import tomllib

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
def _stop_on_interrupt() -> Iterator[Any]:
    """The first Ctrl-C asks the run to stop after this round; the second one stops at once."""
    asked = False

    def ask(*_: object) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        _say("Stopping after this round … (press Ctrl-C again to stop at once)")

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)


@app.command()
def run(
    file: File,
    changes: Changes = None,
    workers: Annotated[Optional[int], typer.Option(help="Worker processes (default: one a core).")] = None,  # noqa: UP045
    out: Annotated[Optional[Path], typer.Option(help="The run's folder (default: runs/NAME).")] = None,  # noqa: UP045
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start anew; an old folder is kept beside the new one.")
    ] = False,
    as_json: AsJson = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="No progress.")] = False,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Also say how it is computed.")] = False,
    report: Annotated[bool, typer.Option("--report/--no-report", help="End with report.html in the folder.")] = True,
) -> None:
    """Run an experiment, or go on where it stopped."""
    if workers is not None:
        changes = [*(changes or []), f"run.workers={workers}"]
    _run(file, changes, out, fresh, as_json, quiet, verbose, report)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="The run's folder.")] = Path("runs/demo"),
    as_json: AsJson = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="No progress.")] = False,
) -> None:
    """Compare seven ways to learn on handwritten digits at ten data holders: a first run, in under two minutes."""
    file = Path(__file__).parent / "experiment" / "files" / "demo.toml"
    _run(file, None, out, False, as_json, quiet, False, True)


def _run(
    file: Path,
    changes: list[str] | None,
    out: Path | None,
    fresh: bool,
    as_json: bool,
    quiet: bool,
    verbose: bool,
    report: bool,
) -> None:
    from fedloom.experiment.plan import Plan
    from fedloom.experiment.run import run as run_experiment

    experiment = _load(file, changes)
    plan = Plan(experiment)
    folder = out or Path("runs") / experiment.name
    with _showing(quiet) as progress, _stop_on_interrupt() as should_stop:
        result = run_experiment(
            **plan.arguments(), out=folder, fresh=fresh, progress=progress, should_stop=should_stop, verbose=verbose
        )
    _finish(result, experiment, folder, f"fedloom run {file}" + (f" --out {out}" if out else ""), as_json, report)


def _finish(result: Any, experiment: Experiment, folder: Path, again: str, as_json: bool, report: bool = True) -> None:
    """Say how a run ended: its numbers, its folder, its picture; `again` is the command to go on with."""
    if result.status != "done":
        _say(f"Stopped; everything up to here is in {folder}. Go on with: {again}")
        if as_json:
            print(json.dumps(result.json(), indent=2))
        raise typer.Exit(130)
    if as_json:
        print(json.dumps(result.json(), indent=2))
    else:
        _print_table(result)
    tell = _say if as_json else print
    tell(f"Results: {folder}")
    try:
        tell(f"Picture: {result.plot(experiment.task.metrics[0] if experiment.task.metrics else 'loss')}")
    except FedloomError as error:  # the results are there, whether or not they can be drawn
        _say(f"No picture: {error}")
    if report:
        try:
            tell(f"Report: {result.report()}")
        except Exception as error:  # nor does a report that cannot be written make a finished run a failure
            _say(f"No report: {type(error).__name__}: {error}. Try again with: fedloom report {folder}")


@app.command()
def sweep(
    file: File,
    over: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--over", metavar="TABLE.KEY=A,B,C", help="Values of a key to try. May be repeated: all pairs."),
    ] = None,
    random: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="Draw so many settings; keys may then have ranges: low:high or low:high:log."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of what is drawn at random.")] = 0,
    prune: Annotated[
        bool, typer.Option("--prune", help="Only the better half after a third of the rounds goes to the end.")
    ] = False,
    changes: Changes = None,
    out: Annotated[Optional[Path], typer.Option(help="The sweep's folder (default: runs/NAME-sweep).")] = None,  # noqa: UP045
    fresh: Annotated[bool, typer.Option("--fresh", help="Start anew; old folders are kept.")] = False,
    as_json: AsJson = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="No progress.")] = False,
) -> None:
    """Try many settings and rank them by validation; the test splits are not looked at."""
    from fedloom.experiment import choices
    from fedloom.experiment.sweep import sweep as try_all

    with _showing(quiet) as progress, _stop_on_interrupt() as should_stop:
        found = try_all(
            file,
            choices.parse_over(over or []),
            changes=_parse_changes(changes or []),
            random=random,
            seed=seed,
            out=out,
            fresh=fresh,
            prune=prune,
            progress=progress,
            should_stop=should_stop,
        )
    if found is None:
        _say("Stopped. The same command goes on.")
        raise typer.Exit(130)
    if as_json:
        print(json.dumps(found.json(), indent=2))
    else:
        _print_rows(found.table())
    say = _say if as_json else print
    bests = [found.best(label) for label in dict.fromkeys(one.label for one in found.tried)]
    for best in (one for one in bests if one is not None):
        chosen = " ".join(f"--set {key}={json.dumps(value)}" for key, value in best.setting.items())
        say(f"Best on validation data: {choices.name(best.setting)} ({best.label}). Measure it on test data, once:")
        say(f"  fedloom run {file} {chosen} --out {found.folder / f'best-{best.label}'}")
    say(f"Table: {found.folder / 'sweep.csv'}")
    if (found.folder / "sweep.png").is_file():
        say(f"Picture: {found.folder / 'sweep.png'}")


@app.command()
def reproduce(
    name: Annotated[Optional[str], typer.Argument(help="Which (without it: a list).", metavar="NAME")] = None,  # noqa: UP045
    quick: Annotated[bool, typer.Option("--quick", help="A shortened version, labelled as such.")] = False,
    only: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--only", metavar="ROW", help="Only rows of this name; * stands for anything. May be repeated."),
    ] = None,
    data: Annotated[Optional[Path], typer.Option(help="The folder with the data.")] = None,  # noqa: UP045
    changes: Changes = None,
    out: Annotated[Optional[Path], typer.Option(help="Folder (default: runs/reproduce-NAME).")] = None,  # noqa: UP045
    fresh: Annotated[bool, typer.Option("--fresh", help="Start anew; old folders are kept.")] = False,
    estimate: Annotated[bool, typer.Option("--estimate", help="Only say how long it would take.")] = False,
    as_json: AsJson = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="No progress.")] = False,
) -> None:
    """Run published experiments again, and show ours and theirs side by side."""
    from fedloom.experiment import reproduce as again

    if name is None:
        for known in again.names():
            print(f"{known:<20} {again.load(known).title}")
        return
    reproduction = again.load(name)
    more = {"data.path": str(data.resolve())} if data is not None else {}
    planned = again.plan(reproduction, quick=quick, only=only or [], changes={**more, **_parse_changes(changes or [])})
    rows = f"{len(planned)} row" + ("s" if len(planned) > 1 else "")
    total = sum(one.seconds for one in planned)
    _say(f"{reproduction.title}{' (quick)' if quick else ''}: {rows}, roughly {again.duration(total)} on this machine.")
    if estimate:
        for one in planned:
            print(f"{one.row.name:<30} {again.duration(one.seconds)}")
        return
    folder = out or Path("runs") / f"reproduce-{Path(name).stem}{'-quick' if quick else ''}"
    with _showing(quiet) as progress, _stop_on_interrupt() as should_stop:
        table = again.reproduce(
            reproduction, planned, folder, quick=quick, fresh=fresh, progress=progress, should_stop=should_stop
        )
    if table is None:
        _say("Stopped. The same command goes on.")
        raise typer.Exit(130)
    if as_json:
        print(json.dumps({"title": table.title, "columns": table.columns, "rows": table.rows, "note": table.note}))
    else:
        _print_rows(table)
    (_say if as_json else print)(f"Table: {folder / 'reproduction.csv'}")


@contextmanager
def _showing(quiet: bool) -> Iterator[Any]:
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


def _print_rows(table: Any, most: int = 30) -> None:
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


def _print_table(result: Any) -> None:
    from rich.console import Console

    from fedloom.experiment.summary import table

    width = Console().width if sys.stdout.isatty() else 100
    Console(width=width).print(table(result))


@app.command()
def init(
    file: Annotated[Path, typer.Argument(help="Where to write it.", metavar="FILE")] = Path("experiment.toml"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Write a commented experiment file to start from."""
    if file.exists() and not force:
        raise InputError(f"{file} exists already. Choose another name, or use --force to overwrite it.")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(
        (Path(__file__).parent / "experiment" / "files" / "template.toml").read_text(encoding="utf-8"), encoding="utf-8"
    )
    print(f"Wrote {file}. Next: fedloom check {file}, then fedloom run {file}")


@app.command()
def check(file: File, changes: Changes = None, as_json: AsJson = False) -> None:
    """Show what a file means and what it would cost; nothing is run."""
    import tomli_w

    from fedloom.experiment.check import estimate
    from fedloom.experiment.plan import Plan

    experiment = _load(file, changes)
    costs = estimate(Plan(experiment))
    if as_json:
        print(json.dumps({"experiment": experiment.resolved(), "estimate": costs.json()}, indent=2))
        return
    print(tomli_w.dumps(experiment.resolved()))
    for line in costs.lines():
        print(f"# {line}")


@app.command()
def bench(
    file: File,
    changes: Changes = None,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds to measure, after two that are not counted.")] = 10,
    as_json: AsJson = False,
) -> None:
    """Measure how long a file's rounds take on this machine; nothing is stored."""
    from fedloom.experiment.bench import bench as measure
    from fedloom.experiment.plan import Plan

    with _showing(quiet=False) as progress:
        found = measure(Plan(_load(file, changes)), rounds, progress)
    if as_json:
        print(json.dumps(found.json(), indent=2))
        return
    for timing in found.timings:
        print(timing.algorithm)
        for line in timing.lines():
            print(f"  {line}")
    print("how")
    for choice in found.choices:
        print(f"  {choice}")


@app.command()
def show(folder: Folder, as_json: AsJson = False) -> None:
    """Show the results in a run's folder."""
    from fedloom.experiment.result import Result

    result = Result.read(folder)
    if as_json:
        print(json.dumps(result.json(), indent=2))
    else:
        _print_table(result)


@app.command()
def report(
    folder: Folder,
    fill: Annotated[Fill, typer.Option(help="What is shaded around means over users.")] = Fill.min_max,
) -> None:
    """Write a run's report: one HTML file, with tables and figures as files beside it."""
    from fedloom.experiment.result import Result

    print(f"Report: {Result.read(folder).report(fill.value)}")
    print(f"Tables: {folder / 'tables'}")
    print(f"Figures: {folder / 'figures'}")


@app.command("list")
def list_runs(
    folder: Annotated[Path, typer.Argument(help="Where runs are.", metavar="DIR")] = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """List the runs in a folder."""
    from fedloom.experiment.result import Result

    found = []
    for path in sorted(folder.glob("*/run.db")):
        try:
            found.append(Result.read(path.parent))
        except FedloomError as error:
            _say(f"{path.parent}: {error}")
    if as_json:
        print(json.dumps([result.json() for result in found], indent=2))
    elif not found:
        print(f"No runs in {folder}.")
    for result in found if not as_json else ():
        rounds = max((run.rounds for run in result.runs), default=0)
        print(f"{result.name:<30} {result.status:<8} {len(result.runs):>3} cells  {rounds:>5} rounds  {result.folder}")


@app.command()
def algorithms(
    name: Annotated[Optional[str], typer.Argument(help="One algorithm.", metavar="NAME")] = None,  # noqa: UP045
    as_json: AsJson = False,
) -> None:
    """List the algorithms, or show all about one."""
    from dataclasses import asdict

    from fedloom import catalogue

    if name is None:
        found = catalogue.entries()
        if as_json:
            print(json.dumps([asdict(entry) for entry in found], indent=2))
        for entry in found if not as_json else ():
            print(f"{entry.name:<12} {entry.summary}")
        return
    entry = catalogue.entry(name)
    if as_json:
        print(json.dumps(asdict(entry), indent=2))
        return
    print(f"{entry.name}: {entry.summary}\n")
    if entry.details:
        print(f"{entry.details}\n")
    for key, (kind, default) in entry.fields.items():
        print(f"  {key:<16} {kind} (default {default})")
    print(f"\nAlso any key of [train]. Secure aggregation: {entry.secure}. On a network: {entry.network}.")
    if entry.reference:
        print(f"Reference: {entry.reference}.")


@app.command()
def graph(
    file: File,
    changes: Changes = None,
    picture: Annotated[Path | None, typer.Option(help="Where to draw it (default: FILE's name + -graph.png).")] = None,
) -> None:
    """Draw who hears whom in the peer-to-peer algorithms of a file."""
    from fedloom.algorithms import Peer
    from fedloom.experiment.graph import draw
    from fedloom.experiment.plan import Plan

    experiment = _load(file, changes)
    peers = {label: one for label, one in experiment.algorithm.items() if isinstance(one, Peer)}
    if not peers:
        raise InputError(
            f'{file} has no peer-to-peer algorithm: add one, such as [algorithm] ring = {{ name = "peer" }}.'
        )
    federation = Plan(experiment).federation(experiment.seeds[0])
    count = experiment.cohort.size(federation.clients)
    path = picture or Path(f"{file.stem}-graph.png")
    draw({label: peer.graph(count, experiment.seeds[0], 1) for label, peer in peers.items()}, path)
    print(f"Picture: {path}")


@app.command()
def export(
    folder: Folder,
    csv: Annotated[bool, typer.Option("--csv", help="All tables as CSV files.")] = False,
    parquet: Annotated[bool, typer.Option("--parquet", help="All tables as Parquet files.")] = False,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="All curves as TensorBoard event files.")] = False,
    mlflow: Annotated[bool, typer.Option("--mlflow", help="All cells as runs in a local MLflow store.")] = False,
    model: Annotated[bool, typer.Option("--model", help="The trained weights: safetensors and a state_dict.")] = False,
    client: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="NAME", help="With --model: the whole model that this client uses."),
    ] = None,
    to: Annotated[Optional[Path], typer.Option(help="Where to (default: DIR/export).")] = None,  # noqa: UP045
) -> None:
    """Write tables, curves or trained weights out of a run's folder, for other programs."""
    from fedloom.experiment import export as exporting
    from fedloom.experiment.result import Result

    wanted = [
        exporter
        for asked, exporter in (
            (csv, exporting.export_csv),
            (parquet, exporting.export_parquet),
            (tensorboard, exporting.export_tensorboard),
            (mlflow, exporting.export_mlflow),
        )
        if asked
    ]
    if not wanted and not model:
        raise InputError("Say what to export: --csv, --parquet, --tensorboard, --mlflow or --model; several are fine.")
    if client is not None and not model:
        raise InputError("--client says whose model to export: use it with --model.")
    result = Result.read(folder)
    target = to or folder / "export"
    target.mkdir(parents=True, exist_ok=True)
    for exporter in wanted:
        for path in exporter(result, target):
            print(path)
    for path in exporting.export_models(result, target, client) if model else ():
        print(path)
    if model and client is None:
        _say_what_is_missing(result)


def _say_what_is_missing(result: Any) -> None:
    try:
        personal = result.personal()
    except FedloomError:  # the weights are written, whether or not more can be said about them
        return
    if personal:
        _say(
            f"Of {', '.join(personal)} only the server's model was written, which is not what clients use: each has a "
            "part of its own. `--client NAME` writes the whole model of one of them."
        )


@data_app.command()
def describe(
    file: File,
    changes: Changes = None,
    picture: Annotated[Path | None, typer.Option(help="Where to draw it (default: FILE's name + -data.png).")] = None,
) -> None:
    """Show what each client got: a table and a picture of clients and labels."""
    from rich.console import Console

    from fedloom.data import describe as describing
    from fedloom.experiment.plan import Plan

    experiment = _load(file, changes)
    federation = Plan(experiment).federation(experiment.seeds[0])
    description = describing.describe(federation)
    Console(width=None if sys.stdout.isatty() else 80).print(describing.table(description))
    path = picture or Path(f"{file.stem}-data.png")
    describing.plot(federation, path)
    print(f"Picture: {path}")


@data_app.command()
def get(
    name: Annotated[str, typer.Argument(help="mnist or fashion_mnist.", metavar="NAME")],
    to: Annotated[Optional[Path], typer.Option(help="Folder (default: the user's cache).")] = None,  # noqa: UP045
    from_file: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--from", help="A folder or file fetched by hand, instead of a download."),
    ] = None,
) -> None:
    """Fetch a dataset, with checksums."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    from fedloom.data.sources import download
    from fedloom.data.sources.base import cache

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        tasks: dict[str, Any] = {}

        def progress(what: str, done: int, total: int | None) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done, total=total)

        folder = download.get(name, to or cache(name), from_file, progress)
    print(folder)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main()
