"""Writes the reference of the command line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from fedloom.cli import app


def commands() -> str:
    """Write a section for each command."""
    root = typer.main.get_command(app)
    lines = []
    for name, command in _walk("fedloom", root):
        context = command.make_context(name, [], resilient_parsing=True)
        usage = " ".join(command.collect_usage_pieces(context))
        lines += [f"## {name}", "", f"```text\n{name} {usage}\n```", "", (command.help or "").strip(), ""]
        lines += [_table(command), ""]
    return "\n".join(lines)


def _walk(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    """Every command that does something, with the words that call it."""
    subcommands = getattr(command, "commands", None)
    if not subcommands:
        yield name, command
        return
    for word, inner in subcommands.items():
        yield from _walk(f"{name} {word}", inner)


def _table(command: Any) -> str:
    lines = []
    for parameter in command.params:
        if parameter.name == "help" or getattr(parameter, "hidden", False):
            continue
        is_option = parameter.param_type_name == "option"
        names = (
            [*parameter.opts, *parameter.secondary_opts] if is_option else [parameter.metavar or parameter.name.upper()]
        )
        shown = ", ".join(f"`{name}`" for name in names)
        said = " ".join((getattr(parameter, "help", None) or "").split()).replace("|", "\\|")
        flag = getattr(parameter, "is_flag", False)
        given = parameter.default not in (None, False, (), []) and not flag and not callable(parameter.default)
        known = f" Default: `{parameter.default}`." if given and str(parameter.default) != "" else ""
        lines.append(f"| {shown} | {said}{known} |")
    return "\n".join(["| argument or option | meaning |", "| --- | --- |", *lines]) if lines else ""
