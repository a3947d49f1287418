"""Options that say how fedloom computes clients, the same in all benchmarks."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any


def add_settings(parser: ArgumentParser) -> None:
    """The options that say how clients are computed."""
    parser.add_argument("--workers", type=int, help="worker processes (default: one per core)")
    parser.add_argument("--group", default="auto", help="clients side by side in one step: a number, or auto")


def settings(options: Namespace) -> dict[str, Any]:
    """The same, as `fl.run` takes them."""
    return {
        "workers": options.workers or "auto",
        "group": "auto" if options.group == "auto" else int(options.group),
    }
