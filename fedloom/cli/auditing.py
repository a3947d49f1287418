"""The command `fedloom audit FILE`, which attacks an experiment. `network.py` adds the logs of a federation."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from fedloom.cli import shared
from fedloom.cli.shared import AsJson, Changes, File, Out, Quiet, command, load, print_json, print_rows, say
from fedloom.errors import InputError


class AuditGroup(shared.Group):
    """Reads `audit FILE.toml` as `audit privacy FILE.toml`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not self.commands.keys() & set(args) and any(Path(arg).suffix == ".toml" for arg in args):
            args = ["privacy", *args]
        first = next((arg for arg in args if not arg.startswith("-")), "")
        if first and first not in self.commands and ("/" in first or Path(first).is_dir()):
            raise InputError(
                f"{first} is not an experiment file. `fedloom audit` takes the file that was run, as in `fedloom audit "
                f"experiment.toml`. If its run is not in runs/NAME, add --out {first}."
            )
        return super().parse_args(ctx, args)


audit_app = typer.Typer(
    no_args_is_help=True,
    help="Attack your own experiment (`fedloom audit FILE.toml`), or read and check what a federation logged.",
)
REFUTED = 5  # the exit code of an audit that found a claim to be wrong


@command(audit_app, "privacy")
def audit_privacy(
    file: File,
    changes: Changes = None,
    only: Annotated[list[str] | None, typer.Option("--only", metavar="AUDIT")] = None,
    canaries: Annotated[int, typer.Option(min=100)] = 1000,
    out: Out = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Attack an experiment and its run: measure what its privacy and its robustness are worth. Short: `audit FILE`.

    only: epsilon, membership, reconstruction or poisoning (default: all that apply). Repeatable.
    canaries: Made-up clients in the copy of the run that measures ε. More of them bound it closer.
    """
    from fedloom.audits.audit import audit
    from fedloom.results.audit_findings import poisoning, reconstruction
    from fedloom.results.figure_style import styled

    experiment = load(file, changes)
    folder = out or Path("runs") / experiment.name
    chosen = [*(part for change in changes or () for part in ("--set", change)), *(["--out", str(out)] if out else [])]
    run = shlex.join(["fedloom", "run", str(file), *chosen])
    with shared.showing(quiet) as progress:
        found = audit(experiment, folder, only or (), progress, canaries, run)
    now = {name: one for name, one in found.items() if not only or name in only}  # the file also has earlier ones
    write = print_json(found) if as_json else _print_findings(now)
    with styled():
        drawn = [figure for draw in (reconstruction, poisoning) if (figure := draw(now)) is not None]
        pictures = [path for figure in drawn for path in figure.save(folder) if path.suffix == ".png"]
    for path in pictures:
        write(f"Picture: {path}")
    write(f"Findings: {folder / 'audit.json'}")
    refuted = [label for label, one in found.get("epsilon", {}).items() if label != "left_out" and one["refuted"]]
    if refuted:
        say(f"The claimed ε of {', '.join(refuted)} is wrong: an attacker did better than it allows.")
        raise typer.Exit(REFUTED)


def _print_findings(found: dict[str, Any]) -> Callable[[str], None]:
    """Print the tables of all audits, and why some were left out; return how to print what follows them."""
    from fedloom.results.audit_findings import tables

    for table in tables(found):
        print_rows(table)
    for name, one in found.items():
        if "left_out" in one:
            print(f"No audit of {name}: {one['left_out']}")
    return print
