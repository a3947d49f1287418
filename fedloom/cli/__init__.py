"""The command line. Results go to stdout, progress and messages to stderr; errors are one message and an exit code."""

from __future__ import annotations

import logging
import os
import signal
import sys
import traceback
from typing import Annotated

import typer

from fedloom import __version__
from fedloom.cli import auditing, data, flower, network, planning, results, running, watching
from fedloom.cli.shared import Group, say
from fedloom.errors import FedloomError, InputError

app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    help="Federated learning: run an experiment file, and get trained models, tables and a report.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
CONTINUED = ("run", "demo", "sweep", "reproduce", "serve", "join")
for commands in (running.app, planning.app, results.app, watching.app, network.app):
    app.add_typer(commands)
for name, group in {
    "data": data.app,
    "agents": network.agents_app,
    "audit": auditing.audit_app,
    "flower": flower.app,
}.items():
    app.add_typer(group, name=name, cls=auditing.AuditGroup if name == "audit" else Group)


def main() -> None:
    """Entry point: turns fedloom's own errors into a message and an exit code."""
    before = signal.signal(signal.SIGTERM, _terminate)
    # what fedloom logs, such as with -q, in plain words: packages may set up the log to show levels and names, too
    log, handler = logging.getLogger("fedloom"), logging.StreamHandler()
    log.addHandler(handler)
    log.propagate = False
    try:
        code = app(standalone_mode=False)  # an exit code, if a command raised typer.Exit
        sys.exit(code if isinstance(code, int) else 0)
    except FedloomError as error:
        if error.__cause__ is not None and {"-v", "--verbose"} & {*sys.argv}:
            say("".join(traceback.format_exception(error)))
        say(f"error: {error}")
        sys.exit(error.exit_code)
    except OSError as error:
        if error.filename is None or {"-v", "--verbose"} & {*sys.argv}:
            raise
        path = str(error.filename).removesuffix(".part")  # what is written beside a file before it replaces it
        say(f"error: {path} cannot be read or written: {error.strerror}.")
        sys.exit(InputError.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        say(f"Interrupted.{_how_to_continue()}")
        sys.exit(130)
    except Exception as error:
        if hasattr(error, "format_message"):  # click's usage errors
            if error.format_message():
                say(f"error: {error.format_message()}")
            sys.exit(getattr(error, "exit_code", 2))
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
        log.removeHandler(handler)
        log.propagate = True


def _terminate(*_: object) -> None:
    """End at once, but in order: files in memory are deleted, ports and databases closed, workers ended."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one does not interrupt that
    os.write(2, f"Stopped by SIGTERM.{_how_to_continue()}\n".encode())  # a print may be what was interrupted
    sys.exit(128 + signal.SIGTERM)


def _how_to_continue() -> str:
    """Say that a stopped command can go on. It is not repeated: that of `join` may have a token, and logs are kept."""
    if next((word for word in sys.argv[1:] if not word.startswith("-")), "") not in CONTINUED:
        return ""
    return " The same command continues" + (", without --fresh." if "--fresh" in sys.argv else ".")


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            torch = version("torch")  # the package's own record: importing torch takes a second
        except PackageNotFoundError:
            torch = "not installed"
        print(f"fedloom {__version__} (torch {torch}, Python {sys.version.split()[0]})")
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show versions.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("-v", "--verbose", help="If a command fails, show the whole traceback.")
    ] = False,
) -> None:
    """Options of the command itself."""
