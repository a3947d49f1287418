"""What all commands share: changes to a file, Ctrl-C, and how results are printed."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer

from fedloom import cli
from fedloom.cli import shared
from fedloom.errors import InputError
from fedloom.experiment.progress import Lines, Silent
from fedloom.results.result import Result
from fedloom.results.table import Table
from tests.cli.commands import in_this_process

Name = Annotated[str | None, typer.Argument(metavar="WORD")]


def test_the_docstring_of_a_command_is_its_help() -> None:
    app = typer.Typer()

    @shared.command(app)
    def greet(who: str, twice: bool = False, loud: bool = True, sign_off: str = "bye", word: Name = None) -> None:
        """Greet somebody.

        who: Their name.
        twice: Greet them again: once is not enough.
        loud: Shout.
        sign_off: The last word.
        word: Another word.
        """

    @shared.command(app, "leave")
    def leave_somebody(word: Name = None) -> None:
        """Leave.

        word: The only word.
        """

    root: Any = typer.main.get_command(app)
    assert root.commands["greet"].help == "Greet somebody."
    found = {one.name: (one.help, [*one.opts, *one.secondary_opts]) for one in root.commands["greet"].params}
    assert found == {
        "who": ("Their name.", ["who"]),
        "twice": ("Greet them again: once is not enough.", ["--twice"]),
        "loud": ("Shout.", ["--loud", "--no-loud"]),
        "sign_off": ("The last word.", ["--sign-off"]),
        "word": ("Another word.", ["word"]),
    }
    assert [one.help for one in root.commands["leave"].params] == ["The only word."]


def test_help_for_a_parameter_that_a_command_does_not_have_is_an_error() -> None:
    with pytest.raises(KeyError, match="nobody"):

        @shared.command(typer.Typer())
        def greet(who: str) -> None:
            """Greet somebody.

            nobody: Their name.
            """


def test_a_missing_extra_is_named_with_the_modules_that_are_missing() -> None:
    shared.need("This", "network", "json", "typer")
    with pytest.raises(InputError, match=r"^This needs no_such_a, no_such_b: pip install 'fedloom\[network\]'\.$"):
        shared.need("This", "network", "no_such_a", "json", "no_such_b")


def test_changes_are_toml_values_or_bare_words() -> None:
    found = shared.parse_changes(["train.lr=0.1", " data.source =digits", "seeds=[1, 2]", 'a.b={ c = "d=e" }'])
    assert found == {"train.lr": 0.1, "data.source": "digits", "seeds": [1, 2], "a.b": {"c": "d=e"}}


@pytest.mark.parametrize(
    ("change", "message"), [("lr", "table.key=value"), ("=1", "table.key=value"), ("a=[1", "TOML")]
)
def test_a_change_that_cannot_be_read_is_refused(change: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        shared.parse_changes([change])


def test_the_first_interrupt_asks_to_stop_and_the_second_one_stops(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT)
    with shared.stop_on_interrupt() as should_stop:
        assert not should_stop()
        os.kill(os.getpid(), signal.SIGINT)
        assert should_stop()
        assert "press Ctrl-C again to stop at once" in capsys.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_progress_is_lines_without_a_terminal_and_nothing_when_quiet() -> None:
    with shared.showing(quiet=False) as progress:
        assert isinstance(progress, Lines)
    with shared.showing(quiet=True) as progress:
        assert isinstance(progress, Silent)


def test_output_for_a_file_is_as_wide_as_columns_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert shared.console(100).width == 100
    monkeypatch.setenv("COLUMNS", "80")
    assert shared.console(100).width == 80


def test_names_in_square_brackets_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    shared.console(100).print("give it a test set: [data] with source, and [red] too")
    assert capsys.readouterr().out == "give it a test set: [data] with source, and [red] too\n"


def test_a_result_is_json_or_lines(capsys: pytest.CaptureFixture[str]) -> None:
    shared.print_result(True, [1], ["one"])
    assert json.loads(capsys.readouterr().out) == [1]
    shared.print_result(False, [1], ["one", "two"])
    assert capsys.readouterr().out == "one\ntwo\n"


def test_what_follows_json_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    shared.print_json({"a": 1})("Table: here")
    said = capsys.readouterr()
    assert (json.loads(said.out), said.err) == ({"a": 1}, "Table: here\n")


def test_a_long_table_is_cut_with_a_sign(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("t", "Numbers", ("row", "value"), tuple((f"r{n}", n) for n in range(5)), ("text", "whole"), "A note.")
    shared.print_rows(table, most=2)("Table: here")
    said = capsys.readouterr().out
    assert "r1" in said
    assert "r2" not in said
    assert "…" in said
    assert said.endswith("Table: here\n")


def test_a_column_without_any_value_is_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    rows = (("a", None, 1), ("b", None, None))
    shared.print_rows(Table("t", "Numbers", ("row", "spread", "value"), rows, ("text", "number", "whole"), ""))
    said = capsys.readouterr().out
    assert "value" in said
    assert "spread" not in said


def test_a_stopped_run_says_how_to_continue_and_exits_with_130(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    unused: Any = None
    given = ["serve", "my file.toml", "--listen", "127.0.0.1:18443", "--fresh", "--set", "train.lr=0.1"]
    monkeypatch.setattr(sys, "argv", ["/somewhere/fedloom", *given])
    with pytest.raises(typer.Exit) as stopped:
        shared.finish(Result(tmp_path, "r", "stopped", ()), unused, tmp_path, as_json=True)
    said = capsys.readouterr()
    assert stopped.value.exit_code == 130
    assert "Continue with: fedloom serve 'my file.toml' --listen 127.0.0.1:18443 --set train.lr=0.1\n" in said.err
    assert json.loads(said.out)["status"] == "stopped"


def test_a_command_that_is_interrupted_early_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fedloom.cli.running.load", interrupt)
    in_this_process("run", "digits.toml", monkeypatch=monkeypatch, code=130)
    assert capsys.readouterr().err == "Interrupted. The same command continues.\n"


def test_a_narrow_table_breaks_between_words_and_keeps_its_borders(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    columns = ("rank", "algorithm", "train.lr", "mean", "std over seeds", "95 % low", "95 % high", "seeds")
    kinds = ("whole", "text", "text", *("number",) * 4, "whole")
    row = (1, "fedavg", "0.5", 0.672, 0.01688, 0.5204, 0.8237, 2)
    shared.print_rows(Table("t", "Sweep", columns, (row,), kinds, ""))
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("algorithm", "train.lr", "0.01688", "0.8237"))
    assert "…" not in shown
    assert {line[-1] for line in shown.splitlines()[1:6]} == set("┓┃┩│┘")
    assert max(map(len, shown.splitlines())) <= 80


def test_what_is_logged_is_shown_in_plain_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def log(**_: object) -> None:
        logging.getLogger("fedloom").warning("Caution: a client has one example.")

    monkeypatch.setattr(cli, "app", log)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    logging.basicConfig()  # as some packages do: it shows levels and names
    in_this_process(monkeypatch=monkeypatch)
    assert capsys.readouterr().err == "Caution: a client has one example.\n"
    assert logging.getLogger("fedloom").propagate


def test_json_has_null_for_numbers_that_it_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    content = {"low": math.nan, "rows": [(math.inf, 1.5)]}
    shared.print_json(content, indent=None)
    shared.print_result(True, content, ())
    printed, laid_out = capsys.readouterr().out.split("\n", 1)
    assert json.loads(laid_out) == json.loads(printed)
    assert printed == '{"low": null, "rows": [[null, 1.5]]}'


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "a.toml"], " The same command continues."),
        (["sweep", "a.toml", "--fresh"], " The same command continues, without --fresh."),
        (["show", "run"], ""),
        ([], ""),
    ],
)
def test_only_commands_that_can_go_on_say_so(words: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["fedloom", *words])
    assert cli._how_to_continue() == said
