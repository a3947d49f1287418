"""Tensors that an agent received, in files named by their SHA-256: what it has, it is not sent again."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import torch
from torch import Tensor

from fedloom.network.agent.connection import Link, Unreachable
from fedloom.network.agent.reply_reader import Reader
from fedloom.network.protocol.messages import Ask, Asked
from fedloom.network.protocol.tensors import HEADER_LIMIT, WireError, open_parcel, read_parcel, unflatten
from fedloom.training.local import Groups

MOST = 6  # parcels that are kept
SMALL = 8 << 20  # bytes: up to this, a parcel is kept in memory


class Parts:
    """A small cache of parcels on the agent's disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for leftover in folder.iterdir():  # of a process before this one, which knew what they were
            if leftover.suffix != ".lasting":
                leftover.unlink()
        self._known: OrderedDict[str, None] = OrderedDict()
        self._read: dict[str, tuple[dict[str, Any], Groups]] = {}
        self._small: dict[str, bytes] = {}

    def next_ask(self, link: Link) -> Ask | str:
        """Wait for work: an ask whose tensors are all here, or a word when the run is over (empty: ask again)."""
        wanted = {"have": ",".join(self._known), "pack": "1" if link.pack else ""}
        query = "&".join(f"{key}={value}" for key, value in wanted.items() if value)
        with link.stream(f"/v1/work?{query}" if query else "/v1/work") as response:
            if response.status_code == 204:
                return unquote(response.headers.get("fedloom-finished", ""))
            pieces = Reader(response)
            try:
                ask = self._ask(pieces)
            except (ValueError, KeyError, WireError) as error:
                raise Unreachable(f"The coordinator's message cannot be understood ({type(error).__name__}).") from None
        self._forget({part.sha256 for part in ask.parts})
        return ask

    def _ask(self, pieces: Reader) -> Ask:
        size = int.from_bytes(pieces.take(4), "little")
        if size > HEADER_LIMIT:
            raise WireError("the ask's header is too long")
        header = json.loads(pieces.take(size))
        missing = set(header.pop("missing"))
        ask = Ask.model_validate(header)
        for part in ask.parts:
            if part.sha256 in missing:
                self._store(part.sha256, part.bytes, pieces)
            if part.sha256 not in self._known:
                raise WireError("the coordinator did not send all tensors of an ask")
            self._known.move_to_end(part.sha256)
        return ask

    def fetch(self, link: Link, sha256: str) -> Path:
        """Tensors that last for a run, as a file."""
        path = self.folder / f"{sha256}.lasting"
        if not path.is_file() or _digest(path) != sha256:
            with link.stream(f"/v1/tensors/{sha256}") as response:
                Reader(response).into(path, int(response.headers["content-length"]), sha256)
        return path

    def groups(self, ask: Ask, role: str) -> Groups:
        """The tensors of an ask with this role."""
        return self._groups(ask, role)[1]

    def private(self, ask: Ask, one: Asked) -> Groups | None:
        """The message for one client, as a stack of one."""
        if all(part.role != "private" for part in ask.parts):
            return None
        rows = self.groups(ask, "private")
        if any(one.row >= len(leaf) for leaves in rows.values() for leaf in leaves.values()):
            raise WireError("an ask lacks the message for one of its clients")
        return {group: {name: leaf[one.row][None] for name, leaf in t.items()} for group, t in rows.items()}

    def peers(self, ask: Ask, one: Asked) -> tuple[Groups | None, Tensor | None]:
        """What a client's peers sent, in their places in the cohort, and which of them it hears."""
        if all(part.role != "peers" for part in ask.parts):
            return None, None
        header, rows = self._groups(ask, "peers")
        senders, width = torch.tensor(header["senders"], dtype=torch.int64), int(header["width"])
        if set(one.receives) - set(senders.tolist()):
            raise WireError("an exchange lacks some of the trees that a client should hear")
        trees: Groups = {}
        for group, leaves in rows.items():
            trees[group] = {}
            for name, leaf in leaves.items():
                placed = torch.zeros((width, *leaf.shape[1:]), dtype=leaf.dtype)
                placed[senders] = leaf
                trees[group][name] = placed
        graph = torch.zeros((1, width), dtype=torch.bool)
        graph[0, list(one.receives)] = True
        return trees, graph

    def _groups(self, ask: Ask, role: str) -> tuple[dict[str, Any], Groups]:
        (part,) = (part for part in ask.parts if part.role == role)
        if part.sha256 not in self._read:
            current = {one.sha256 for one in ask.parts}
            self._read = {sha: found for sha, found in self._read.items() if sha in current}
            if part.sha256 in self._small:
                header, kept = read_parcel(self._small[part.sha256])
            else:
                header, leaves = open_parcel(self.folder / part.sha256)
                # a copy of its own: mapped memory is aligned otherwise, which may change the bits of later arithmetic
                kept = {name: leaf.clone() for name, leaf in leaves.items()}
            self._read[part.sha256] = header, unflatten(kept)
        return self._read[part.sha256]

    def _store(self, sha256: str, size: int, pieces: Reader) -> None:
        if size <= SMALL:
            data = pieces.take(size)
            if hashlib.sha256(data).hexdigest() != sha256:
                raise Unreachable("The coordinator's tensors were damaged on their way.")
            self._small[sha256] = data
        else:
            pieces.into(self.folder / sha256, size, sha256)
        self._known[sha256] = None

    def _forget(self, needed: set[str]) -> None:
        for sha in [sha for sha in self._known if sha not in needed][: max(len(self._known) - MOST, 0)]:
            del self._known[sha]
            self._small.pop(sha, None)
            (self.folder / sha).unlink(missing_ok=True)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
