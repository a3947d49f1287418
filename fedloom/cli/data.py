"""The commands about data: describe, export, get."""

from __future__ import annotations

import sys
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from fedloom.cli.shared import (
    Changes,
    File,
    load,
    say,
)


class Part(str, Enum):
    """Which examples are exported."""

    all = "all"
    train = "train"
    validation = "validation"
    test = "test"


data_app = typer.Typer(no_args_is_help=True, help="Look at data, or fetch it.")


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.add_typer(data_app, name="data")


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

    experiment = load(file, changes)
    federation = Plan.of(experiment).federation(experiment.seeds[0])
    description = describing.describe(federation)
    Console(width=None if sys.stdout.isatty() else 80).print(describing.table(description))
    path = picture or Path(f"{file.stem}-data.png")
    describing.plot(federation, path)
    print(f"Picture: {path}")


@data_app.command()
def export(
    file: File,
    to: Annotated[Path, typer.Option(metavar="PATH", help="The file to write: .h5 or .json.")],
    changes: Changes = None,
    split: Annotated[Part, typer.Option(help="Which examples of every client.")] = Part.all,
    features: Annotated[str, typer.Option(help="The features' name in an HDF5 file.")] = "x",
    label: Annotated[str, typer.Option(help="The label's name in an HDF5 file.")] = "label",
) -> None:
    """Write every client's examples as TensorFlow Federated (HDF5) or LEAF (JSON) read them."""
    from fedloom.data.export import export as write
    from fedloom.experiment.plan import Plan

    experiment = load(file, changes)
    federation = Plan.of(experiment).federation(experiment.seeds[0])
    count = write(federation, to, split.value, features, label)
    print(f"{to}: {count} examples of {federation.clients} clients")


@data_app.command()
def get(
    name: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(help="Which (without it: a list).", metavar="NAME"),
    ] = None,
    to: Annotated[Optional[Path], typer.Option(help="Folder (default: the user's cache).")] = None,  # noqa: UP045
    from_file: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--from", metavar="FILE", help="A file, archive or folder at hand, instead of a download."),
    ] = None,
) -> None:
    """Fetch a dataset, with checksums."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    from fedloom.data.sources import download
    from fedloom.data.sources.base import cache
    from fedloom.data.sources.download_list import OFFERS

    if name is None:
        for known, offer in OFFERS.items():
            print(f"{known:<16} {', '.join(offer.sums)}")
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        tasks: dict[str, Any] = {}

        def progress(what: str, done: int, total: int | None) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done, total=total)

        folder = download.get(name, to or cache(name), from_file, progress)
    for file, digest in download.unchecked(name, folder).items():
        say(f"No SHA-256 is published for {file}, so it was not checked. This copy has {digest}.")
    print(folder)
