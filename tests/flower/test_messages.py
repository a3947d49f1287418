"""Payloads through Flower's records and through a socket."""

from __future__ import annotations

from multiprocessing.connection import Pipe

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedloom[flower]'")

from fedloom.flower.messages import InvalidPayload, Payload


def test_a_payload_is_the_same_after_either_way() -> None:
    payload = Payload({"a": [1, "é"]}, {"x": b"\0\1" * 1000, "y": b"z"})
    assert Payload.from_record(payload.to_record()) == payload
    here, there = Pipe()
    payload.send(here)
    assert Payload.receive(there) == payload


def test_a_message_of_somebody_else_is_refused() -> None:
    from flwr.app import ConfigRecord, RecordDict

    with pytest.raises(InvalidPayload, match="not one of fedloom's"):
        Payload.from_record(RecordDict({"config": ConfigRecord({"lr": 0.1})}))
