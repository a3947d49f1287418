"""The commands after a run: show, list, report, export."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from fedloom.cli.shared import AsJson, Folder, print_json, print_table, say
from fedloom.errors import FedloomError, InputError


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command()(show)
    app.command("list")(list_runs)
    app.command()(report)
    app.command()(export)


class Fill(str, Enum):
    """What the shaded area around a mean shows."""

    min_max = "min-max"
    std = "std"


def show(folder: Folder, as_json: AsJson = False) -> None:
    """Show the results in a run's folder."""
    from fedloom.results.result import Result

    result = Result.read(folder)
    if as_json:
        print_json(result.json())
    else:
        print_table(result)


def list_runs(
    folder: Annotated[Path, typer.Argument(help="The folder with the runs.", metavar="DIR")] = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """List the runs in a folder."""
    from fedloom.results.result import Result

    found = []
    for path in sorted(folder.glob("*/run.db")):
        try:
            found.append(Result.read(path.parent))
        except FedloomError as error:
            say(f"{path.parent}: {error}")
    if as_json:
        print_json([result.json() for result in found])
    elif not found:
        print(f"No runs in {folder}.")
    for result in found if not as_json else ():
        rounds = max((run.rounds for run in result.runs), default=0)
        print(f"{result.name:<30} {result.status:<8} {len(result.runs):>3} cells  {rounds:>5} rounds  {result.folder}")


def report(
    folder: Folder,
    fill: Annotated[Fill, typer.Option(help="What the shaded area around means over clients shows.")] = Fill.min_max,
) -> None:
    """Write a run's report: one HTML file, with tables and figures in files beside it."""
    from rich.console import Console

    from fedloom.results.result import Result

    with Console(stderr=True).status("Reading the run") as status:  # shows nothing where there is no terminal
        path = Result.read(folder).report(fill.value, progress=status.update)
    print(f"Report: {path}")
    print(f"Tables: {folder / 'tables'}")
    print(f"Figures: {folder / 'figures'}")


def export(
    folder: Folder,
    csv: Annotated[bool, typer.Option("--csv", help="All tables as CSV files.")] = False,
    parquet: Annotated[bool, typer.Option("--parquet", help="All tables as Parquet files.")] = False,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="All curves as TensorBoard event files.")] = False,
    mlflow: Annotated[bool, typer.Option("--mlflow", help="All cells as runs in a local MLflow store.")] = False,
    model: Annotated[bool, typer.Option("--model", help="The trained weights: safetensors and a state_dict.")] = False,
    client: Annotated[
        str | None, typer.Option(metavar="NAME", help="With --model: the whole model that this client uses.")
    ] = None,
    to: Annotated[Path | None, typer.Option(help="The folder to write to (default: DIR/export).")] = None,
) -> None:
    """Export tables, curves or trained weights from a run's folder for other programs."""
    from fedloom.results import export as exporting
    from fedloom.results.result import Result

    asked = {
        exporting.export_csv: csv,
        exporting.export_parquet: parquet,
        exporting.export_tensorboard: tensorboard,
        exporting.export_mlflow: mlflow,
    }
    wanted = [exporter for exporter, yes in asked.items() if yes]
    if not wanted and not model:
        raise InputError("Say what to export: --csv, --parquet, --tensorboard, --mlflow or --model; several are fine.")
    if client is not None and not model:
        raise InputError("--client names the client whose model to export: use it with --model.")
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
    except FedloomError:  # the weights are written; this would only have been a remark
        return
    if personal:
        say(
            f"For {', '.join(personal)}, only the server's model was written. Clients use another one: each has its "
            "own part. `--client NAME` writes the whole model of one client."
        )
