"""The data commands: describe, export, get."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from fedloom.cli.shared import Changes, File, command, console, load, say

app = typer.Typer(no_args_is_help=True, help="Describe, export and download data.")


@command(app)
def describe(file: File, changes: Changes = None, picture: Path | None = None) -> None:
    """Show the examples and labels of each client as a table and a picture.

    picture: Picture file (default: FILE's name + -data.png).
    """
    from fedloom.data import describe, figure
    from fedloom.experiment.plan import Plan

    experiment = load(file, changes)
    federation = Plan.of(experiment).federation(experiment.seeds[0])
    console(80).print(describe.table(describe.describe(federation)))
    path = picture or Path(f"{file.stem}-data.png")
    figure.plot(federation, path)
    print(f"Picture: {path}")


@command(app)
def export(
    file: File,
    to: Annotated[Path, typer.Option(metavar="PATH")],
    changes: Changes = None,
    split: Literal["all", "train", "validation", "test"] = "all",
    features: str = "x",
    label: str = "label",
) -> None:
    """Write every client's examples in the format of TensorFlow Federated (HDF5) or LEAF (JSON).

    to: The file to write: .h5 or .json.
    split: The examples of every client to write.
    features: Name of the features in an HDF5 file.
    label: Name of the label in an HDF5 file.
    """
    from fedloom.data.export import export as write
    from fedloom.experiment.plan import Plan

    experiment = load(file, changes)
    federation = Plan.of(experiment).federation(experiment.seeds[0])
    count = write(federation, to, split, features, label)
    print(f"{to}: {count} examples of {federation.clients} clients")


@command(app)
def get(
    name: Annotated[str | None, typer.Argument(metavar="NAME")] = None,
    to: Path | None = None,
    from_file: Annotated[Path | None, typer.Option("--from", metavar="FILE")] = None,
) -> None:
    """Download a dataset and check it.

    name: Dataset (without it: a list of datasets).
    to: Folder (default: your cache).
    from_file: A file, archive or folder that you have, instead of a download.
    """
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
