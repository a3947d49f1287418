"""What left the clients in a run, and which protections stood in the way: a section of the report."""

from __future__ import annotations

from collections.abc import Iterator

from fedloom.errors import FedloomError
from fedloom.privacy.table import PrivacyTable
from fedloom.privacy.words import ADJACENCY, has, lacks
from fedloom.results.run_data import RunData
from fedloom.results.table import show

NETWORK = "network"  # the folder of a coordinator


def what_left(run: RunData) -> list[str]:
    """Return the sentences of the section."""
    try:
        table = PrivacyTable(**(run.description.get("privacy") or {}))
    except FedloomError as error:  # of a later version
        return [f"This version cannot read the run's [privacy]: {error}"]
    return [*_seen(run, table), *_bytes(run), *has(table), *_spent(run), *lacks(table)]


def _seen(run: RunData, table: PrivacyTable) -> Iterator[str]:
    real = (run.folder / NETWORK).is_dir()
    if not real:
        yield "This was a simulation: nothing left a machine. What follows is what would leave a client on a network."
    if table.secure_aggregation is None:
        yield "The server saw the update of each client in each round it took part in."
    measured = run.description.get("evaluate", {}).get("splits")
    if measured and not real and table.on:
        yield "Measurements at clients are for simulation only: they are not protected."
    elif measured:
        yield "The server saw how well models do at each client: loss and metrics, and on how many examples."


def _bytes(run: RunData) -> Iterator[str]:
    for label in run.labels:
        sent = [int(run.costs(*cell).bytes_up.sum()) for cell in run.cells if cell[0] == label]
        if any(sent):
            yield f"{label}: clients sent {show(sum(sent) / len(sent), 'bytes')} in all."


def _spent(run: RunData) -> Iterator[str]:
    for label, seed in run.cells:
        _, values = run.server_values(label, seed, "epsilon", "notes")
        if len(values):
            yield f"{label} (seed {seed}) has spent ε = {values[-1]:.3g}, for {ADJACENCY}."
