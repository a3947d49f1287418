"""The command that shows runs on a page while they happen."""

from __future__ import annotations

import os
import sys
import threading
import webbrowser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedloom.cli.shared import command, need, say
from fedloom.errors import InputError

if TYPE_CHECKING:
    from fedloom.watch.serve import WatchServer

app = typer.Typer()
PORT = 8600


@command(app)
def watch(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR")],
    port: Annotated[int, typer.Option(min=0, max=65535)] = PORT,
    host: str = "127.0.0.1",
    no_browser: bool = False,
) -> None:
    """Show runs on a page in your browser, in progress or finished. Ctrl-C ends it; the runs go on.

    folders: The folders of one run or several. Several are shown side by side.
    port: The port of the page; 0 takes a free one.
    host: The address to listen on. Other machines can reach one that is not 127.0.0.1; the page then needs a token.
    no_browser: Do not open a browser.
    """
    with opened(folders, host, port, browser=not no_browser):
        threading.Event().wait()


@contextmanager
def opened(folders: Sequence[Path] | Path, host: str, port: int, *, browser: bool) -> Iterator[WatchServer]:
    """Serve the page of some runs, or of one that begins later, while the context is open; say where it is."""
    need("The page", "watch", "fastapi", "uvicorn")
    from fedloom.watch.serve import WatchServer

    several = [] if isinstance(folders, Path) else [folder.resolve() for folder in folders]
    twice = next((folder for folder in several if several.count(folder) > 1), None)
    if twice is not None:
        raise InputError(f"{twice} is named twice. Name each run once.")
    server = WatchServer(folders, host, port)
    with server.serving():
        server.announce(say)
        if browser and has_screen():
            webbrowser.open(server.url)
        yield server


def has_screen() -> bool:
    """Return whether a browser with windows can be opened: one that takes over the terminal would be in the way."""
    return sys.platform in ("win32", "darwin") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
