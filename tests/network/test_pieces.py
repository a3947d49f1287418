"""Parcels, tokens, certificates, versions of clients' states, policies: each by itself."""

from __future__ import annotations

import contextlib
import json
import ssl
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.errors import InputError, TrainingError
from fedloom.network.agent.audit import Audit
from fedloom.network.agent.client_state import Versions
from fedloom.network.agent.descriptions import short_traceback
from fedloom.network.agent.policy import Policy, Refusal, load_site
from fedloom.network.protocol.identity import Signer, Token, fingerprint, local_authority, pinned
from fedloom.network.protocol.identity import given as given_certificate
from fedloom.network.protocol.messages import NEW
from fedloom.network.protocol.tensors import KINDS, Parcel, WireError, flatten, open_parcel, read_parcel, unflatten
from fedloom.record import seconds

NAMES = st.text(st.characters(codec="utf-8", exclude_characters="/"), min_size=1, max_size=8)


@st.composite
def tensors(draw: Any) -> torch.Tensor:
    kind = draw(st.sampled_from(list(KINDS)))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    return torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))).to(kind)


@given(st.dictionaries(NAMES, st.dictionaries(NAMES, tensors(), max_size=3), max_size=3))
@settings(max_examples=60)
def test_groups_come_out_of_a_parcel_as_they_went_in(groups: dict[str, dict[str, torch.Tensor]]) -> None:
    import tempfile

    parcel = Parcel({"about": "ü"}, flatten(groups))
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(parcel.whole)
        header, leaves = open_parcel(Path(file.name))
    in_memory, copies = read_parcel(parcel.whole)
    assert in_memory == header
    assert list(copies) == list(leaves)
    assert all(torch.equal(copies[name], leaf) and copies[name].dtype == leaf.dtype for name, leaf in leaves.items())
    found = unflatten(leaves)
    assert header == {"about": "ü"}
    assert len(parcel.whole) == parcel.size
    assert {g: list(t) for g, t in found.items()} == {g: list(t) for g, t in groups.items()}
    for group, leaves_in in groups.items():
        for name, leaf in leaves_in.items():
            assert found[group][name].dtype == leaf.dtype
            assert torch.equal(found[group][name], leaf)


@given(st.binary(max_size=200), st.integers(0, 400), st.integers(0, 400))
@settings(max_examples=300)
def test_a_damaged_parcel_is_refused_and_nothing_else_happens(junk: bytes, begin: int, length: int) -> None:
    import tempfile

    whole = Parcel({"ask": "a"}, {"0/update/model/w": torch.arange(6.0).reshape(1, 6)}).whole
    damaged = whole[:begin] + junk + whole[begin + length :]
    with contextlib.suppress(WireError):
        read_parcel(damaged)
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(damaged)
        try:
            header, leaves = open_parcel(Path(file.name))
        except WireError:
            return
    assert isinstance(header, dict)
    assert all(isinstance(leaf, torch.Tensor) for leaf in leaves.values())


def test_durations() -> None:
    assert [seconds(text) for text in ("500ms", "60s", "1.5m", "2h")] == [0.5, 60.0, 90.0, 7200.0]
    for wrong in ("60", "s", "-1s", "0s", "1 s", "1d"):
        with pytest.raises(InputError, match="number with a unit"):
            seconds(wrong)


def test_a_token_is_read_again_and_nonsense_is_not() -> None:
    token = Token.new("cd" * 32)
    assert Token.parse(f" {token}\n") == token
    for wrong in ("", "fl1-", "fl1-abc", str(token)[:-3], "x" + str(token)):
        with pytest.raises(InputError, match="enrolment token"):
            Token.parse(wrong)


def test_keys_are_kept_in_files_that_only_their_owner_reads(tmp_path: Path) -> None:
    signer = Signer(tmp_path / "state" / "agent.key")
    assert Signer(tmp_path / "state" / "agent.key").public == signer.public
    made = local_authority(tmp_path / "ca")
    for path in (tmp_path / "state" / "agent.key", made.key, made.certificate):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert local_authority(tmp_path / "ca").fingerprint == made.fingerprint == fingerprint(made.authority)


def _handshake(server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    """TLS between two contexts, in memory."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname="any.name"),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(6):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue


def test_agents_trust_the_certificate_that_was_pinned_and_no_other(tmp_path: Path) -> None:
    ours, other = local_authority(tmp_path / "ours"), local_authority(tmp_path / "other")
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(ours.certificate, ours.key)
    _handshake(server, pinned(ours.authority))
    with pytest.raises(ssl.SSLCertVerificationError):
        _handshake(server, pinned(other.authority))


def test_of_a_given_certificate_the_certificate_is_pinned_and_not_who_signed_it(tmp_path: Path) -> None:
    made = local_authority(tmp_path / "ours")  # server.pem is a chain of two: the certificate, and who signed it
    pinned_by_agents = given_certificate(made.certificate, made.key).authority
    assert fingerprint(pinned_by_agents) == fingerprint(made.certificate.read_bytes()) != made.fingerprint
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(made.certificate, made.key)
    _handshake(server, pinned(pinned_by_agents))


def own(value: float) -> dict[str, dict[str, torch.Tensor]]:
    return {"control": {"w": torch.full((2,), value)}}


def test_a_clients_state_has_versions_until_the_coordinator_has_them_on_its_disk(tmp_path: Path) -> None:
    versions = Versions(tmp_path)
    initial = own(0.0)
    assert versions.load("c-1", 0, NEW, initial) is initial
    for round in (1, 2, 3):
        versions.save("c-1", 0, (round, 1, 0), own(float(round)))
    versions.save("c-1", 0, (3, 2, 0), own(3.5))  # another attempt at the same round

    def kept() -> list[str]:
        return sorted(path.name.split(".")[0] for path in (tmp_path / "c-1" / "0").iterdir())

    versions.prune("c-1", 0, (1, 1, 0), durable=0)
    assert kept() == ["1-1-0", "2-1-0", "3-1-0", "3-2-0"]
    versions.prune("c-1", 0, (3, 2, 0), durable=1)  # the attempt that counts is named; round 1 is the oldest needed
    assert kept() == ["1-1-0", "3-2-0"]
    versions.prune("c-1", 0, (3, 2, 0), durable=3)
    assert kept() == ["3-2-0"]
    assert torch.equal(versions.load("c-1", 0, (3, 2, 0), own(0.0))["control"]["w"], torch.full((2,), 3.5))
    with pytest.raises(TrainingError, match="missing"):
        versions.load("c-1", 0, (2, 1, 0), own(0.0))
    (tmp_path / "c-1" / "0" / "3-2-0.safetensors").write_bytes(b"half")
    with pytest.raises(TrainingError, match="damaged"):
        versions.load("c-1", 0, (3, 2, 0), own(0.0))


def test_a_round_that_was_given_up_takes_no_version_with_it(tmp_path: Path) -> None:
    versions = Versions(tmp_path)
    for ticket in ((5, 1, 0), (6, 1, 0)):
        versions.save("c-1", 0, ticket, own(float(ticket[0])))
        versions.prune("c-1", 0, ticket, durable=4)
    # the second call of round 6 failed: what counts is that of round 5 again, and 6 is on the coordinator's disk
    versions.prune("c-1", 0, (5, 1, 0), durable=6)
    assert torch.equal(versions.load("c-1", 0, (5, 1, 0), own(0.0))["control"]["w"], torch.full((2,), 5.0))


def test_the_audit_log_goes_on_after_half_a_line(tmp_path: Path) -> None:
    Audit(tmp_path / "audit.jsonl").write("hello", clients=1)
    with open(tmp_path / "audit.jsonl", "a") as file:
        file.write('{"time": "2026')
    Audit(tmp_path / "audit.jsonl").write("answered", round=1)
    first, half, last = (tmp_path / "audit.jsonl").read_text().splitlines()
    assert (json.loads(first)["event"], json.loads(last)["event"]) == ("hello", "answered")
    assert half == '{"time": "2026'


def test_an_error_is_told_without_the_values_in_its_message() -> None:
    def model() -> None:
        raise ValueError("could not convert 'Jane Doe' to float")

    try:
        try:
            model()
        except ValueError as error:
            raise TrainingError(f"Round 1, client 'a', training: {error}") from error
    except TrainingError as error:
        told = short_traceback(error)
    assert "Jane" not in told
    assert told.startswith("ValueError (its message stays at the site)\n")
    assert told.endswith("in model")
    assert short_traceback(TrainingError("the loss is not finite")) == "the loss is not finite"
    assert short_traceback(OSError(28, "No space left on device")) == "OSError: No space left on device"


def offer(**task: Any) -> dict[str, Any]:
    values = {"model": "digits_mlp", "loss": "cross_entropy", "metrics": ["accuracy"], **task}
    return {"task": values, "algorithm": {"mine": {"name": "fedprox"}}}


def test_a_policy_refuses_what_it_does_not_allow() -> None:
    Policy().check_offer(offer(), {})
    Policy(models=["net.py:Net"]).check_offer(offer(model="net.py:Net"), {})
    for policy, wanted, why in (
        (Policy(), offer(model="net.py:Net"), "no code but fedloom's own"),
        (Policy(), offer(loss="net.py:loss"), "no code but fedloom's own"),
        (Policy(), offer(metrics=["net.py:metric"]), "somebody's own code"),
        (Policy(models=["mlp"]), offer(), "does not allow the model 'digits_mlp'. Allowed: mlp"),
        (Policy(algorithms=["fedavg"]), offer(), "does not allow the algorithm 'fedprox'"),
        (Policy(max_epsilon=2.0), offer(), "this run has none"),
    ):
        with pytest.raises(Refusal, match=why):
            policy.check_offer(wanted, {})
    Policy(max_epsilon=2.0).check_offer(offer(), {"epsilon": 1.5})
    with pytest.raises(Refusal, match="up to 2"):
        Policy(max_epsilon=2.0).check_offer(offer(), {"epsilon": 2.5})
    with pytest.raises(Refusal, match="not map"):
        Policy(verbs=["reduce"]).check_ask("train", "map", 10, {"shared"})
    with pytest.raises(Refusal, match="at least 5 clients"):
        Policy(min_cohort=5).check_ask("train", "reduce", 4, {"shared"})
    for kind, verb, roles in (
        ("train", "evaluate", {"shared"}),  # training is not to be had under another name
        ("evaluate", "reduce", {"shared"}),
        ("train", "reduce", {"shared", "peers"}),
        ("train", "exchange", {"shared"}),
    ):
        with pytest.raises(Refusal, match="not what it is called"):
            Policy().check_ask(kind, verb, 10, roles)
    Policy().check_ask("train", "exchange", 10, {"shared", "peers", "private"})
    Policy().check_ask("fingerprint", "evaluate", 10, {"shared"})
    with pytest.raises(Refusal, match="20 training examples"):
        Policy(min_examples=20).check_examples({"a": 19})
    assert Policy().may_leave("accuracy", True)
    assert not Policy().may_leave("auroc", False)
    assert Policy(metrics=["auroc"]).may_leave("auroc", False)
    assert not Policy(metrics=["auroc"]).may_leave("loss", True)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[site]\nname = 'a'", "says nothing about the data"),
        ("[data]\nsource = 'digits'\n[polcy]\n", "Did you mean 'policy'"),
        ("[data]\nsource = 'digits'\n[policy]\nverb = ['reduce']", "no key 'verb'"),
        ("[data]\nsource = 'digits'\n[policy]\nverbs = ['steal']", "[policy] verbs"),
        ("[data\n", "not a valid TOML file"),
    ],
)
def test_mistakes_in_a_site_file_are_explained(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "kerry.toml").write_text(text)
    with pytest.raises(InputError) as error:
        load_site(tmp_path / "kerry.toml")
    assert words in str(error.value)
