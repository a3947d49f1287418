"""The data commands: describe, export, get."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fedloom.cli.shared import (
    AsJson,
    Changes,
    File,
    Force,
    check_new,
    command,
    console,
    load,
    parse_changes,
    print_json,
    say,
)

if TYPE_CHECKING:
    from fedloom.experiment.experiment_file import Experiment

app = typer.Typer(no_args_is_help=True, help="Describe, export and download data.")


@command(app)
def describe(file: File, changes: Changes = None, picture: Path | None = None, as_json: AsJson = False) -> None:
    """Show the examples and labels of each client as a table and a picture, and with [system] the fleet.

    file: An experiment file, or the file of a site.
    picture: Picture file (default: FILE's name + -data.png).
    """
    from fedloom.data import describe, figure
    from fedloom.experiment.plan import Plan

    experiment = _load(file, changes)
    at_site, seed = _is_site(file), experiment.seeds[0]
    plan = Plan.of(experiment, at_site=at_site)
    federation = plan.federation(seed)
    description = describe.describe(federation, plan.in_seed(seed), at_site)
    path = picture or Path(f"{file.stem}-data.png")
    if as_json:
        drawn = {"seed": seed} if plan.draws_clients else {}
        figure.plot(federation, path)
        print_json({**description.message(), **drawn, "picture": str(path)})
        return
    console(80).print(describe.table(description))
    if (missing := describe.missing_table(description)) is not None:
        console(80).print(missing)
    if plan.draws_clients:
        print(f"These are the clients of seed {seed}: every seed draws its own.")
    if experiment.system is not None:
        from fedloom.clock.describe import table

        console(80).print(table(experiment.system, federation, experiment.seeds[0], experiment.base))
    figure.plot(federation, path)
    print(f"Picture: {path}")


def _load(file: Path, changes: list[str] | None = None, *, of_site: bool = False) -> Experiment:
    """Load an experiment file, or the data of a site's file.

    With `of_site`, a file with [data] alone is a site's, unless it has a partition.
    """
    from fedloom.experiment.experiment_file import change, parse, read_toml

    values = read_toml(file) if file.is_file() else {}
    bare = of_site and values.keys() == {"data"} and "partition" not in values["data"]
    if not bare and not _is_site(file):
        return load(file, changes)
    from fedloom.network.agent.policy import site_of

    for dotted, value in parse_changes(changes).items():
        change(values, dotted, value)
    site = site_of(values, file)
    return parse({"data": site.data}, site.base, site.name)


def _is_site(file: Path) -> bool:
    """Whether a file is a site's: others may have columns and classes that its table lacks."""
    from fedloom.experiment.experiment_file import read_toml

    return file.is_file() and bool({"site", "policy"} & read_toml(file).keys())


@command(app)
def export(
    file: File,
    to: Annotated[Path, typer.Option(metavar="PATH")],
    changes: Changes = None,
    split: Literal["all", "train", "validation", "test"] = "all",
    features: str = "x",
    label: str = "label",
    force: Force = False,
) -> None:
    """Write every client's examples in the format of TensorFlow Federated (HDF5) or LEAF (JSON).

    file: An experiment file, or the file of a site.
    to: The file to write: .h5 or .json.
    split: The examples of every client to write.
    features: Name of the features in an HDF5 file.
    label: Name of the label in an HDF5 file.
    """
    from fedloom.data.export import export as write
    from fedloom.experiment.plan import Plan

    check_new(to, force)
    experiment = _load(file, changes)
    federation = Plan.of(experiment, at_site=_is_site(file)).federation(experiment.seeds[0])
    count = write(federation, to, split, features, label)
    print(f"{to}: {count} examples of {federation.clients} clients")


@command(app)
def summarize(file: File, to: Annotated[Path, typer.Option(metavar="PATH")], force: Force = False) -> None:
    """Summarise a site's table, so that several sites can agree on preprocessing without showing rows.

    file: An experiment file, or the file of a site.
    to: The JSON file to write. Read it before you give it away.
    """
    from fedloom.data.agreement import Summary
    from fedloom.data.build import divided
    from fedloom.data.plausibility import suspicions
    from fedloom.experiment.experiment_file import read_toml
    from fedloom.experiment.plan import load_dataset

    check_new(to, force)
    experiment = _load(file, of_site=True)
    dataset, data = load_dataset(experiment, at_site=True), experiment.data
    seed = experiment.seeds[0] if data.seed == "run" else data.seed
    federation = divided(dataset, partition=data.partition, split=data.split, seed=seed)
    if isinstance(data.normalize, Mapping):
        say(
            "Caution: [data] normalize has bounds, which need no agreement: with the file that sites agree on, means "
            "and deviations scale the data instead, and these leave each site without noise. Without such a file, give "
            "every site the same bounds and the same table of categories."
        )
    summary = Summary.of(federation, dataset.missing, _site(read_toml(file)))
    summary.write(to)
    whose = f"{federation.clients} client(s)" + (f" of {summary.site}" if summary.site else "")
    print(f"{to}: {len(summary.columns)} columns, {len(federation.features)} features of {whose}")
    for column in summary.columns:
        if column.categories:
            print(f"  {column.name}: {', '.join(column.categories)}")
    if summary.classes:
        print(f"  {', '.join(summary.label)}: {', '.join(summary.classes)}")
    print("It holds the names above, and for each feature how many training rows know it, its mean and its variance.")
    for doubt in suspicions(federation, at_site=True):
        say(f"Caution: {doubt}")


def _site(values: dict[str, Any]) -> str:
    """Return the name in a site's file; other files have none."""
    table = values.get("site")
    return str(table.get("name", "")) if isinstance(table, dict) else ""


@command(app)
def agree(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...")],
    to: Path = Path("preprocessing.json"),
    force: Force = False,
) -> None:
    """Put the summaries of several sites together: categories, classes, and statistics for normalisation.

    files: What `fedloom data summarize` wrote at each site.
    to: The JSON file to write. Every site names it: [data] preprocessing = "FILE".
    force: Overwrite what exists, and write a file even if sites probably have other units.
    """
    from fedloom.data.agreement import Summary, agree, doubts, other_units
    from fedloom.errors import InputError

    if to.exists() and not force:
        raise InputError(
            f"{to} exists already, and sites may use it. Write another file (--to), or overwrite it (--force)."
        )
    read = {path: Summary.read(path) for path in files}
    summaries = {summary.site or path.stem: summary for path, summary in read.items()}
    if len(summaries) < len(files):
        raise InputError(f"Two files are of the same site, or have the same name: {', '.join(map(str, files))}.")
    agreed = agree(summaries)
    if not force and (units := list(other_units(summaries, agreed))):
        listed = "\n  ".join(units)
        raise InputError(
            f"Sites probably have other units, which would spoil the scale for all of them:\n  {listed}\nNothing was "
            "written. Correct it there and summarize again or, if the values are right, write the file with --force."
        )
    agreed.write(to)
    for column in agreed.columns:
        print(f"{column.name}: {', '.join(column.categories) or 'numbers'}")
        known = {site: here.categories for site, one in summaries.items() if (here := one.column(column.name))}
        _say_who_lacks(column.name, column.categories, known)
    label = ", ".join(agreed.label)
    print(f"{label}: {', '.join(agreed.classes) or 'numbers'}")
    _say_who_lacks(label, agreed.classes, {site: summary.classes for site, summary in summaries.items()})
    for doubt in doubts(summaries, agreed):
        say(f"Caution: {doubt}")
    print(f'Agreed: {to}. Check the names above, and give the file to every site: [data] preprocessing = "{to.name}"')


def _say_who_lacks(column: str, names: Sequence[str], known: Mapping[str, Sequence[str]]) -> None:
    """Say which sites lack which of the names in a column; `known` has those of each site."""
    for site, here in known.items():
        if lacking := [name for name in names if name not in here]:
            say(f"  {site} has no {column} = {', '.join(lacking)}. Is it spelt differently there?")


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
