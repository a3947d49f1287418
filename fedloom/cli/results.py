"""The commands after a run: show, list, compare, report, export, remove."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fedloom.cli.shared import (
    AsJson,
    Folder,
    Force,
    check_new,
    command,
    console,
    print_json,
    print_rows,
    print_summary,
    say,
)
from fedloom.errors import FedloomError, InputError
from fedloom.results.safe_text import visible, visible_lines

if TYPE_CHECKING:
    from rich.table import Table

app = typer.Typer()
CONTINUES = "The run is interrupted: its process was stopped or died. The command that started it continues it."


Metric = Annotated[str | None, typer.Option(metavar="NAME", help="The metric to show (default: the first).")]


@command(app)
def show(folder: Folder, metric: Metric = None, as_json: AsJson = False) -> None:
    """Show the results in the folder of a run or of a sweep."""
    from fedloom.results.result import Result
    from fedloom.tuning import sweep_folder

    if sweep_folder.is_sweep(folder):
        found = folder / ("sweep.json" if as_json else "sweep.md")
        if not found.is_file():
            raise InputError(f"The sweep in {folder} is not finished: repeat its command, and it continues.")
        return print(visible_lines(found.read_text(encoding="utf-8").rstrip()))
    result = Result.read(folder)
    write = print_summary(result, as_json, metric)
    if result.status == "failed":
        for error in dict.fromkeys(cell.error for cell in result.runs if cell.error):
            write(visible_lines(f"The run failed. {error}"))
    elif not result.finished:
        write(CONTINUES if result.status == "interrupted" else f"The run is {result.status}.")


@command(app, "list")
def list_runs(folder: Annotated[Path, typer.Argument(metavar="DIR")] = Path("runs"), as_json: AsJson = False) -> None:
    """List the runs and sweeps in a folder: when they ended or began, their status and their best result.

    folder: The folder with the runs.
    """
    from dataclasses import asdict

    from fedloom.results.run_data import RunData
    from fedloom.results.summary import in_short
    from fedloom.tuning import sweep_folder

    if not folder.is_dir():
        raise InputError(f"There is no folder {folder}. `fedloom run FILE` makes runs/NAME; --out chooses another.")
    found: list[dict[str, Any]] = []
    runs, sweeps = _listing("run", "cells", "rounds"), _listing("sweep", "settings", "over")
    for path in sorted([*folder.glob("*/run.db"), *folder.glob(f"*/{sweep_folder.FILE}")]):
        try:
            if path.name == sweep_folder.FILE:
                sweep = sweep_folder.read(path.parent)
                about = (str(sweep.settings or "–"), visible(", ".join(sweep.over)), visible(sweep.best) or "–")
                sweeps.add_row(visible(sweep.name), sweep.status, _date(sweep.finished or sweep.started), *about)
                found.append({"kind": "sweep", **asdict(sweep)})
                continue
            run = RunData.read(path.parent)
            result, best = run.result, in_short(run)
        except FedloomError as error:
            say(f"{path.parent}: {error}")
            continue
        moments = {"started": run.started_at, "finished": run.finished_at}
        found.append({"kind": "run", **result.json(), **moments, "best": best})
        date = _date(run.finished_at if result.finished else run.started_at)
        rounds = max((cell.rounds for cell in result.runs), default=0)
        runs.add_row(visible(result.name), result.status, date, str(len(result.runs)), str(rounds), best or "–")
    if as_json:
        print_json(found)
    for made in (runs, sweeps):
        if made.rows and not as_json:
            console(100).print(made)
    if not found and not as_json:
        print(f"No runs in {folder}.")


def _listing(kind: str, *about: str) -> Table:
    """Return an empty table of runs or sweeps."""
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in (kind, "status", "date", *about, "best"):
        side: Literal["left", "right"] = "right" if column in ("cells", "rounds", "settings") else "left"
        made.add_column(column, justify=side, overflow="fold", no_wrap=column == "date")
    return made


def _date(moment: str | None) -> str:
    return datetime.fromisoformat(moment).astimezone().strftime("%Y-%m-%d %H:%M") if moment else "–"


@command(app)
def compare(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR")],
    metric: Metric = None,
    baseline: Annotated[str | None, typer.Option(metavar="LABEL")] = None,
    only: Annotated[list[str] | None, typer.Option(metavar="LABEL")] = None,
    out: Path | None = None,
    as_json: AsJson = False,
) -> None:
    """Compare the algorithms of one run, or of several on the same data: tables, curves and differences.

    folders: Folders of runs. Of one run, --metric compares its algorithms by another metric than the first.
    baseline: Show only differences to this algorithm: with fewer pairs, intervals are narrower.
    only: Compare only these algorithms; * matches anything. Repeatable.
    out: The folder for tables and figures (default: runs/compare-NAME…, with the metric if you chose one).
    """
    from fedloom.results import compared_runs, figures, tables
    from fedloom.results.report import result_in_words
    from fedloom.results.table import write as write_tables

    run = compared_runs.combine(folders)
    if metric is not None:
        run = run.only(metric)
    if only:
        run = run.choose([*only, *([baseline] if baseline is not None else [])])
    base = run.baseline(baseline) if baseline is not None else None
    made = [*tables.overview(run), *tables.comparison(run), *tables.paired_differences(run, base)]
    differs, cautions = compared_runs.what_differs(run), list(compared_runs.cautions(run))
    to = out or Path("runs") / "-".join(["compare", *(folder.resolve().name for folder in folders)])[:120]
    if out is None and metric is not None:
        to = to.with_name(f"{to.name}-{metric}")
    replaced = any((to / f"{one.name}.csv").exists() for one in made)
    write_tables(made, to)
    written = figures.write(figures.draw_comparison(run), to)
    if as_json:
        shown = [one.for_programs for one in made]
        content = [{"name": one.name, "columns": one.columns, "rows": one.rows, "note": one.note} for one in shown]
        told = {"differ": differs, "cautions": cautions}
        write = print_json({"folder": str(to), "runs": list(map(str, folders)), **told, "tables": content})
    else:
        for line in [*result_in_words(run, base), *(f"Caution: {text}" for text in cautions), *differs]:
            print(visible_lines(line))
        write = print
        pairs = tables.paired_differences(run, base, explain=False)  # the saved tables say how to read them
        for one in [*made[:1], *(one for one in pairs if one.name == "differences")]:
            print_rows(one)
    write(f"Tables: {to}")
    if replaced:
        write(
            "They replace those of an earlier comparison, and so do the pictures. To keep both, name a folder: --out."
        )
    for path in (path for path in written if path.suffix == ".png"):
        write(f"Picture: {path}")


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
def predict(
    folder: Folder,
    file: Annotated[Path, typer.Argument(metavar="FILE")],
    to: Annotated[Path | None, typer.Option(metavar="FILE")] = None,
    algorithm: Annotated[str | None, typer.Option(metavar="LABEL")] = None,
    seed: int | None = None,
    client: Annotated[str | None, typer.Option(metavar="NAME")] = None,
    threshold: Annotated[float | None, typer.Option(metavar="P")] = None,
    encoding: Annotated[str | None, typer.Option(metavar="NAME")] = None,
    skip_bad_rows: bool = False,
    force: Force = False,
) -> None:
    """Apply a run's model to the rows of a CSV file, prepared as the training data was.

    file: A CSV file with the columns of the training data. It needs no label.
    to: The CSV file to write (default: print it).
    algorithm: The algorithm whose model to use (default: the first with one model for all clients).
    seed: The seed whose model to use (default: the first).
    client: The client whose model, or whose normalisation, to use.
    threshold: The probability from which the second of two classes is predicted (default: 0.5).
    encoding: The encoding of the file, such as latin-1 (default: UTF-8).
    skip_bad_rows: Leave predictions empty where the model cannot take a row (default: stop at the first such row).
    """
    import csv
    import sys

    from fedloom.data.sources.archive import known_encoding
    from fedloom.files import replacing
    from fedloom.results.prediction import predict_file
    from fedloom.results.result import Result

    if to is not None:
        check_new(to, force)
    result = Result.read(folder)
    cell = result.predicting(algorithm, seed, client)
    predictor = result.predictor(cell.algorithm, cell.seed, client).with_threshold(threshold)
    known = known_encoding(encoding, f"--encoding {encoding}")
    rows = predict_file(predictor, file, lambda text: say(f"Caution: {text}"), known, skip_bad_rows)
    if to is None:
        csv.writer(sys.stdout, lineterminator="\n").writerows(rows)
    else:
        with replacing(to, "file") as temporary, open(temporary, "w", newline="", encoding="utf-8") as out:
            csv.writer(out).writerows(rows)
        print(to)
    rounds = f"{cell.rounds} round" + ("" if cell.rounds == 1 else "s")
    shared = client is not None and result.uses_global_model(cell, client)
    of_client = f" of client {client}" if client is not None and not shared else ""
    say(f"Model: {cell.algorithm}, seed {cell.seed}{of_client}, after {rounds}.")
    if shared:
        scaled = (
            " only says whose statistics scale the features" if predictor.preprocessing.clients else " has no effect"
        )
        say(f"{cell.algorithm} has one model for all clients: --client {client}{scaled}.")


@command(app)
def export(
    folder: Folder,
    csv: bool = False,
    parquet: bool = False,
    tensorboard: bool = False,
    mlflow: bool = False,
    model: bool = False,
    onnx: bool = False,
    torch_export: bool = False,
    algorithm: Annotated[str | None, typer.Option(metavar="LABEL")] = None,
    seed: int | None = None,
    client: Annotated[str | None, typer.Option(metavar="NAME")] = None,
    to: Path | None = None,
) -> None:
    """Export tables, curves or trained models from a run's folder for other programs.

    csv: All tables as CSV files.
    parquet: All tables as Parquet files.
    tensorboard: All curves as TensorBoard event files.
    mlflow: All cells as runs in a local MLflow store.
    model: The trained weights: safetensors and a state_dict.
    onnx: Trained models with their preprocessing, for onnxruntime and others.
    torch_export: Trained models with their preprocessing, for torch.export.load.
    algorithm: Only the models of this algorithm.
    seed: Only the models of this seed.
    client: The whole model that this client uses.
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
        partial(exporting.export_onnx, client=client): onnx,
        partial(exporting.export_torch, client=client): torch_export,
    }
    wanted = [exporter for exporter, yes in asked.items() if yes]
    if not wanted:
        raise InputError(
            "Say what to export: --csv, --parquet, --tensorboard, --mlflow, --model, --onnx or --torch-export; several "
            "are fine."
        )
    chosen = {"--algorithm": algorithm, "--seed": seed, "--client": client}
    for option in (option for option, value in chosen.items() if value is not None):
        if not (model or onnx or torch_export):
            raise InputError(f"{option} chooses models: use it with --model, --onnx or --torch-export.")
    result = Result.read(folder).only(algorithm, seed)
    target = to or folder / "export"
    target.mkdir(parents=True, exist_ok=True)
    written = dict.fromkeys(path for exporter in wanted for path in exporter(result, target))  # each path once
    for path in written:
        print(path)
    if model and client is None:
        _say_what_is_missing(result)
    if client is not None:
        shared = dict.fromkeys(cell.algorithm for cell in result.runs if result.uses_global_model(cell, client))
        for label in shared:
            say(f"{label} has one model for all clients: the file of client {client} holds that one.")


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


@command(app)
def remove(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR")],
    yes: Annotated[bool, typer.Option("-y", "--yes")] = False,
) -> None:
    """Delete runs and sweeps: their results, checkpoints and reports.

    folders: The folders of runs and sweeps.
    yes: Do not ask.
    """
    from fedloom import files
    from fedloom.experiment import run_folder
    from fedloom.results.run_data import RunData
    from fedloom.tuning import sweep_folder

    # refuses what is neither, before anything is deleted
    status = {
        folder: sweep_folder.read(folder).status
        if sweep_folder.is_sweep(folder)
        else RunData.read(folder).result.status
        for folder in folders
    }
    for folder in folders:
        if folder.is_symlink():
            raise InputError(f"{folder} is a link. Remove {folder.resolve()}, and then the link.")
        if Path.cwd().is_relative_to(folder.resolve()):
            raise InputError(f"You are in {folder.resolve()}: change to another folder, and remove it from there.")
        if any(files.is_locked(path) for path in (folder, folder / "network")):
            raise InputError(f"A process is running in {folder}. Stop it first.")
    if not yes and not sys.stdin.isatty():
        raise InputError("Nobody can be asked here whether to delete: say so with --yes.")
    for folder, state in status.items():
        what = f"{folder} ({state}, {_megabytes(folder)})"
        lost = "".join(f", with its {name}" for name, there in run_folder.irreplaceable(folder).items() if there)
        if yes or typer.confirm(f"Delete {what}{lost}?"):
            of_sweep = sweep_folder.is_sweep(folder)
            kept = sweep_folder.remove(folder) if of_sweep else run_folder.remove(folder)
            print(f"Deleted {what}.")
            if kept:
                names = ", ".join(path.name for path in kept[:5]) + (" …" if len(kept) > 5 else "")
                other = "what is no part of the sweep" if of_sweep else "what fedloom did not write"
                say(f"Kept {other}: {names} in {folder}.")


def _megabytes(folder: Path) -> str:
    return f"{sum(path.lstat().st_size for path in folder.rglob('*')) / 1e6:,.1f} MB"
