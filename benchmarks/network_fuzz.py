"""Fuzzing of every endpoint: schemathesis against the OpenAPI description, signed, and hypothesis on answers.

    pip install schemathesis
    PYTHONPATH=. python benchmarks/network_fuzz.py 10000

No request may be answered with a status of 500 or more, crash the coordinator, or be accepted as an answer.
"""

from __future__ import annotations

import collections
import hashlib
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import hypothesis
import requests
import schemathesis
from hypothesis import settings

from fedloom.network.coordinator.agent_pool import AgentPool
from fedloom.network.coordinator.ledger import Ledger
from fedloom.network.coordinator.serve import HttpsServer
from fedloom.network.protocol.signatures import Signer
from fedloom.network.protocol.token import Token
from tests.network.conftest import HELLO, World
from tests.network.fuzzing import CALM, fuzz_answers


class Signing(requests.auth.AuthBase):
    """Signs every request as an enrolled agent, so that requests reach the code behind the signature check."""

    def __init__(self, signer: Signer, session: str) -> None:
        self.signer = signer
        self.signer.session = session

    def __call__(self, request: Any) -> Any:
        body = request.body or b""
        body = body.encode() if isinstance(body, str) else bytes(body)
        parts = urlsplit(request.url)
        path = parts.path + (f"?{parts.query}" if parts.query else "")
        request.headers.update(self.signer.headers(request.method, path, hashlib.sha256(body).hexdigest()))
        return request


def endpoints(url: str, signing: Signing, cases: int) -> dict[str, dict[int, int]]:
    """Requests drawn from the description, for every endpoint."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    each = cases // sum(_varies(one) for one in operations) + 1
    return {f"{one.method.upper()} {one.path}": _endpoint(one, signing, each) for one in operations}


def _varies(operation: Any) -> bool:
    return bool(operation.body or operation.query or operation.path_parameters)


def _endpoint(operation: Any, signing: Signing, cases: int) -> dict[int, int]:
    seen: dict[int, int] = collections.Counter()
    wrong = operation.as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE)

    @settings(max_examples=cases, **CALM)
    @hypothesis.given(case=wrong | operation.as_strategy())
    def one(case: Any) -> None:
        reply = case.call(auth=signing, timeout=60)
        seen[reply.status_code] += 1
        assert reply.status_code < 500, reply.text

    one()
    return dict(seen)


def main() -> None:
    cases = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        ledger = Ledger(folder / "network")
        pool = AgentPool(ledger)
        pool.finished = "fuzzing"  # so that polls do not wait
        with HttpsServer(pool, "127.0.0.1", 0, None) as port:
            url = f"http://127.0.0.1:{port.number}"
            signer = Signer(folder / "agent.key")
            token = Token.new("")
            ledger.invite(token.digest)
            signer.agent = ledger.enrol(token.digest, "fuzzer", signer.public)
            pool.admit(pool.mark_seen(signer.agent, "fuzzer"), HELLO)
            session = requests.get(f"{url}/v1/plan", timeout=10).json()["session"]
            found = endpoints(url, Signing(signer, session), cases // 2)
        ledger.close()
    with tempfile.TemporaryDirectory() as temporary:
        world = World(Path(temporary))
        agent = world.speaker()
        agent.hello(HELLO)
        damaged = fuzz_answers(world, agent, cases - sum(sum(seen.values()) for seen in found.values()))
        world.client.close()
        world.ledger.close()
    total = sum(sum(seen.values()) for seen in found.values()) + sum(damaged.values())
    print(
        json.dumps(
            {"cases": total, "endpoints": found, "bodies": damaged, "seconds": round(time.monotonic() - began)},
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
