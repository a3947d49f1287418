"""The commands before a run: init, check, graph, keys, algorithms, models."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedloom.cli.shared import (
    AsJson,
    Changes,
    File,
    Force,
    Workers,
    check_new,
    command,
    console,
    load,
    need,
    print_result,
    with_workers,
)
from fedloom.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.table import Table

    from fedloom.models import Description

app = typer.Typer()

OF_ALGORITHMS = "What to compare, by labels of your own. `fedloom algorithms` lists what there is."
KEYS_OF_ONE = "Keys of a table: `fedloom keys train`. Of a source, partition or algorithm: `fedloom keys csv`."


@command(app)
def init(file: Annotated[Path, typer.Argument(metavar="FILE")] = Path("experiment.toml"), force: Force = False) -> None:
    """Write a commented experiment file to start from.

    file: The file to write.
    """
    check_new(file, force)
    file.parent.mkdir(parents=True, exist_ok=True)
    template = Path(__file__).parents[1] / "experiment" / "templates" / "experiment.toml"
    file.write_bytes(template.read_bytes())
    print(f"Wrote {file}. Next: fedloom check {file}, then fedloom run {file}")


@command(app)
def check(
    file: File,
    changes: Changes = None,
    workers: Workers = None,
    as_json: AsJson = False,
    verbose: Annotated[bool, typer.Option("-v", "--verbose")] = False,
) -> None:
    """Refuse what a run would refuse, estimate what it costs, and show the keys that are not at their defaults.

    verbose: Show every key with its value, and the whole traceback of an error.
    """
    from fedloom.algorithms import LocalOnly, Pooled
    from fedloom.experiment.checks import check_agreed, check_served
    from fedloom.experiment.experiment_file import NO_DATA, read_toml
    from fedloom.experiment.plan import Plan
    from fedloom.experiment.run_folder import holds_another
    from fedloom.files import toml_file
    from fedloom.privacy.protection import check_plan
    from fedloom.privacy.words import doubts, has, lacks, outside, unmeasured
    from fedloom.tuning.estimate import estimate

    experiment = load(file, with_workers(changes, workers))
    check_plan(experiment.privacy, experiment.cohort, experiment.algorithm)
    private = experiment.privacy
    if private.dp is not None or private.example_dp is not None:
        need("Differential privacy", "privacy", "dp_accounting", *(["opacus"] if private.example_dp else []))
    values = experiment.resolved()
    shown = values if verbose else experiment.resolved(defaults=False)
    for tables in (values, shown):
        if "split_column" in tables["data"]:
            tables["data"].pop("split", None)  # the column decides
        if tables["data"].get("delimiter") == ",":
            del tables["data"]["delimiter"]  # others are recognised, too
    at_sites = not experiment.has_data or experiment.server_has_all
    if at_sites:
        plan = Plan.of(experiment, served=True)
        if experiment.has_data:
            check_served(plan)
        else:
            check_agreed(plan)
            agreed = experiment.as_written().get("data")  # the rest is at the sites
            for tables in (values, shown):
                tables.pop("data", None)
                tables |= {"data": agreed} if agreed else {}
        parameters = plan.task(experiment.seeds[0]).parameters
        without = "With [data] server = 1.0" if experiment.has_data else "Without a source in [data]"
        why = NO_DATA.replace("Without [data]", without) if "data" in values else NO_DATA
        note = f"{parameters:,} parameters. {why}"
        cautions = [*doubts(private, cohort=experiment.cohort.count), *unmeasured(private, experiment.has_data)]
        costs, notes, cohort, clients = (
            None,
            [*(f"Caution: {text}" for text in cautions), note],
            experiment.cohort.count,
            None,
        )
    else:
        found, folder = estimate(experiment), Path("runs") / str(experiment.name)
        costs, notes, clients, cohort = found.json(), found.lines(), found.clients, found.cohort
        cautions, note = [*found.cautions], None
        if holds_another(folder, Plan.of(experiment)):
            cautions.append(
                f"{folder} holds another experiment, so `fedloom run` will refuse it: use --fresh, or --out for "
                "another folder."
            )
            notes.append(f"Caution: {cautions[-1]}")
    by_chance = experiment.cohort.sampling == "poisson" or cohort is None or cohort == clients
    said = [*has(private, cohort, by_chance), *outside(private, experiment.resolved()["data"], at_sites)]
    sends = any(not isinstance(one, (LocalOnly, Pooled)) for one in experiment.algorithm.values())
    privacy = {"has": said, "lacks": [*lacks(experiment.privacy, sends)]}
    set_here = any(change.startswith("algorithm") for change in changes or [])
    assumed = [] if set_here or read_toml(file).get("algorithm") else ["There is no [algorithm]: fedavg is assumed."]
    lines = [
        f"# {file} is valid.",
        *(f"# {line}" for line in [*assumed, *notes, *privacy["has"], *privacy["lacks"]]),
        "# Every key:" if verbose else "# The keys that are not at their defaults (-v shows all):",
        "",
        toml_file(shown),
    ]
    content = {
        "experiment": values,
        "estimate": costs,
        "note": note,
        "cautions": cautions,
        "privacy": privacy,
        "assumed": assumed,
    }
    print_result(as_json, content, lines)


@command(app)
def graph(file: File, changes: Changes = None, picture: Path | None = None) -> None:
    """Draw which clients are neighbours in the peer-to-peer algorithms of a file.

    picture: The picture's file (default: FILE's name + -graph.png).
    """
    from fedloom.algorithms import Peer
    from fedloom.experiment.plan import Plan
    from fedloom.results.topology_figure import draw

    experiment = load(file, changes)
    peers = {label: one for label, one in experiment.algorithm.items() if isinstance(one, Peer)}
    if not peers:
        raise InputError(
            f'{file} has no peer-to-peer algorithm: add one, such as [algorithm] ring = {{ name = "peer" }}.'
        )
    seed = experiment.seeds[0]
    count = experiment.cohort.size(Plan.of(experiment).federation(seed).clients)
    path = picture or Path(f"{file.stem}-graph.png")
    draw({label: peer.graph(count, seed, 1) for label, peer in peers.items()}, path)
    print(f"Picture: {path}")


@command(app)
def keys(word: Annotated[str | None, typer.Argument(metavar="WORD")] = None, as_json: AsJson = False) -> None:
    """List what an experiment file may say: its tables, or the keys of one, with their defaults and meaning.

    word: A table (train), a source, partition or algorithm (csv, dirichlet, fedprox), or a key (lr).
    """
    from fedloom.experiment import file_keys

    shown = console(100)
    if word is None:
        said = {title: file_keys.Place(title, model).summary for title, model in file_keys.tables().items()}
        if as_json:
            return print_result(as_json, said, ())
        tables = {title: text for title, text in said.items() if title.startswith("[")}
        shown.print(_two_columns({file_keys.TOP: said[file_keys.TOP], **tables, "[algorithm]": OF_ALGORITHMS}))
        return shown.print(f"\n{KEYS_OF_ONE}")
    found = file_keys.find(word)
    if as_json:
        content = [{"table": place.title, "keys": [asdict(key) for key in place.keys]} for place in found]
        return print_result(as_json, content, ())
    for place in found:
        shown.print(place.title if place.only else f"{place.title}: {place.summary}", style="bold")
        said = {f"  {key.name}": f"{key.kind}; {key.default}. {key.meaning}" for key in place.keys}
        shown.print(_two_columns(said) if said else "  It has no keys of its own.")


@command(app)
def algorithms(name: Annotated[str | None, typer.Argument(metavar="NAME")] = None, as_json: AsJson = False) -> None:
    """List the algorithms, or describe one.

    name: The algorithm to describe.
    """
    from fedloom import catalogue

    if name is None:
        entries = catalogue.entries()
        width = max(len(entry.name) for entry in entries)
        lines = [f"{entry.name:<{width}}  {entry.summary}" for entry in entries]
        return print_result(as_json, [asdict(entry) for entry in entries], lines)
    entry = catalogue.entry(name)
    lines = [f"{entry.name}: {entry.summary}\n"]
    if entry.details:
        lines.append(f"{entry.details}\n")
    width = max(map(len, entry.fields), default=0)
    lines += [f"  {key:<{width}}  {kind} (default {default})" for key, (kind, default) in entry.fields.items()]
    lines.append(f"\nAlso any key of [train]. Secure aggregation: {entry.secure}. On a network: {entry.network}.")
    if entry.reference:
        lines.append(f"Reference: {entry.reference}.")
    print_result(as_json, asdict(entry), lines)


@command(app)
def models(as_json: AsJson = False) -> None:
    """List the models: number of parameters, shape of an example, and a short description."""
    from rich.table import Table

    from fedloom.models import describe

    found = describe()
    if as_json:
        return print_result(as_json, [model._asdict() for model in found], ())
    made = Table.grid(padding=(0, 2, 0, 0))
    for side in ("left", "right", "left"):
        made.add_column(justify=side, no_wrap=True)
    made.add_column()  # in a terminal, only the descriptions break
    for model in found:
        made.add_row(*_model_row(model))
    console(160).print(made)


def _two_columns(rows: Mapping[str, str]) -> Table:
    """Names, and what they mean, which alone breaks into lines."""
    from rich.table import Table

    made = Table.grid(padding=(0, 2, 0, 0))
    made.add_column(no_wrap=True)
    made.add_column()
    for row in rows.items():
        made.add_row(*row)
    return made


def _model_row(model: Description) -> tuple[str, str, str, str]:
    count = "by args" if model.parameters is None else f"{model.parameters:,}"
    count += f" + {model.buffers}" if model.buffers else ""
    shape = "by args" if model.inputs is None else " × ".join(map(str, model.inputs))
    return model.name, count, shape, model.summary
