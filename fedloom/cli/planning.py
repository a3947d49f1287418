"""The commands before a run: init, check, graph, algorithms, models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedloom.cli.shared import AsJson, Changes, File, load, print_json
from fedloom.errors import InputError


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    for command in (init, check, graph, algorithms, models):
        app.command()(command)


def init(
    file: Annotated[Path, typer.Argument(help="The file to write.", metavar="FILE")] = Path("experiment.toml"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Write a commented experiment file to start from."""
    if file.exists() and not force:
        raise InputError(f"{file} exists already. Choose another name, or use --force to overwrite it.")
    file.parent.mkdir(parents=True, exist_ok=True)
    template = Path(__file__).parents[1] / "experiment" / "templates" / "experiment.toml"
    file.write_bytes(template.read_bytes())
    print(f"Wrote {file}. Next: fedloom check {file}, then fedloom run {file}")


def check(file: File, changes: Changes = None, as_json: AsJson = False) -> None:
    """Show every key of a file with its value, and estimate what it costs; nothing runs."""
    import tomli_w

    from fedloom.tuning.estimate import estimate

    experiment = load(file, changes)
    costs = estimate(experiment)
    if as_json:
        print_json({"experiment": experiment.resolved(), "estimate": costs.json()})
        return
    print(tomli_w.dumps(experiment.resolved()))
    for line in costs.lines():
        print(f"# {line}")


def graph(
    file: File,
    changes: Changes = None,
    picture: Annotated[
        Path | None, typer.Option(help="The picture's file (default: FILE's name + -graph.png).")
    ] = None,
) -> None:
    """Draw which clients are neighbours in the peer-to-peer algorithms of a file."""
    from fedloom.algorithms import Peer
    from fedloom.experiment.plan import Plan
    from fedloom.results.topology_figure import draw

    experiment = load(file, changes)
    peers = {label: one for label, one in experiment.algorithm.items() if isinstance(one, Peer)}
    if not peers:
        raise InputError(
            f'{file} has no peer-to-peer algorithm: add one, such as [algorithm] ring = {{ name = "peer" }}.'
        )
    federation = Plan.of(experiment).federation(experiment.seeds[0])
    count = experiment.cohort.size(federation.clients)
    path = picture or Path(f"{file.stem}-graph.png")
    draw({label: peer.graph(count, experiment.seeds[0], 1) for label, peer in peers.items()}, path)
    print(f"Picture: {path}")


def algorithms(
    name: Annotated[str | None, typer.Argument(help="The algorithm to describe.", metavar="NAME")] = None,
    as_json: AsJson = False,
) -> None:
    """List the algorithms, or describe one."""
    from dataclasses import asdict

    from fedloom import catalogue

    if name is None:
        found = catalogue.entries()
        if as_json:
            print_json([asdict(entry) for entry in found])
            return
        width = max(len(entry.name) for entry in found)
        for entry in found:
            print(f"{entry.name:<{width}}  {entry.summary}")
        return
    entry = catalogue.entry(name)
    if as_json:
        print_json(asdict(entry))
        return
    print(f"{entry.name}: {entry.summary}\n")
    if entry.details:
        print(f"{entry.details}\n")
    width = max(map(len, entry.fields), default=0)
    for key, (kind, default) in entry.fields.items():
        print(f"  {key:<{width}}  {kind} (default {default})")
    print(f"\nAlso any key of [train]. Secure aggregation: {entry.secure}. On a network: {entry.network}.")
    if entry.reference:
        print(f"Reference: {entry.reference}.")


def models(as_json: AsJson = False) -> None:
    """List the models: number of parameters, shape of an example, and a short description."""
    from fedloom.models import describe

    found = describe()
    if as_json:
        print_json([model._asdict() for model in found])
        return
    for model in found:
        count = "by args" if model.parameters is None else f"{model.parameters:,}"
        count += f" + {model.buffers}" if model.buffers else ""
        shape = "by args" if model.inputs is None else " × ".join(map(str, model.inputs))
        print(f"{model.name:<20} {count:>11}  {shape:<12} {model.summary}")
