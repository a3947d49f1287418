"""What travels inside a Flower message: a JSON header and bodies of bytes. Nothing is pickled, and torch is not needed.

Every body is an Array of its own, because Flower stores arrays by their hash: what many nodes are sent is sent once to
the SuperLink. Between a ClientApp and the worker beside it, a letter goes through a local socket.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedloom.errors import FedloomError

HEADER, BODIES = "fedloom", "bodies"
KIND = "fedloom.parcel"  # how Flower's arrays say what their bytes are
MOST = 64 << 20  # bytes of a header


class NoLetter(FedloomError):
    """A message that is not from fedloom, or not for it."""


@dataclass(frozen=True)
class Letter:
    """A header that JSON can hold, and bytes by name."""

    header: Mapping[str, Any]
    bodies: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return len(json.dumps(self.header)) + sum(len(body) for body in self.bodies.values())

    def content(self) -> RecordDict:
        """As the content of a Flower message."""
        arrays = {name: Array("uint8", (len(body),), KIND, body) for name, body in self.bodies.items()}
        return RecordDict({HEADER: ConfigRecord({"json": json.dumps(self.header)}), BODIES: ArrayRecord(arrays)})

    @staticmethod
    def read(content: RecordDict) -> Letter:
        try:
            header = json.loads(str(content.config_records[HEADER]["json"]))
            arrays = content.array_records[BODIES]
            if not isinstance(header, dict) or any(array.stype != KIND for array in arrays.values()):
                raise NoLetter("The message does not hold what fedloom sends.")
            return Letter(header, {name: array.data for name, array in arrays.items()})
        except (KeyError, ValueError, TypeError, RecursionError):
            raise NoLetter("The message is not one of fedloom's. Did `fedloom flower app` write the app?") from None

    def send(self, to: Connection) -> None:
        """Through a local socket, as bytes."""
        to.send_bytes(json.dumps([self.header, list(self.bodies)]).encode())
        for body in self.bodies.values():
            to.send_bytes(body)

    @staticmethod
    def receive(source: Connection) -> Letter:
        header, names = json.loads(source.recv_bytes(MOST))
        return Letter(header, {str(name): source.recv_bytes() for name in names})
