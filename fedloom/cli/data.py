"""The data commands: describe, export, get."""

from __future__ import annotations

import sys
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from fedloom.cli.shared import Changes, File, load, say


class Which(str, Enum):
    """The examples to export."""

    all = "all"
    train = "train"
    validation = "validation"
    test = "test"


data_app = typer.Typer(no_args_is_help=True, help="Describe, export and download data.")


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.add_typer(data_app, name="data")


@data_app.command()
def describe(
    file: File,
    changes: Changes = None,
    picture: Annotated[Path | None, typer.Option(help="Picture file (default: FILE's name + -data.png).")] = None,
) -> None:
    """Show the examples and labels of each client as a table and a picture."""
    from rich.console import Console

    from fedloom.data import figure
    from fedloom.data.describe import describe, table
    from fedloom.experiment.plan import Plan

    experiment = load(file, changes)
    federation = Plan.of(experiment).federation(experiment.seeds[0])
    Console(width=None if sys.stdout.isatty() else 80).print(table(describe(federation)))
    path = picture or Path(f"{file.stem}-data.png")
    figure.plot(federation, path)
    print(f"Picture: {path}")


@data_app.command()
def export(
    file: File,
    to: Annotated[Path, typer.Option(metavar="PATH", help="The file to write: .h5 or .json.")],
    changes: Changes = None,
    split: Annotated[Which, typer.Option(help="The examples of every client to write.")] = Which.all,
    features: Annotated[str, typer.Option(help="Name of the features in an HDF5 file.")] = "x",
    label: Annotated[str, typer.Option(help="Name of the label in an HDF5 file.")] = "label",
) -> None:
    """Write every client's examples in the format of TensorFlow Federated (HDF5) or LEAF (JSON)."""
    from fedloom.data.export import export as write
    from fedloom.experiment.plan import Plan

    experiment = load(file, changes)
    federation = Plan.of(experiment).federation(experiment.seeds[0])
    count = write(federation, to, split.value, features, label)
    print(f"{to}: {count} examples of {federation.clients} clients")


@data_app.command()
def get(
    name: Annotated[
        str | None, typer.Argument(help="Dataset (without it: a list of datasets).", metavar="NAME")
    ] = None,
    to: Annotated[Path | None, typer.Option(help="Folder (default: your cache).")] = None,
    from_file: Annotated[
        Path | None,
        typer.Option("--from", metavar="FILE", help="A file, archive or folder that you have, instead of a download."),
    ] = None,
) -> None:
    """Download a dataset and check it."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    from fedloom.data import download

    if name is None:
        for known, dataset in download.DOWNLOADS.items():
            print(f"{known:<16} {', '.join(dataset.files)}")
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        tasks: dict[str, Any] = {}

        def progress(what: str, done: int, total: int | None) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done, total=total)

        folder = download.get(name, to, from_file, progress)
    for file, digest in download.unchecked(name, folder).items():
        say(f"No SHA-256 is published for {file}, so it was not checked. This copy has {digest}.")
    print(folder)
