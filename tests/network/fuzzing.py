"""Answers that hypothesis thinks of, from bytes that were damaged to parcels that are nearly right.

`python -m tests.network.fuzzing` sends 50,000 of them and prints how they were judged, and the memory in MB.
"""

from __future__ import annotations

import collections
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import hypothesis
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from fedloom.network.protocol.messages import ClientAnswer
from fedloom.network.protocol.tensors import KINDS, Parcel, compressed
from tests.network.conftest import FORM, Speaker, World
from tests.network.hostile_bodies import described, empty_tensors, many_clients, memory, nested

CALM: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "phases": [Phase.generate],
    "database": None,
}
PATHS = ["0/update/model/w", "0/update/model/b", "0/weights/model"]
ODD_PATHS = [
    *PATHS,
    "0/update/model/",
    "0/update/",
    "0/public/score",
    "1/update/model/w",
    "0/scores/test/auc",
    "w",
    "//",
]
NUMBERS = [0.0, 1.0, -1.0, 1e-45, 3e38, float("nan"), float("inf"), -float("inf"), 1e9, 2e9]
HEADERS = [
    {"ask": "ask", "results": [{"client": 0}]},
    {"ask": "ask", "results": [{"client": 0, "ticket": [1, 1, 0]}]},
    {"ask": "ask", "results": [{"client": 0, "measured": {"test": {"count": 1, "sums": {"loss": 1e308}}}}]},
    {"ask": "ask", "results": [{"client": 0, "history": [{"loss": None}]}]},
    {"ask": "ask", "results": [{"client": 0}, {"client": 1}]},
    {"ask": "ask", "results": [{"client": 2**53}]},
    {"ask": "other", "results": [{"client": 0}]},
    {"ask": "ask", "results": []},
    {"protocol": 2, "ask": "ask", "results": [{"client": 0}]},
    {},
]


@st.composite
def tensors(draw: Any, path: str) -> torch.Tensor:
    """Often what belongs to a path, sometimes anything."""
    right = {"w": ((1, 3), torch.float32), "b": ((1, 2), torch.float64), "model": ((1,), torch.float32)}
    shape, kind = right.get(path.rpartition("/")[2], ((1, 3), torch.float32))
    if draw(st.integers(0, 3)) == 0:
        shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    if draw(st.integers(0, 3)) == 0:
        kind = draw(st.sampled_from(list(KINDS)))
    values = torch.ones(shape, dtype=torch.float64)
    if values.numel() and draw(st.booleans()):
        values.reshape(-1)[draw(st.integers(0, values.numel() - 1))] = draw(st.sampled_from(NUMBERS))
    if not kind.is_floating_point:
        values = values.nan_to_num(0.0, 1.0, 0.0).clamp(0, 1)
    return values.to(kind)


@st.composite
def parcels(draw: Any) -> bytes:
    """Parcels that the library made, with odd headers and tensors."""
    paths = PATHS if draw(st.booleans()) else draw(st.lists(st.sampled_from(ODD_PATHS), unique=True))
    header = draw(st.sampled_from(HEADERS)) if draw(st.integers(0, 2)) == 0 else HEADERS[0]
    return Parcel(header, {path: draw(tensors(path)) for path in paths}).whole


@st.composite
def damaged(draw: Any, good: bytes) -> bytes:
    """A right answer of which a piece was replaced."""
    begin = draw(st.integers(0, len(good)))
    end = draw(st.integers(begin, len(good)))
    return good[:begin] + draw(st.binary(max_size=64)) + good[end:]


HOSTILE = [many_clients(2_000, 600), many_clients(3, 9), empty_tensors(1_200), nested(3_000), nested(300)]


@st.composite
def descriptions(draw: Any) -> bytes:
    """Descriptions of tensors without values, with messages of any form, and some that are too long."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.sampled_from(HOSTILE))
    values = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
    field = st.sampled_from(["ask", "results", "client", "history", "measured", "ticket", "count", "sums", "x"])
    inner = st.recursive(values, lambda one: st.lists(one, max_size=3) | st.dictionaries(field, one, max_size=3))
    result = {"client": 0, draw(field): draw(inner)}
    header = draw(inner | st.just({"ask": "ask", "results": [result]}) | st.just({"ask": "ask", "results": result}))
    return described(header, draw(st.lists(st.sampled_from([*ODD_PATHS, "", "0", "0/", "é/\x00"]), max_size=4)))


def fuzz_answers(world: World, agent: Speaker, cases: int) -> dict[str, int]:
    """Send signed answers, also compressed ones; how they were judged. Whatever was accepted must be right."""
    call = world.open_call(agent, seconds=3600.0)
    seen: dict[str, int] = collections.Counter()

    @settings(max_examples=cases, **CALM)
    @hypothesis.given(
        body=damaged(agent.answer().whole) | parcels() | descriptions() | st.binary(max_size=200),
        how=st.sampled_from(range(9)),
    )
    def one(body: bytes, how: int) -> None:
        sent, headers = body, {}
        if how > 5:
            sent, headers = b"".join(compressed([body])), {"content-encoding": "zstd"}
            sent = sent[: len(sent) // 2] if how == 8 else sent
        reply = agent.send("POST", "/v1/answers", sent, signs=body, **headers)
        assert reply.status_code < 500, reply.text
        told = reply.json()
        outcome = told["code"] if "code" in told else told["results"][0].get("code", told["results"][0]["status"])
        seen[outcome] += 1
        if outcome == "accepted":
            assert_right(call.answers[0])
        # a rejected client has no second try in its round: open the next
        call.waiting[0] = agent.signer.agent
        call.answers.clear()
        call.failures.clear()

    one()
    return dict(seen)


def assert_right(answer: ClientAnswer) -> None:
    """Names, shapes, kinds, finite numbers and a weight that counts."""
    update = answer.update
    found = {g: {n: (tuple(v.shape[1:]), v.dtype) for n, v in t.items()} for g, t in update.groups.items()}
    assert found == FORM.groups
    assert all(bool(leaf.isfinite().all()) for leaves in update.groups.values() for leaf in leaves.values())
    assert 0 < float(update.weights("model")) <= 1e9
    assert (update.public, answer.ticket, answer.measured) == ({}, None, {})


def main(cases: int) -> None:
    began, sizes, seen = time.monotonic(), [], collections.Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder))
        agent = world.speaker()
        agent.hello()
        for _ in range(5):
            seen.update(fuzz_answers(world, agent, cases // 5))
            sizes.append(memory("VmRSS") >> 10)
            print(sum(seen.values()), "cases", sizes[-1], "MB", round(time.monotonic() - began), "s", flush=True)
        world.client.close()
        world.ledger.close()
    print(json.dumps({"cases": sum(seen.values()), "judged": seen, "megabytes": sizes}))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 50_000)
