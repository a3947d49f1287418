"""What clients keep between rounds, in versions on the agent's disk. The coordinator says which version counts.

A new version is on the disk before the agent sends the answer that belongs to it, and the old one stays until the
coordinator has the round on its own disk. So a crash of either side at any instant leaves the version that counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from fedloom.errors import StoreError, TrainingError
from fedloom.files import replacing, write_atomically
from fedloom.network.protocol.messages import NEW, Ticket
from fedloom.network.protocol.tensors import Parcel, WireError, flatten, load_parcel, unflatten
from fedloom.tree import Groups

NAMED = "named.json"
_VERSION = re.compile(r"(\d+)-(\d+)-(\d+)\.safetensors")


class StateVersions:
    """The own states of this agent's clients in one run; `replaced`: another agent hosted them before."""

    def __init__(self, folder: Path, replaced: bool = False) -> None:
        self.folder, self.replaced = folder, replaced
        self._named: dict[tuple[str, int], set[Ticket]] = {}
        self._recall()

    def load(self, cell: str, client: int, ticket: Ticket, initial: Groups) -> Groups:
        """Return the version that counts; before the first round that is the initial state."""
        if ticket == NEW:
            return initial
        path = self._path(cell, client, ticket)
        if not path.is_file():
            if self.replaced and all(ticket < version for version, _ in _versions(path.parent)):
                return initial  # the version was on the disk of the agent before: it starts as one that joins late
            raise TrainingError(
                f"The state of client {client} is missing: {path.name} of {cell} is not on this agent's disk. Was the "
                "state folder moved, or restored from an old copy? If it is lost, ask the operator for `fedloom agents "
                "replace`, and join with an empty state folder."
            )
        try:
            return unflatten(load_parcel(path)[1])
        except WireError as error:
            raise TrainingError(f"The state of client {client} is damaged: {error}") from None

    def save(self, cell: str, client: int, ticket: Ticket, own: Groups) -> None:
        """Write a new version; it is on the disk when this returns."""
        path = self._path(cell, client, ticket)
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with replacing(path, "own") as temporary, open(temporary, "wb") as file:
                file.writelines(Parcel({}, flatten(own)).pieces())
        except OSError as error:
            raise StoreError(f"The state of client {client} cannot be written to {path.parent}: {error}.") from error

    def prune(self, cell: str, client: int, ticket: Ticket, durable: int) -> None:
        """Delete versions that can never count again. `ticket` counts now, `durable` is the oldest kept checkpoint.

        Only versions that the coordinator named have ever counted. The newest of them up to the oldest checkpoint is
        the first that may be needed again. Of the versions between it and now, only named ones can be.
        """
        named = self._named.setdefault((cell, client), set())
        named.add(ticket)
        named -= {one for one in named if one > ticket}  # of abandoned rounds: they never count again
        base = max((one for one in named if one[0] <= durable), default=None)
        if base is None:
            return
        named -= {one for one in named if one < base}
        folder = self._path(cell, client, ticket).parent
        for version, path in _versions(folder):
            if version is None or version < base or (version[0] <= ticket[0] and version not in named):
                path.unlink(missing_ok=True)

    def remember(self) -> None:
        """Store which versions were named, for processes that end after one assignment."""
        if self._named:
            listed = [[*key, sorted(tickets)] for key, tickets in self._named.items()]
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_atomically(self.folder / NAMED, json.dumps(listed).encode())

    def _recall(self) -> None:
        try:
            listed = json.loads((self.folder / NAMED).read_text())
        except (OSError, ValueError):
            return  # old versions are then deleted later
        for cell, client, tickets in listed:
            self._named[cell, client] = {(round, attempt, call) for round, attempt, call in tickets}

    def _path(self, cell: str, client: int, ticket: Ticket) -> Path:
        return self.folder / cell / str(client) / f"{ticket[0]}-{ticket[1]}-{ticket[2]}.safetensors"


def _versions(folder: Path) -> Iterator[tuple[Ticket, Path]]:
    """Yield the versions of a client's state and their files."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if found := _VERSION.fullmatch(path.name):
            round, attempt, call = map(int, found.groups())
            yield (round, attempt, call), path
