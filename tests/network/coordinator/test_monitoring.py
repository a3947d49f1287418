"""The coordinator's metrics: numbers without names, for those who have the token for them."""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from fedloom.network.agent.connection import Connection
from fedloom.network.coordinator.http_api import make_app
from fedloom.network.coordinator.serve import HttpsServer
from fedloom.network.protocol.messages import Heartbeat
from tests.network.conftest import EXPERIMENT, HEARTBEAT, Federation, Requests, World, code, wait_for

SAMPLE = r'(fedloom_[a-z_]+(?:\{[a-z]+="[^"\n]*"(?:,[a-z]+="[^"\n]*")*\})?) (\d+(?:\.\d+)?)'


def numbers(text: str) -> dict[str, float]:
    """Every sample of a page, whose form is checked: each family has its meaning and its type before its samples."""
    found: dict[str, float] = {}
    family = ""
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# HELP "):
            family = line.split()[2]
        elif line.startswith("# TYPE "):
            assert re.fullmatch(rf"# TYPE {family} (counter|gauge)", line)
            assert family.endswith("_total") == line.endswith("counter")
        else:
            sample = re.fullmatch(SAMPLE, line)
            assert sample is not None, line
            assert sample[1].partition("{")[0] == family
            assert sample[1] not in found
            found[sample[1]] = float(sample[2])
    return found


def read(world: World) -> dict[str, float]:
    reply = world.client.get("/metrics", headers={"authorization": f"Bearer {world.operator.digest}"})
    assert reply.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return numbers(reply.text)


def test_metrics_need_their_own_token_which_shows_no_names(world: World) -> None:
    world.speaker("kerry").hello()
    for headers in ({}, {"authorization": "Bearer 00"}, {"authorization": "Bearer ü".encode()}):
        reply = world.client.get("/metrics", headers=headers)
        assert (reply.status_code, code(reply)) == (401, "token")
    headers = {"authorization": f"Bearer {world.operator.digest}"}
    reply = world.client.get("/metrics", headers=headers)
    assert reply.status_code == 200
    assert "kerry" not in reply.text
    assert code(world.client.get("/v1/status", headers=headers)) == "token"


def test_without_an_operator_nobody_reads_metrics(world: World) -> None:
    client = Requests(make_app(world.pool))
    for headers in ({}, {"authorization": "Bearer "}):
        assert client.get("/metrics", headers=headers).status_code == 401
    client.close()


def test_answers_are_counted_by_verdict_and_agents_by_state(world: World) -> None:
    agent, other = world.speaker("kerry"), world.speaker("clare")
    agent.hello()
    before = read(world)
    assert before["fedloom_call_seconds"] == before["fedloom_awaited_clients"] == 0
    call = world.open_call(agent, other)
    call.opened -= 5
    body = agent.answer().whole
    agent.send("POST", "/v1/answers", body)
    other.hello()
    bad = other.answer(client=1, scale=float("nan")).whole
    other.send("POST", "/v1/answers", bad)
    found = read(world)
    assert found['fedloom_agents{state="ready"}'] == 2
    assert found['fedloom_answers_total{verdict="accepted"}'] == 1
    assert found['fedloom_answers_total{verdict="not-finite"}'] == 1
    assert found["fedloom_awaited_clients"] == 0
    assert 5 <= found["fedloom_call_seconds"] < 60
    assert found['fedloom_requests_total{path="/v1/answers",status="200"}'] == 2
    assert found["fedloom_received_bytes_total"] - before["fedloom_received_bytes_total"] == len(body) + len(bad)
    assert found["fedloom_sent_bytes_total"] > before["fedloom_sent_bytes_total"]
    assert found["fedloom_ledger_bytes"] > before["fedloom_ledger_bytes"]


def test_rejected_requests_are_counted_by_code_and_unknown_paths_together(world: World) -> None:
    agent = world.speaker()
    agent.send("POST", "/v1/heartbeat", HEARTBEAT, signs=b"another body")
    world.client.get("/v1/plan")
    for path in ("/a", "/b"):
        assert world.client.get(path).status_code == 404
    found = read(world)
    assert found['fedloom_rejections_total{code="body"}'] == 1
    assert found['fedloom_rejections_total{code="unknown"}'] == 1
    assert found['fedloom_requests_total{path="/v1/plan",status="401"}'] == 1
    assert found['fedloom_requests_total{path="other",status="404"}'] == 2


def test_the_last_attempt_of_a_round_counts(world: World) -> None:
    world.ledger.begin("fedavg-1", 1, 1, 4)  # its process was killed
    world.ledger.begin("fedavg-1", 1, 2, 4)
    world.ledger.end("fedavg-1", 1, 2, 4, "accepted")
    world.ledger.begin("fedavg-1", 2, 2, 4)
    world.ledger.end("fedavg-1", 2, 2, 1, "abandoned")
    world.ledger.begin("fedavg-1", 3, 2, 4)
    found = read(world)
    statuses = ("accepted", "abandoned", "running")
    assert [found[f'fedloom_rounds{{status="{status}"}}'] for status in statuses] == [1, 1, 1]


def test_open_connections_are_counted_for_agents_and_strangers(world: World) -> None:
    agent, headers = world.speaker(), {"authorization": f"Bearer {world.operator.digest}"}
    with HttpsServer(world.pool, "127.0.0.1", 0, operator=world.operator.digest) as server:
        url = f"http://127.0.0.1:{server.number}"
        with socket.create_connection(("127.0.0.1", server.number)), httpx.Client(base_url=url) as reader:
            connection = Connection(url, agent.signer, True)
            connection.post("/v1/heartbeat", Heartbeat())
            wait_for(lambda: len(server.server.connections.strangers) == 1)
            found = numbers(reader.get("/metrics", headers=headers).text)
            assert found['fedloom_connections{of="agent"}'] == 1
            assert found['fedloom_connections{of="stranger"}'] == 2  # the reader is one of them
            connection.close()
            wait_for(lambda: not server.server.connections.counts()["agent"])
            found = numbers(reader.get("/metrics", headers=headers).text)
            assert (found['fedloom_connections{of="agent"}'], found["fedloom_connections_ended_total"]) == (0, 0)


def test_a_real_coordinator_serves_metrics_as_prometheus_reads_them(federation: Callable[..., Federation]) -> None:
    world = federation({**EXPERIMENT, "rounds": 1})
    world.serve()
    world.tokens()
    network = world.out / "network"
    # what Prometheus is given: the authority's certificate, and the token's file as it is
    trusted = ssl.create_default_context(cafile=str(network / "ca.pem"))
    token = (network / "metrics.token").read_text().strip()

    def page() -> Any:
        try:
            return httpx.get(f"{world.url}/metrics", headers={"authorization": f"Bearer {token}"}, verify=trusted)
        except httpx.TransportError:
            return None

    found = numbers(wait_for(page).text)
    assert found['fedloom_rounds{status="accepted"}'] == 0
    with pytest.raises(httpx.HTTPStatusError):
        httpx.get(f"{world.url}/metrics", verify=trusted).raise_for_status()
