"""Messages have exactly their fields, and formats of data can be compared."""

from __future__ import annotations

import json

from fedloom.network.protocol.messages import DataFormat
from tests.conftest import federation as some_clients
from tests.network.conftest import HELLO, World, code


def test_a_message_with_unknown_fields_is_rejected(world: World) -> None:
    agent = world.speaker()
    body = json.dumps({**HELLO.model_dump(mode="json"), "extra": 1}).encode()
    reply = agent.send("POST", "/v1/hello", body)
    assert (reply.status_code, code(reply)) == (422, "malformed")


def test_a_format_goes_through_a_message_and_differences_are_named() -> None:
    ours = DataFormat.of(some_clients((4, 4)))
    assert DataFormat.model_validate(ours.message()) == ours
    assert ours.differences(ours) == ""
    theirs = DataFormat(features=ours.features, dtype="int64", classes=("a", "c"))
    mine = DataFormat(features=ours.features, dtype="float32", classes=("a", "b"))
    assert (
        mine.differences(theirs) == 'dtype: "int64" there, "float32" here; classes: ["a", "c"] there, ["a", "b"] here'
    )
