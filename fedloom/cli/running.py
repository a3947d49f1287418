"""The commands that train: run, rollback, demo, sweep, reproduce, bench."""

from __future__ import annotations

import threading
from contextlib import closing, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedloom.cli import shared
from fedloom.cli.shared import AsJson, Changes, File, Folder, Fresh, Out, Quiet, Workers, command, load, say

if TYPE_CHECKING:
    from fedloom.experiment.experiment_file import Experiment

app = typer.Typer()


@command(app)
def run(
    file: File,
    changes: Changes = None,
    only: Annotated[list[str] | None, typer.Option(metavar="LABEL")] = None,
    workers: Workers = None,
    out: Out = None,
    fresh: Fresh = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Annotated[bool, typer.Option("-v", "--verbose")] = False,
    report: bool = True,
) -> None:
    """Run an experiment, or continue where it stopped.

    only: Run only these algorithms of the file; * matches anything. Repeatable.
    verbose: Also say how clients are computed, and show the whole traceback of an error.
    report: Write report.html into the folder.
    """
    experiment = load(file, shared.with_workers(changes, workers))
    _run(experiment.choose(only) if only else experiment, out, as_json, quiet, report, fresh=fresh, verbose=verbose)


@command(app)
def rollback(
    folder: Folder,
    to: Annotated[int, typer.Option(min=1, metavar="ROUND")],
    cell: Annotated[str | None, typer.Option(metavar="LABEL-SEED")] = None,
) -> None:
    """Return a run to an earlier round, and delete what came after it; the next start continues from there.

    to: The round: one of the last `run.keep_checkpoints` that have a checkpoint.
    cell: Only this cell, such as fedavg-1 (default: all that are beyond the round).
    """
    from fedloom.experiment.run_folder import locked, roll_back
    from fedloom.results.result import open_store

    open_store(folder).close()
    network = folder / "network"
    with locked(folder), locked(network) if network.is_dir() else nullcontext():
        for name, done in roll_back(folder, to, cell).items():
            if network.is_dir():
                from fedloom.network.coordinator.network_folder import coordinator_ledger

                with closing(coordinator_ledger(folder)) as ledger:
                    ledger.forget_after(name, to)
            later = f"round {done}" if done == to + 1 else f"rounds {to + 1} to {done}"
            print(f"{name}: returned to round {to}. Deleted results, checkpoints and updates of {later}.")


@command(app)
def demo(
    out: Path = Path("runs/demo"),
    live: bool = False,
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8600,
    no_browser: bool = False,
    fresh: Fresh = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Compare seven ways to learn on handwritten digits at ten data holders: a first run, in a minute or two.

    out: The run's folder.
    live: Show it on a page while it happens, with the models of all data holders; Ctrl-C ends the page.
    port: The port of the page; 0 takes a free one.
    no_browser: Do not open a browser.
    """
    file = Path(__file__).parents[1] / "experiment" / "templates" / "demo.toml"
    if not live:
        _run(load(file, None), out, as_json, quiet, report=True, fresh=fresh)
        if not quiet:
            shared.say("What the seven ways are: docs/explanation/seven-ways.md in fedloom's repository")
        return
    from fedloom.cli.watching import opened

    with opened(out, "127.0.0.1", port, browser=not no_browser):
        _run(load(file, ["run.checkpoint_every=1"]), out, as_json, quiet, report=True, fresh=fresh)
        shared.say("The page stays open. Ctrl-C ends it.")
        with suppress(KeyboardInterrupt):  # nothing is left to continue
            threading.Event().wait()


def _run(experiment: Experiment, out: Path | None, as_json: bool, quiet: bool, report: bool, **how: Any) -> None:
    from fedloom.experiment.plan import Plan
    from fedloom.experiment.run import run_plan

    folder = out or Path("runs") / experiment.name
    with shared.showing(quiet) as progress, shared.stop_on_interrupt() as should_stop:
        result = run_plan(Plan.of(experiment), folder, progress=progress, should_stop=should_stop, **how)
    shared.finish(result, experiment, folder, as_json, report, quiet)


@command(app)
def sweep(
    file: File,
    over: Annotated[list[str] | None, typer.Option(metavar="TABLE.KEY=A,B,C")] = None,
    random: Annotated[int | None, typer.Option(min=1)] = None,
    seed: int = 0,
    prune: bool = False,
    changes: Changes = None,
    workers: Workers = None,
    out: Path | None = None,
    fresh: Fresh = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Try many settings and rank them by validation data; the test splits are not used.

    over: Values of a key to try. Repeat it to try all combinations.
    random: Draw this many settings at random. Keys may have ranges: low:high or low:high:log.
    seed: The seed of --random.
    prune: After a third of the rounds, continue only with the better half.
    out: The sweep's folder (default: runs/NAME-sweep).
    """
    from fedloom.tuning import search_space
    from fedloom.tuning.sweep import sweep as try_all
    from fedloom.tuning.sweep_advice import advice

    changes = shared.with_workers(changes, workers)
    choices, changed = search_space.parse_over(over or []), shared.parse_changes(changes)
    how: dict[str, Any] = {"random": random, "seed": seed, "prune": prune, "fresh": fresh}
    with shared.showing(quiet) as progress, shared.stop_on_interrupt() as should_stop:
        found = try_all(file, choices, changes=changed, out=out, progress=progress, should_stop=should_stop, **how)
    if found is None:
        raise _stopped()
    write = shared.print_json(found.json(), quiet=quiet) if as_json else shared.print_rows(found.table())
    for line in advice(found, file, changes or []):
        write(line)
    write(f"Table: {found.folder / 'sweep.csv'}")
    if (found.folder / "sweep.png").is_file():
        write(f"Picture: {found.folder / 'sweep.png'}")


@command(app)
def reproduce(
    name: Annotated[str | None, typer.Argument(metavar="NAME")] = None,
    quick: bool = False,
    only: Annotated[list[str] | None, typer.Option(metavar="ROW")] = None,
    data: Path | None = None,
    changes: Changes = None,
    out: Path | None = None,
    fresh: Fresh = False,
    estimate: bool = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Run published experiments again, and show your results beside the published ones.

    name: Its name. Without it, list all.
    quick: Run a shortened version, labelled as such.
    only: Run only these rows; * matches anything. Repeatable.
    data: The folder with the data.
    out: The folder (default: runs/reproduce-NAME).
    estimate: Only estimate how long it takes.
    """
    from fedloom.papers import published
    from fedloom.papers.reproduce import Rerun
    from fedloom.tuning.estimate import duration

    if name is None:
        for known in published.names():
            print(f"{known:<20} {published.load(known).title}")
        return
    reproduction = published.load(name)
    changed = {**({"data.path": str(data.resolve())} if data is not None else {}), **shared.parse_changes(changes)}
    base = Path(name).resolve().parent if name.endswith(".toml") else None
    rerun = Rerun(reproduction, quick, changed, base)
    folder = out or Path("runs") / f"reproduce-{Path(name).stem}{'-quick' if quick else ''}"
    planned = rerun.plan(only or [], folder)
    rows = f"{len(planned)} row" + ("s" if len(planned) > 1 else "")
    total = duration(sum(one.seconds for one in planned))
    say(f"{reproduction.title}{' (quick)' if quick else ''}: {rows}, roughly {total} on this machine.")
    if estimate:
        for one in planned:
            print(f"{one.row.name:<30} {duration(one.seconds)}")
        return
    with shared.showing(quiet) as progress, shared.stop_on_interrupt() as should_stop:
        table = rerun.run(planned, folder, fresh=fresh, progress=progress, should_stop=should_stop)
    if table is None:
        raise _stopped()
    content = {"title": table.title, "columns": table.columns, "rows": table.rows, "note": table.note}
    write = shared.print_json(content, indent=None, quiet=quiet) if as_json else shared.print_rows(table)
    write(f"Table: {folder / 'reproduction.csv'}")


def _stopped() -> typer.Exit:
    say(f"Stopped. Continue with: {shared.again()}")
    return typer.Exit(130)


@command(app)
def bench(
    file: File,
    changes: Changes = None,
    rounds: Annotated[int, typer.Option(min=2)] = 10,
    as_json: AsJson = False,
) -> None:
    """Measure how long an experiment's rounds take on this machine; nothing is stored.

    rounds: Rounds to measure, after two that are not counted.
    """
    from fedloom.tuning.bench import bench as measure

    with shared.showing(quiet=False) as progress:
        found = measure(load(file, changes), rounds, progress)
    sections = [*((timing.algorithm, timing.lines()) for timing in found.timings), ("how", found.choices)]
    shared.print_result(as_json, found.json(), ("\n  ".join([title, *lines]) for title, lines in sections))
