"""Receives assignments and their parcels, and keeps parcels by their SHA-256, so that they need not come again."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import torch
from torch import Tensor

from fedloom import files, tree
from fedloom.compression.downlink import Downlink
from fedloom.errors import StoreError
from fedloom.network.agent.connection import Connection, ReplyReader
from fedloom.network.agent.unsigned_requests import Unreachable
from fedloom.network.protocol.messages import AssignedClient, Assignment
from fedloom.network.protocol.packed_parcel import FROZEN, PACKED, unpack
from fedloom.network.protocol.tensors import HEADER_LIMIT, WireError, load_parcel, read_parcel, unflatten
from fedloom.results.safe_text import plain
from fedloom.tree import Groups

MOST = 6  # parcels in the cache
SMALL = 8 << 20  # bytes: up to this, a parcel stays in memory


class NoRoom(StoreError):
    """The tensors of an assignment cannot be written to the disk."""

    def __init__(self, assignment: Assignment, message: str) -> None:
        super().__init__(message)
        self.assignment = assignment


class ParcelCache:
    """A small cache of parcels: small ones in memory, large ones on the agent's disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for leftover in folder.iterdir():  # of an earlier process, which knew what they were
            if leftover.suffix != ".lasting":
                leftover.unlink()
        self._known: OrderedDict[str, bytes | None] = OrderedDict()  # None for one on the disk
        self._read: dict[str, tuple[dict[str, Any], Groups]] = {}

    def next_assignment(self, connection: Connection) -> Assignment | str:
        """Wait for work and fetch its tensors. A string means that the run is over, an empty one: poll again."""
        wanted = {"have": ",".join(self._known), "pack": "1" if connection.compress else ""}
        query = "&".join(f"{key}={value}" for key, value in wanted.items() if value)
        with connection.stream(f"/v1/work?{query}" if query else "/v1/work") as response:
            if response.status_code == 204:
                response.read()
                return plain(unquote(response.headers.get("fedloom-finished", "")))
            pieces = ReplyReader(response)
            try:
                assignment = self._read_assignment(pieces)
                pieces.end()
            except (ValueError, KeyError, WireError) as error:
                raise Unreachable(f"The coordinator's message cannot be understood ({type(error).__name__}).") from None
        self._forget({part.sha256 for part in assignment.parts})
        return assignment

    def _read_assignment(self, pieces: ReplyReader) -> Assignment:
        size = int.from_bytes(pieces.take(4), "little")
        if size > HEADER_LIMIT:
            raise WireError("the assignment's header is too long")
        header = json.loads(pieces.take(size))
        missing = set(header.pop("missing"))
        assignment = Assignment.model_validate(header)
        for part in assignment.parts:
            if part.sha256 in missing:
                try:
                    self._store(part.sha256, part.bytes, pieces)
                except StoreError as error:
                    raise NoRoom(assignment, str(error)) from error
            if part.sha256 not in self._known:
                raise WireError("the coordinator did not send all tensors of an assignment")
            self._known.move_to_end(part.sha256)
        return assignment

    def fetch(self, connection: Connection, sha256: str) -> Path:
        """Fetch tensors that are needed for the whole run, into a file."""
        path = self.folder / f"{sha256}.lasting"
        if not path.is_file() or files.sha256(path) != sha256:
            with connection.stream(f"/v1/tensors/{sha256}") as response:
                pieces = ReplyReader(response)
                pieces.into(path, int(response.headers["content-length"]), sha256)
                pieces.end()
        return path

    def groups(self, assignment: Assignment, role: str) -> Groups:
        """Return the tensors of an assignment that have this role."""
        return self._open(assignment, role)[1]

    def shared(self, assignment: Assignment, link: Downlink | None, frozen: str = "") -> Groups:
        """Return what all clients of an assignment receive; `frozen` is the SHA-256 of the site's frozen parameters."""
        (part,) = (part for part in assignment.parts if part.role == "shared")
        header, content = self._open(assignment, "shared")
        if header.get(FROZEN, "") != frozen:
            raise WireError("the coordinator's model has other frozen parameters than those that it sent first")
        if PACKED in header:  # once for all clients of an assignment
            content = unpack(header, content, link)
            self._read[part.sha256] = {FROZEN: frozen}, content
        return content

    def private(self, assignment: Assignment, one: AssignedClient) -> Groups | None:
        """Return the message for one client, as a stack of one."""
        if all(part.role != "private" for part in assignment.parts):
            return None
        rows = self.groups(assignment, "private")
        if any(one.row >= len(leaf) for leaves in rows.values() for leaf in leaves.values()):
            raise WireError("an assignment lacks the message for one of its clients")
        return {group: {name: leaf[one.row][None] for name, leaf in t.items()} for group, t in rows.items()}

    def peers(self, assignment: Assignment, one: AssignedClient) -> tuple[Groups | None, Tensor | None]:
        """Return what a client's peers sent, at their positions in the cohort, and which of them it receives."""
        if all(part.role != "peers" for part in assignment.parts):
            return None, None
        header, rows = self._open(assignment, "peers")
        senders, width = torch.tensor(header["senders"], dtype=torch.int64), int(header["width"])
        if set(one.receives) - set(senders.tolist()):
            raise WireError("an exchange lacks some of the trees that a client should receive")

        def placed(leaf: Tensor) -> Tensor:
            return torch.zeros((width, *leaf.shape[1:]), dtype=leaf.dtype).index_copy_(0, senders, leaf)

        trees = {group: tree.map_leaves(placed, leaves) for group, leaves in rows.items()}
        graph = torch.zeros((1, width), dtype=torch.bool)
        graph[0, list(one.receives)] = True
        return trees, graph

    def _open(self, assignment: Assignment, role: str) -> tuple[dict[str, Any], Groups]:
        (part,) = (part for part in assignment.parts if part.role == role)
        if part.sha256 not in self._read:
            current = {one.sha256 for one in assignment.parts}
            self._read = {sha: found for sha, found in self._read.items() if sha in current}
            small = self._known[part.sha256]
            header, leaves = read_parcel(small) if small is not None else load_parcel(self.folder / part.sha256)
            self._read[part.sha256] = header, unflatten(leaves)
        return self._read[part.sha256]

    def _store(self, sha256: str, size: int, pieces: ReplyReader) -> None:
        if size > SMALL:
            pieces.into(self.folder / sha256, size, sha256)
            self._known[sha256] = None
            return
        data = pieces.take(size)
        if hashlib.sha256(data).hexdigest() != sha256:
            raise Unreachable("The coordinator's tensors were damaged on the way.")
        self._known[sha256] = data

    def _forget(self, needed: set[str]) -> None:
        for sha in [sha for sha in self._known if sha not in needed][: max(len(self._known) - MOST, 0)]:
            del self._known[sha]
            (self.folder / sha).unlink(missing_ok=True)
