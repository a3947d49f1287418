"""The commands after a run: show, list, report, export."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from fedloom.cli.shared import AsJson, Folder, command, print_result, print_summary, say
from fedloom.errors import FedloomError, InputError

app = typer.Typer()


@command(app)
def show(folder: Folder, as_json: AsJson = False) -> None:
    """Show the results in a run's folder."""
    from fedloom.results.result import Result

    print_summary(Result.read(folder), as_json)


@command(app, "list")
def list_runs(folder: Annotated[Path, typer.Argument(metavar="DIR")] = Path("runs"), as_json: AsJson = False) -> None:
    """List the runs in a folder.

    folder: The folder with the runs.
    """
    from fedloom.results.result import Result

    found, lines = [], []
    for path in sorted(folder.glob("*/run.db")):
        try:
            found.append(Result.read(path.parent))
        except FedloomError as error:
            say(f"{path.parent}: {error}")
    for result in found:
        rounds = max((run.rounds for run in result.runs), default=0)
        cells = f"{len(result.runs):>3} cells  {rounds:>5} rounds"
        lines.append(f"{result.name:<30} {result.status:<8} {cells}  {result.folder}")
    print_result(as_json, [result.json() for result in found], lines or [f"No runs in {folder}."])


@command(app)
def report(folder: Folder, fill: Literal["min-max", "std"] = "min-max") -> None:
    """Write a run's report: one HTML file, with tables and figures in files beside it.

    fill: What the shaded area around means over clients shows.
    """
    from rich.console import Console

    from fedloom.results.result import Result

    with Console(stderr=True).status("Reading the run") as status:  # shows nothing where there is no terminal
        path = Result.read(folder).report(fill, progress=status.update)
    print(f"Report: {path}")
    print(f"Tables: {folder / 'tables'}")
    print(f"Figures: {folder / 'figures'}")


@command(app)
def export(
    folder: Folder,
    csv: bool = False,
    parquet: bool = False,
    tensorboard: bool = False,
    mlflow: bool = False,
    model: bool = False,
    client: Annotated[str | None, typer.Option(metavar="NAME")] = None,
    to: Path | None = None,
) -> None:
    """Export tables, curves or trained weights from a run's folder for other programs.

    csv: All tables as CSV files.
    parquet: All tables as Parquet files.
    tensorboard: All curves as TensorBoard event files.
    mlflow: All cells as runs in a local MLflow store.
    model: The trained weights: safetensors and a state_dict.
    client: With --model: the whole model that this client uses.
    to: The folder to write to (default: DIR/export).
    """
    from fedloom.results import export as exporting
    from fedloom.results.result import Result

    asked: dict[Callable[..., list[Path]], bool] = {
        exporting.export_csv: csv,
        exporting.export_parquet: parquet,
        exporting.export_tensorboard: tensorboard,
        exporting.export_mlflow: mlflow,
        partial(exporting.export_models, client=client): model,
    }
    wanted = [exporter for exporter, yes in asked.items() if yes]
    if not wanted:
        raise InputError("Say what to export: --csv, --parquet, --tensorboard, --mlflow or --model; several are fine.")
    if client is not None and not model:
        raise InputError("--client names the client whose model to export: use it with --model.")
    result = Result.read(folder)
    target = to or folder / "export"
    target.mkdir(parents=True, exist_ok=True)
    for exporter in wanted:
        for path in exporter(result, target):
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
