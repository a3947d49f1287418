"""Who may speak, what an answer must be, and what the coordinator says to one that is not."""

from __future__ import annotations

import json
import re
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom.algorithm import Update
from fedloom.errors import InputError
from fedloom.network.coordinator.update_checks import Limits, Rejected, check_measured
from fedloom.network.protocol.compression import packed
from fedloom.network.protocol.identity import NONCE, TIME
from fedloom.network.protocol.messages import Beat
from fedloom.network.protocol.tensors import Parcel
from fedloom.training.evaluation import Measured
from tests.network.conftest import HELLO, World

BEAT = Beat().model_dump_json().encode()


def code(reply: Any) -> str:
    return str(reply.json()["code"])


def test_a_signed_request_is_heard_and_its_twin_is_not(world: World) -> None:
    agent = world.speaker()
    signed = agent.signer.headers("GET", "/v1/plan", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855")
    assert world.client.get("/v1/plan", headers=signed).status_code == 200
    again = world.client.get("/v1/plan", headers=signed)
    assert (again.status_code, code(again)) == (401, "replayed")
    assert any("made before" in line for line in world.said)


@pytest.mark.parametrize("path", ["/v1/plan", "/v1/work", "/v1/tensors/ab"])
def test_a_request_without_a_signature_is_refused(world: World, path: str) -> None:
    reply = world.client.get(path)
    assert (reply.status_code, code(reply)) == (401, "unknown")
    reply = world.client.get(path, headers={"fedloom-agent": world.speaker().signer.agent})
    assert (reply.status_code, code(reply)) == (401, "unsigned")


def test_a_signature_belongs_to_method_path_body_time_and_nonce(world: World) -> None:
    agent = world.speaker()
    assert agent.send("POST", "/v1/heartbeat", BEAT).status_code == 200
    signed = agent.signer.headers("POST", "/v1/heartbeat", "00")
    for changed in ({TIME: f"{time.time() + 1:.3f}"}, {NONCE: "other"}, {"fedloom-body": "01"}):
        reply = world.client.post("/v1/heartbeat", content=BEAT, headers={**signed, **changed})
        assert (reply.status_code, code(reply)) == (401, "signature")
    assert code(world.client.post("/v1/failures", content=BEAT, headers=signed)) == "signature"
    assert code(world.client.post("/v1/heartbeat", content=BEAT, headers=signed)) == "body"


def test_a_request_without_a_nonce_is_refused_even_if_it_is_signed(world: World) -> None:
    from fedloom.network.protocol.identity import SIGNATURE, _signed

    agent = world.speaker()
    signed = agent.signer.headers("GET", "/v1/plan", "")
    del signed[NONCE]
    text = _signed("GET", "/v1/plan", "", signed[TIME], "", signed["fedloom-session"])
    signed[SIGNATURE] = agent.signer._key.sign(text).hex()
    reply = world.client.get("/v1/plan", headers=signed)
    assert (reply.status_code, code(reply)) == (401, "unsigned")


def test_what_agents_say_cannot_move_the_cursor_on_the_coordinators_console(world: World) -> None:
    agent = world.speaker()
    agent.hello()
    failure = {"kind": "error", "message": "\x1b[2Jgone\nsecond line"}
    assert agent.send("POST", "/v1/failures", json.dumps(failure).encode()).status_code == 200
    assert world.said[-1] == "kerry failed: ?[2Jgone\nsecond line"


def test_a_header_of_the_signature_counts_only_if_it_is_there_once(world: World) -> None:
    agent = world.speaker()
    other = Beat(doing="forged").model_dump_json().encode()
    signed = agent.signer.headers("POST", "/v1/heartbeat", sha256(BEAT).hexdigest())
    doubled = [("fedloom-body", sha256(other).hexdigest()), *signed.items()]
    reply = world.client.post("/v1/heartbeat", content=other, headers=doubled)
    assert (reply.status_code, code(reply)) == (401, "unsigned")


def test_strangers_cannot_fill_the_disk_with_refusals(world: World) -> None:
    for _ in range(300):
        world.client.get("/v1/plan")
    assert len(world.said) == 101
    assert any("further ones are not shown" in line for line in world.said)
    world.hub.log("agent", "somebody came")  # everything else is still told
    assert world.said[-1] == "somebody came"


def test_somebody_who_is_not_known_may_not_say_much(world: World) -> None:
    reply = world.client.post("/v1/enrol", content=b'{"name": "' + b"x" * 100_000 + b'"}')
    assert (reply.status_code, code(reply)) == (413, "too-large")
    reply = world.client.post("/v1/enrol", content=b"no JSON")
    assert (reply.status_code, code(reply)) == (422, "malformed")


def test_a_clock_that_is_an_hour_off_is_told_the_time_and_an_old_session_the_new_one(world: World) -> None:
    agent = world.speaker()
    agent.signer.offset = 3600.0
    reply = agent.send("GET", "/v1/plan")
    assert (reply.status_code, code(reply)) == (401, "clock")
    assert abs(reply.json()["time"] - time.time()) < 5
    agent.signer.offset, agent.signer.session = 0.0, "before the restart"
    reply = agent.send("GET", "/v1/plan")
    assert (code(reply), reply.json()["session"]) == ("session", world.verifier.session)


def test_a_revoked_agent_is_refused_at_once(world: World) -> None:
    agent = world.speaker()
    assert agent.send("GET", "/v1/plan").status_code == 200
    world.ledger.revoke("kerry")
    reply = agent.send("GET", "/v1/plan")
    assert (reply.status_code, code(reply)) == (401, "revoked")


def test_a_token_enrols_one_agent_which_may_ask_again(world: World) -> None:
    from fedloom.network.protocol.identity import Signer, Token

    token = Token.new("")
    world.ledger.invite(token.digest)
    keys = [Signer(world.folder / name).public for name in ("a", "b")]

    def enrol(key: str, name: str = "kerry", secret: str = token.secret.hex()) -> Any:
        return world.client.post("/v1/enrol", json={"secret": secret, "name": name, "public_key": key})

    first = enrol(keys[0])
    assert first.status_code == 200
    assert enrol(keys[0]).json()["agent"] == first.json()["agent"]
    assert "used by another agent" in enrol(keys[1]).json()["message"]
    assert "unknown token" in enrol(keys[1], secret="00" * 16).json()["message"]
    assert enrol("not hex").status_code == 401
    other = Token.new("")
    world.ledger.invite(other.digest)
    assert "another agent with the name" in enrol(keys[1], secret=other.secret.hex()).json()["message"]


def test_an_answer_is_accepted_once(world: World) -> None:
    agent = world.speaker()
    agent.hello()
    call = world.open_call(agent)
    body = agent.answer().whole
    for _ in range(2):  # the same body again is the reply that was lost, not a second answer
        reply = agent.send("POST", "/v1/answers", body)
        assert reply.json()["results"] == [{"client": "0", "status": "accepted"}]
    assert world.hub.accepted == 1
    other = agent.send("POST", "/v1/answers", agent.answer(scale=2.0).whole).json()["results"][0]
    assert (other["status"], other["code"]) == ("rejected", "duplicate")
    world.hub.wait(call, 1)
    assert float(call.answers[0].update.groups["model"]["w"][0, 0]) == 1.0
    late = agent.send("POST", "/v1/answers", body).json()["results"][0]
    assert late["code"] == "late"


@pytest.mark.parametrize("path", ["/v1/answers", "/v1/heartbeat", "/v1/enrol"])
def test_an_agent_that_is_cut_off_while_it_speaks_leaves_nothing_behind(world: World, path: str) -> None:
    agent = world.speaker()
    agent.hello()
    world.open_call(agent)
    body = agent.answer().whole if path == "/v1/answers" else BEAT
    world.client.hang_up(path, agent.signer.headers("POST", path, sha256(body).hexdigest()), body[:-1])
    assert world.hub.accepted == 0
    assert not list(world.ledger.updates.glob("*.part"))


def update_with(**changes: Any) -> Update:
    groups = {"model": {"w": torch.ones(1, 3), "b": torch.ones(1, 2, dtype=torch.float64), **changes.pop("leaves", {})}}
    return Update(groups, {"model": torch.tensor([1.0])} | changes.pop("weights", {}), **changes)


@pytest.mark.parametrize(
    ("update", "reason"),
    [
        (update_with(leaves={"w": torch.tensor([[1.0, float("nan"), 0.0]])}), "not-finite"),
        (update_with(leaves={"w": torch.tensor([[1.0, float("inf"), 0.0]])}), "not-finite"),
        (update_with(leaves={"more": torch.ones(1, 1)}), "keys"),
        (Update({"model": {"w": torch.ones(1, 3)}}, {"model": torch.ones(1)}), "keys"),
        (Update({"other": {"w": torch.ones(1, 3)}}, {"other": torch.ones(1)}), "keys"),
        (update_with(leaves={"w": torch.ones(1, 4)}), "shape"),
        (update_with(leaves={"w": torch.ones(3)}), "shape"),
        (update_with(leaves={"w": torch.ones(2, 3)}), "shape"),
        (update_with(leaves={"w": torch.ones(1, 3, dtype=torch.float64)}), "dtype"),
        (update_with(leaves={"w": torch.ones(1, 3, dtype=torch.int64)}), "dtype"),
        (update_with(weights={"model": torch.tensor([0.0])}), "weight"),
        (update_with(weights={"model": torch.tensor([-1.0])}), "weight"),
        (update_with(weights={"model": torch.tensor([float("nan")])}), "weight"),
        (update_with(weights={"model": torch.tensor([1e10])}), "weight"),
        (update_with(weights={"model": torch.tensor([1.0, 1.0])}), "weight"),
        (update_with(leaves={"w": torch.full((1, 3), 1e6)}), "norm"),
        (update_with(public={"score": torch.ones(1)}), "keys"),
    ],
)
def test_a_bad_update_rejects_its_client_with_a_reason(world: World, update: Update, reason: str) -> None:
    agent, other = world.speaker(), world.speaker("clare")
    agent.hello()
    other.hello()
    call = world.open_call(agent, other, limits=Limits(norm_bound=100.0))
    (result,) = agent.send("POST", "/v1/answers", agent.answer(update=update).whole).json()["results"]
    assert (result["status"], result["code"]) == ("rejected", reason)
    assert call.failures[0].message.startswith(reason)
    assert 0 not in call.waiting
    assert any("kerry" in line and reason in line for line in world.said)
    # no second try, and the others are not disturbed
    (again,) = agent.send("POST", "/v1/answers", agent.answer().whole).json()["results"]
    assert again["code"] == "duplicate"
    assert other.send("POST", "/v1/answers", other.answer(client=1).whole).json()["results"][0]["status"] == "accepted"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "malformed"),
        (b"nonsense", "malformed"),
        (b"\xff" * 64, "malformed"),
        (Parcel({}, {}).whole, "malformed"),
        (Parcel({"ask": "ask", "results": []}).whole, "malformed"),
        (Parcel({"ask": "ask", "results": [{"client": 0}]}, {"1/update/model/w": torch.ones(1)}).whole, "malformed"),
        (Parcel({"ask": "ask", "results": [{"client": 0}, {"client": 0}]}).whole, "malformed"),
        (Parcel({"ask": "ask", "results": [{"client": -1}]}).whole, "malformed"),
        (Parcel({"ask": "ask", "results": [{"client": 0}]}, {"0/update/model/w": torch.ones(1)}).whole, "malformed"),
    ],
)
def test_a_body_that_is_no_answer_is_refused(world: World, body: bytes, reason: str) -> None:
    agent = world.speaker()
    agent.hello()
    call = world.open_call(agent)
    reply = agent.send("POST", "/v1/answers", body)
    assert (reply.status_code, code(reply)) == (422, reason)
    assert 0 in call.waiting
    assert not list(world.ledger.updates.iterdir())


def test_answers_of_other_agents_clients_and_of_other_attempts_are_refused(world: World) -> None:
    agent, other = world.speaker(), world.speaker("clare")
    agent.hello()
    other.hello()
    world.open_call(agent, other)
    (result,) = agent.send("POST", "/v1/answers", agent.answer(client=1).whole).json()["results"]
    assert result["code"] == "not-asked"
    (result,) = agent.send("POST", "/v1/answers", agent.answer(ask="another attempt").whole).json()["results"]
    assert result["code"] == "late"


def test_a_body_that_is_too_large_is_refused_before_it_is_read(world: World) -> None:
    agent = world.speaker()
    agent.hello()
    world.open_call(agent)
    world.hub.largest = 100
    reply = agent.send("POST", "/v1/answers", agent.answer().whole)
    assert (reply.status_code, code(reply)) == (413, "too-large")
    assert not list(world.ledger.updates.iterdir())


def test_a_deadline_closes_a_call_and_a_quorum_does_not_wait_for_the_lost(world: World) -> None:
    agent, other = world.speaker(), world.speaker("clare")
    agent.hello()
    other.hello()
    call = world.open_call(agent, other, seconds=0.2)
    world.hub.wait(call, 2)
    assert not call.open
    assert set(call.waiting) == {0, 1}
    call = world.open_call(agent, other, seconds=3600.0)
    agent.send("POST", "/v1/answers", agent.answer().whole)
    world.hub.connections[other.signer.agent].seen -= 1000.0
    world.hub.wait(call, 1)  # returns at once, an hour before the deadline
    assert set(call.answers) == {0}


def test_what_was_accepted_is_found_again_after_a_restart_if_it_is_whole(world: World) -> None:
    from fedloom.network.coordinator.ledger import Ledger

    agent, other = world.speaker(), world.speaker("clare")
    agent.hello()
    other.hello()
    world.open_call(agent, other)
    for client, one in enumerate((agent, other)):
        one.send("POST", "/v1/answers", one.answer(client=client).whole)
    again = Ledger(world.folder / "network")
    again.sweep()
    assert [update.client for update in again.accepted("fedavg-1", 1, 0, "digest")] == [0, 1]
    assert again.accepted("fedavg-1", 1, 0, "another question") == []
    damaged = again.updates / again.accepted("fedavg-1", 1, 0, "digest")[0].file
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert [update.client for update in again.accepted("fedavg-1", 1, 0, "digest")] == [1]
    again.forget("fedavg-1", 1)
    assert again.accepted("fedavg-1", 1, 0, "digest") == []
    assert not list(again.updates.iterdir())
    again.close()


def test_agents_must_agree_about_the_data(world: World) -> None:
    agent, other = world.speaker(), world.speaker("clare")
    agent.hello()
    different = HELLO.model_copy(update={"classes": ("a", "c")})
    reply = other.send("POST", "/v1/hello", different.model_dump_json().encode())
    assert (reply.status_code, code(reply)) == (409, "mismatch")
    assert "classes" in reply.json()["message"]
    with pytest.raises(InputError, match="features"):
        other.hello(HELLO.model_copy(update={"features": (5,)}))


def test_work_waits_for_a_hello_and_hands_out_what_is_not_answered(world: World) -> None:
    agent = world.speaker()
    reply = agent.send("GET", "/v1/work")
    assert (reply.status_code, code(reply)) == (409, "hello")
    agent.hello()
    world.open_call(agent, clients=2)
    for expected in ([0, 1], [1]):
        body = agent.send("GET", "/v1/work").content
        size = int.from_bytes(body[:4], "little")
        assert [one["client"] for one in json.loads(body[4 : 4 + size])["clients"]] == expected
        agent.send("POST", "/v1/answers", agent.answer(client=expected[0]).whole)
    world.hub.finished = "Done: nothing more."
    assert not world.hub.ready()[0].heard_the_end
    reply = agent.send("GET", "/v1/work")
    assert (reply.status_code, reply.headers["fedloom-finished"]) == (204, "Done%3A%20nothing%20more.")
    assert world.hub.ready()[0].heard_the_end


def test_an_agent_that_is_busy_hears_the_end_with_its_next_sign_of_life(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = world.speaker()
    agent.hello()
    assert agent.send("POST", "/v1/heartbeat", BEAT).json() == {"finished": ""}
    world.hub.finished = "Done."
    assert agent.send("POST", "/v1/heartbeat", BEAT).json() == {"finished": "Done."}
    monkeypatch.setattr(world.hub, "pause", lambda seconds: pytest.fail("waited, although everybody has heard"))
    world.hub.end("Done.")


def test_the_description_of_the_protocol_lists_every_path(world: World) -> None:
    described = world.client.get("/openapi.json").json()
    known = described["components"]["schemas"]
    for name in re.findall(r'"\$ref": "([^"]*)"', json.dumps(described)):
        assert name.startswith("#/components/schemas/")
        assert name.rpartition("/")[2] in known
    page = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
    for path, methods in described["paths"].items():
        for method in methods:
            assert f"{method.upper()} {path}" in page


def test_status_says_who_is_there_and_who_is_awaited_to_the_operator_alone(world: World) -> None:
    agent, other = world.speaker(), world.speaker("clare")
    agent.hello()
    world.hub.seen(other.signer.agent, "clare")
    world.open_call(agent)
    found = world.client.get("/v1/status", headers={"authorization": f"Bearer {world.operator.secret.hex()}"}).json()
    assert [(one["name"], one["state"], one["awaited"]) for one in found["agents"]] == [
        ("clare", "joining", False),
        ("kerry", "ready", True),
    ]
    assert found["awaited_clients"] == 1
    public = world.client.get("/v1/status")
    assert public.json()["agents"] == {"ready": 1, "joining": 1, "refused": 0, "gone": 0}
    assert "kerry" not in public.text
    for wrong in ("", "Bearer ", "Bearer 00", "nonsense", f"Bearer {world.operator}"):
        reply = world.client.get("/v1/status", headers={"authorization": wrong})
        assert (reply.status_code, code(reply)) == (401, "token")


@pytest.mark.parametrize(
    ("measured", "why"),
    [
        ({}, "says nothing about the split 'test'"),
        ({"test": Measured(3, {"loss": 1.0})}, "lacks some of the metrics"),
        ({"test": Measured(2, {"loss": 1.0, "accuracy": 1.0})}, "has 3 test examples, and measured 2"),
        ({"test": Measured(3, {"loss": 1.0, "accuracy": 1.0, "f1": 1.0})}, "metrics that nobody asked for"),
        ({"test": Measured(3, {"loss": 1.0, "accuracy": 1.0}, {}, torch.ones(3))}, "lacks scores"),
    ],
)
def test_measurements_must_be_those_that_were_asked_for(measured: dict[str, Measured], why: str) -> None:
    means, summaries = ("loss", "accuracy"), ("auroc",)
    with pytest.raises(Rejected, match=why):
        check_measured(measured, ("test",), {"test": 3}, means, summaries)
    hidden = Measured(3, {"loss": float("nan"), "accuracy": 1.0})  # a site need not tell everything
    scored = Measured(3, {"loss": 1.0, "accuracy": 1.0}, {"auroc": torch.ones(3)}, torch.ones(3))
    for fine in (hidden, scored):
        check_measured({"test": fine}, ("test",), {"test": 3}, means, summaries)
    check_measured({}, ("test",), {"test": 0}, means, summaries)


def test_answers_may_be_compressed(world: World) -> None:
    agent = world.speaker()
    agent.hello()
    call = world.open_call(agent)
    whole = agent.answer().whole
    reply = agent.send("POST", "/v1/answers", b"".join(packed([whole])), signs=whole, **{"content-encoding": "zstd"})
    assert reply.json()["results"][0]["status"] == "accepted"
    assert torch.equal(call.answers[0].update.groups["model"]["w"], torch.ones(1, 3))
    (kept,) = world.ledger.updates.iterdir()
    assert kept.read_bytes() == whole


@pytest.mark.parametrize(
    ("body", "encoding", "expected"),
    [
        (b"".join(packed([bytes(1 << 20)] * 200)), "zstd", (413, "too-large")),  # a few kilobytes, 200 MB unpacked
        (b"nonsense", "zstd", (422, "malformed")),
        (b"", "zstd", (422, "malformed")),
        (b"whatever", "gzip", (415, "encoding")),
        (b"whatever", "zstd, zstd", (415, "encoding")),
    ],
)
def test_a_bomb_and_nonsense_are_refused_while_they_are_unpacked(
    world: World, body: bytes, encoding: str, expected: tuple[int, str]
) -> None:
    agent = world.speaker()
    agent.hello()
    call = world.open_call(agent)
    reply = agent.send("POST", "/v1/answers", body, signs=b"", **{"content-encoding": encoding})
    assert (reply.status_code, code(reply)) == expected
    assert 0 in call.waiting
    assert not list(world.ledger.updates.iterdir())


def test_a_large_answer_goes_through_a_file_and_is_the_same(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedloom.network.coordinator.request_body.SMALL", 10)
    agent, other = world.speaker(), world.speaker("clare")
    agent.hello()
    other.hello()
    call = world.open_call(agent, other)
    whole = agent.answer().whole
    assert agent.send("POST", "/v1/answers", whole).json()["results"][0]["status"] == "accepted"
    wrong = other.send("POST", "/v1/answers", other.answer(client=1).whole, signs=b"another")
    assert (wrong.status_code, code(wrong)) == (401, "body")
    assert torch.equal(call.answers[0].update.groups["model"]["w"], torch.ones(1, 3))
    assert [file.read_bytes() for file in world.ledger.updates.iterdir()] == [whole]


def test_when_memory_is_short_answers_are_mapped_from_their_files(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedloom.network.coordinator.intake.MEMORY", 10)
    agent = world.speaker()
    agent.hello()
    call = world.open_call(agent)
    agent.send("POST", "/v1/answers", agent.answer(scale=3.0).whole)
    assert call.in_memory == 0
    assert torch.equal(call.answers[0].update.groups["model"]["w"], torch.full((1, 3), 3.0))


def test_of_two_answers_at_the_same_time_one_is_taken_in_and_the_other_comes_again(world: World) -> None:
    agent = world.speaker()
    agent.hello()
    call = world.open_call(agent)
    call.claimed.add(0)  # as while the other is being written
    busy = agent.send("POST", "/v1/answers", agent.answer(scale=2.0).whole)
    assert (busy.status_code, code(busy)) == (503, "busy")
    call.claimed.discard(0)
    assert agent.send("POST", "/v1/answers", agent.answer().whole).json()["results"][0]["status"] == "accepted"
    assert not call.claimed


def test_an_answer_that_cannot_be_kept_is_asked_for_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedloom.errors import StoreError

    agent = world.speaker()
    agent.hello()
    call = world.open_call(agent)
    accept = world.ledger.accept

    def full(*given: Any) -> None:
        raise StoreError("the disk is full")

    monkeypatch.setattr(world.ledger, "accept", full)
    reply = agent.send("POST", "/v1/answers", agent.answer().whole)
    assert (reply.status_code, code(reply)) == (507, "disk")
    assert (list(call.waiting), call.answers) == ([0], {})
    monkeypatch.setattr(world.ledger, "set_hello", full)
    said = agent.send("POST", "/v1/hello", HELLO.model_dump_json().encode())
    assert (said.status_code, code(said)) == (507, "disk")
    monkeypatch.setattr(world.ledger, "accept", accept)
    assert agent.send("POST", "/v1/answers", agent.answer().whole).json()["results"][0]["status"] == "accepted"


def test_a_message_with_unknown_fields_is_refused(world: World) -> None:
    agent = world.speaker()
    body = json.dumps({**HELLO.model_dump(mode="json"), "extra": 1}).encode()
    reply = agent.send("POST", "/v1/hello", body)
    assert (reply.status_code, code(reply)) == (422, "malformed")
