"""The Flower commands: `fedloom flower app` and `fedloom flower worker`."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from fedloom.cli.shared import Changes, File, command, load, need, need_network, say
from fedloom.errors import InputError

app = typer.Typer(no_args_is_help=True, help="Run experiments on a Flower SuperLink and its SuperNodes.")


@command(app, "app")
def write(file: File, folder: Annotated[Path, typer.Argument(metavar="DIR")], changes: Changes = None) -> None:
    """Write an experiment as a Flower app, which `flwr run DIR` starts.

    folder: The app's folder, new or empty.
    """
    need_network()
    from fedloom.flower.app import write_app

    for note in write_app(load(file, changes), folder):
        say(note)
    print(f"Start it with: flwr run {folder} SUPERLINK --stream")


@command(app)
def worker(
    app: Annotated[Path | None, typer.Argument(metavar="[APP]")] = None,
    site: Path | None = None,
    partition_id: int | None = None,
    num_partitions: int | None = None,
    state: Path | None = None,
) -> None:
    """Keep torch, the model and the data loaded beside a SuperNode. Use the values of its --node-config.

    app: In a rehearsal with the experiment's own data: the app's folder.
    site: This site's file (TOML): [site], [data], [policy].
    partition_id: In a rehearsal: the number of this part of the clients.
    num_partitions: In a rehearsal: the number of parts.
    state: Folder for the node's key and its clients' states, if its --node-config names one.
    """
    need("Running on Flower", "flower", "flwr")
    from fedloom.flower.paths import data_mark, state_folder

    if (site is None) == (app is None):
        raise InputError("Give either --site SITE.toml, or an app's folder with --partition-id and --num-partitions.")
    given = {"site": site, "partition-id": partition_id, "num-partitions": num_partitions, "state": state}
    config = {key: value if isinstance(value, int) else str(value) for key, value in given.items() if value is not None}
    folder = state_folder(config)
    from fedloom.flower.worker import Worker, serve, site_for
    from fedloom.network.agent.enrolment import locked_state

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # to clean up before it ends
    with locked_state(folder):
        started = Worker(site_for(app or Path(), config), folder, say)
        serve(started, say, data_mark(app or Path(), config))
