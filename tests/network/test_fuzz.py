"""A little of `benchmarks/network_fuzz.py`: nothing that is sent is answered with a 500 or taken for what it is not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.network.conftest import HELLO, World
from tests.network.fuzzing import CALM, fuzz_answers

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def test_no_answer_is_accepted_that_is_not_one(world: World) -> None:
    agent = world.speaker()
    agent.hello()
    seen = fuzz_answers(world, agent, 300)
    assert {"accepted", "malformed", "keys", "shape"} <= seen.keys()


@pytest.mark.parametrize("path", ["/v1/hello", "/v1/heartbeat", "/v1/failures", "/v1/answers", "/v1/enrol"])
def test_no_signed_nonsense_is_answered_with_a_500(world: World, path: str) -> None:
    agent = world.speaker()
    agent.hello()
    right = {"/v1/hello": HELLO.model_dump(mode="json"), "/v1/failures": {"kind": "error", "message": "m"}}

    @settings(max_examples=40, **CALM)
    @given(st.data())
    def one(data: Any) -> None:
        message = dict(right.get(path, {}))
        for key in data.draw(st.lists(st.sampled_from([*message, "protocol", "ask", "doing"]), max_size=2)):
            message[key] = data.draw(JSON)
        text = data.draw(st.sampled_from([json.dumps(message), json.dumps(data.draw(JSON)), data.draw(st.text())]))
        reply = agent.send("POST", path, text.encode(errors="replace"))
        assert reply.status_code < 500, (text, reply.text)
        assert reply.status_code != 401 or path == "/v1/enrol"

    one()


@given(st.text(st.characters(codec="ascii", exclude_categories=("C",)), max_size=100))
@settings(max_examples=40, **CALM)
def test_no_query_is_answered_with_a_500(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    world = World(tmp_path_factory.mktemp("fuzz"))
    agent = world.speaker()
    agent.hello()
    world.pool.finished = "so that polls do not wait"
    for path in (f"/v1/work?have={text}", f"/v1/work?pack={text}", f"/v1/tensors/{text}", f"/v1/{text}"):
        assert agent.world.client.get(path).status_code < 500
    world.client.close()
    world.ledger.close()
