"""The payload of a Flower message: a JSON header and bodies of bytes. Nothing is pickled, and torch is not needed.

Every body is a separate Array, because Flower stores arrays by their hash: a body for many nodes is sent to the
SuperLink once. Between a ClientApp and its worker, a payload goes through a local socket.
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
KIND = "fedloom.parcel"  # the type that our arrays have in Flower
MAX_HEADER = 64 << 20  # bytes


class InvalidPayload(FedloomError):
    """A message that fedloom did not write."""


@dataclass(frozen=True)
class Payload:
    """A header that fits into JSON, and bytes by name."""

    header: Mapping[str, Any]
    bodies: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return len(json.dumps(self.header)) + sum(len(body) for body in self.bodies.values())

    def to_record(self) -> RecordDict:
        """Return the content of a Flower message."""
        arrays = {name: Array("uint8", (len(body),), KIND, body) for name, body in self.bodies.items()}
        return RecordDict({HEADER: ConfigRecord({"json": json.dumps(self.header)}), BODIES: ArrayRecord(arrays)})

    @staticmethod
    def from_record(content: RecordDict) -> Payload:
        """Read the content of a Flower message."""
        try:
            header = json.loads(str(content.config_records[HEADER]["json"]))
            arrays = content.array_records[BODIES]
            if not isinstance(header, dict) or any(array.stype != KIND for array in arrays.values()):
                raise InvalidPayload("The message does not have the form of fedloom's messages.")
            return Payload(header, {name: array.data for name, array in arrays.items()})
        except (KeyError, ValueError, TypeError, RecursionError):
            raise InvalidPayload(
                "The message is not one of fedloom's. Did `fedloom flower app` write the app?"
            ) from None

    def send(self, to: Connection) -> None:
        """Send the payload through a local socket, as bytes."""
        to.send_bytes(json.dumps([self.header, list(self.bodies)]).encode())
        for body in self.bodies.values():
            to.send_bytes(body)

    @staticmethod
    def receive(source: Connection) -> Payload:
        header, names = json.loads(source.recv_bytes(MAX_HEADER))
        return Payload(header, {str(name): source.recv_bytes() for name in names})
