"""The command line itself."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from fedloom.cli import app
from fedloom.cli.shared import GUESSES
from tests.cli.commands import in_this_process


def test_help_and_version_do_not_load_torch() -> None:
    script = "import sys, fedloom.cli\nprint([name for name in ('torch', 'pandas', 'numpy') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    version = subprocess.run(
        [sys.executable, "-m", "fedloom.cli", "--version"], capture_output=True, text=True, check=True
    )
    assert re.match(r"fedloom \d+\.\d+\.\d+ \(torch 2\.", version.stdout)


def test_every_command_and_every_argument_says_what_it_is() -> None:
    silent = [name for name, thing in described("fedloom", typer.main.get_command(app)) if not thing.help]
    assert silent == []


def test_help_shows_names_of_tables(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    in_this_process("join", "--help", monkeypatch=monkeypatch)
    assert "with [site]" in capsys.readouterr().out


def test_a_wrong_guess_of_a_command_leads_to_the_right_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root: Any = typer.main.get_command(app)
    for guess, right in {"new": "init", "train": "run", "start": "run", "create": "init", "plot": "report"}.items():
        in_this_process(guess, "FILE", monkeypatch=monkeypatch, code=2)
        assert f"There is no command '{guess}'. Did you mean `fedloom {right}`?" in capsys.readouterr().err
    for guess, right in GUESSES.items():
        assert guess not in root.commands, "a command that is there could not be called"
        found = root
        for word in right.split():
            found = found.commands[word]


def test_every_command_has_help(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def commands(command: Any, words: list[str]) -> Iterator[list[str]]:
        yield words
        for name, one in getattr(command, "commands", {}).items():
            yield from commands(one, [*words, name])

    for words in commands(typer.main.get_command(app), []):
        for how in ("--help", "-h"):
            in_this_process(*words, how, monkeypatch=monkeypatch)
            assert "Usage:" in capsys.readouterr().out, words


def test_flags_take_no_value_and_show_no_type(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["run"], ["export"], ["agents", "list"], []):
        in_this_process(*words, "--help", monkeypatch=monkeypatch)
        shown = capsys.readouterr().out
        assert "--help" in shown
        assert "bool" not in shown.lower()


def described(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    """Every command and its visible arguments and options, with the words that name them."""
    yield name, command
    for parameter in command.params:
        if not getattr(parameter, "hidden", False):
            yield f"{name} {parameter.name}", parameter
    for word, inner in getattr(command, "commands", {}).items():
        yield from described(f"{name} {word}", inner)


def test_the_commands_are_listed_in_the_order_in_which_you_need_them() -> None:
    root: Any = typer.main.get_command(app)
    expected = (
        "run rollback demo sweep reproduce bench init check graph keys algorithms models show list compare report"
    )
    assert list(root.commands) == [
        *(*expected.split(), "predict", "export", "remove"),
        *("watch", "serve", "join", "status", "data", "agents", "audit", "flower"),
    ]
