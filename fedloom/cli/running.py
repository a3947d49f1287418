"""The commands that train: run, demo, sweep, reproduce, bench."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Optional

import typer

from fedloom.cli.shared import (
    AsJson,
    Changes,
    File,
    Quiet,
    finish,
    load,
    parse_changes,
    print_rows,
    say,
    showing,
    stop_on_interrupt,
)


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command()(run)
    app.command()(demo)
    app.command()(sweep)
    app.command()(reproduce)
    app.command()(bench)


def run(
    file: File,
    changes: Changes = None,
    workers: Annotated[Optional[int], typer.Option(help="Worker processes (default: one a core).")] = None,  # noqa: UP045
    out: Annotated[Optional[Path], typer.Option(help="The run's folder (default: runs/NAME).")] = None,  # noqa: UP045
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start anew; an old folder is kept beside the new one.")
    ] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Also say how it is computed.")] = False,
    report: Annotated[bool, typer.Option("--report/--no-report", help="End with report.html in the folder.")] = True,
) -> None:
    """Run an experiment, or go on where it stopped."""
    if workers is not None:
        changes = [*(changes or []), f"run.workers={workers}"]
    _run(file, changes, out, fresh, as_json, quiet, verbose, report)


def demo(
    out: Annotated[Path, typer.Option(help="The run's folder.")] = Path("runs/demo"),
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Compare seven ways to learn on handwritten digits at ten data holders: a first run, in under two minutes."""
    file = Path(__file__).parents[1] / "experiment" / "templates" / "demo.toml"
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
    from fedloom.experiment.run import run_plan

    experiment = load(file, changes)
    folder = out or Path("runs") / experiment.name
    with showing(quiet) as progress, stop_on_interrupt() as should_stop:
        result = run_plan(
            Plan.of(experiment), folder, fresh=fresh, progress=progress, should_stop=should_stop, verbose=verbose
        )
    finish(result, experiment, folder, f"fedloom run {file}" + (f" --out {out}" if out else ""), as_json, report)


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
    quiet: Quiet = False,
) -> None:
    """Try many settings and rank them by validation; the test splits are not looked at."""
    from fedloom.tuning import search_space
    from fedloom.tuning.sweep import sweep as try_all

    with showing(quiet) as progress, stop_on_interrupt() as should_stop:
        found = try_all(
            file,
            search_space.parse_over(over or []),
            changes=parse_changes(changes or []),
            random=random,
            seed=seed,
            out=out,
            fresh=fresh,
            prune=prune,
            progress=progress,
            should_stop=should_stop,
        )
    if found is None:
        say("Stopped. The same command goes on.")
        raise typer.Exit(130)
    if as_json:
        print(json.dumps(found.json(), indent=2))
    else:
        print_rows(found.table())
    tell = say if as_json else print
    bests = [found.best(label) for label in dict.fromkeys(one.label for one in found.trials)]
    for best in (one for one in bests if one is not None):
        chosen = " ".join(f"--set {key}={json.dumps(value)}" for key, value in best.setting.items())
        tell(
            f"Best on validation data: {search_space.name(best.setting)} ({best.label}). Measure it on test data, once:"
        )
        tell(f"  fedloom run {file} {chosen} --out {found.folder / f'best-{best.label}'}")
    tell(f"Table: {found.folder / 'sweep.csv'}")
    if (found.folder / "sweep.png").is_file():
        tell(f"Picture: {found.folder / 'sweep.png'}")


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
    quiet: Quiet = False,
) -> None:
    """Run published experiments again, and show ours and theirs side by side."""
    from fedloom.papers import published
    from fedloom.papers import reproduce as again

    if name is None:
        for known in published.names():
            print(f"{known:<20} {published.load(known).title}")
        return
    reproduction = published.load(name)
    more = {"data.path": str(data.resolve())} if data is not None else {}
    base = Path(name).resolve().parent if name.endswith(".toml") else None
    told = {**more, **parse_changes(changes or [])}
    planned = again.plan(reproduction, quick=quick, only=only or [], changes=told, base=base)
    rows = f"{len(planned)} row" + ("s" if len(planned) > 1 else "")
    total = sum(one.seconds for one in planned)
    say(f"{reproduction.title}{' (quick)' if quick else ''}: {rows}, roughly {again.duration(total)} on this machine.")
    if estimate:
        for one in planned:
            print(f"{one.row.name:<30} {again.duration(one.seconds)}")
        return
    folder = out or Path("runs") / f"reproduce-{Path(name).stem}{'-quick' if quick else ''}"
    with showing(quiet) as progress, stop_on_interrupt() as should_stop:
        table = again.reproduce(
            reproduction,
            planned,
            folder,
            quick=quick,
            changes=told,
            base=base,
            fresh=fresh,
            progress=progress,
            should_stop=should_stop,
        )
    if table is None:
        say("Stopped. The same command goes on.")
        raise typer.Exit(130)
    if as_json:
        print(json.dumps({"title": table.title, "columns": table.columns, "rows": table.rows, "note": table.note}))
    else:
        print_rows(table)
    (say if as_json else print)(f"Table: {folder / 'reproduction.csv'}")


def bench(
    file: File,
    changes: Changes = None,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds to measure, after two that are not counted.")] = 10,
    as_json: AsJson = False,
) -> None:
    """Measure how long a file's rounds take on this machine; nothing is stored."""
    from fedloom.tuning.bench import bench as measure

    with showing(quiet=False) as progress:
        found = measure(load(file, changes), rounds, progress)
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
