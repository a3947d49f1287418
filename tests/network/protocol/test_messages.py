"""Messages have exactly their fields."""

from __future__ import annotations

import json

from tests.network.conftest import HELLO, World, code


def test_a_message_with_unknown_fields_is_rejected(world: World) -> None:
    agent = world.speaker()
    body = json.dumps({**HELLO.model_dump(mode="json"), "extra": 1}).encode()
    reply = agent.send("POST", "/v1/hello", body)
    assert (reply.status_code, code(reply)) == (422, "malformed")
