"""The coordinator's files: tokens, a fresh start, and folders of other runs."""

from __future__ import annotations

import sqlite3
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from fedloom import faults
from fedloom.errors import InputError, StoreError
from fedloom.experiment.run_folder import locked
from fedloom.network.coordinator import network_folder
from fedloom.network.coordinator.ledger import Ledger
from fedloom.network.coordinator.network_folder import (
    change_certificate,
    coordinator_ledger,
    invite,
    open_ledger,
    operator_token,
    prepare_folder,
    prepare_successor,
    replace,
    set_certificate,
    set_certificate_aside,
    token_file,
    withdraw,
)
from fedloom.network.protocol.certificates import local_authority
from fedloom.network.protocol.token import Token
from tests.network.conftest import HEARTBEAT, HELLO, World, code


def test_every_token_has_its_own_file_and_is_in_the_ledger_as_a_hash(world: World) -> None:
    world.ledger.set_fact("fingerprint", "ab" * 32)
    first, second = (Token.parse(path.read_text()) for path in invite(world.ledger, 2))
    assert first != second
    assert first.fingerprint == "ab" * 32
    assert len(world.ledger.unused_tokens()) == 2
    assert world.ledger.enrol(first.digest, "kerry", "00" * 32)
    assert len(world.ledger.unused_tokens()) == 1


def test_tokens_expire_and_can_be_withdrawn(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = invite(world.ledger, 3, lasts=60.0)
    tokens = [Token.parse(path.read_text()) for path in (first, second, third)]
    assert withdraw(world.ledger, str(first)) == 1
    assert not first.exists()
    with pytest.raises(InputError, match=r"^unknown token$"):
        world.ledger.enrol(tokens[0].digest, "kerry", "00" * 32)
    agent = world.ledger.enrol(tokens[1].digest, "kerry", "00" * 32)
    now = faults.clock()
    monkeypatch.setattr(faults, "clock", lambda: now + 61.0)
    assert world.ledger.unused_tokens() == []
    with pytest.raises(InputError, match="the token has expired: ask the operator for another"):
        world.ledger.enrol(tokens[2].digest, "clare", "11" * 32)
    assert world.ledger.enrol(tokens[1].digest, "kerry", "00" * 32) == agent  # it was used in time
    with pytest.raises(InputError, match=f"There is no unused token '{third.stem}'. Unused: none."):
        withdraw(world.ledger, third.stem)
    invite(world.ledger, 2)
    assert withdraw(world.ledger, "all") == 2


def test_a_ledger_of_an_earlier_version_is_used_as_it_is(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as database, database:
        database.execute("CREATE TABLE tokens (digest TEXT PRIMARY KEY, made REAL NOT NULL, agent TEXT)")
        database.execute("INSERT INTO tokens VALUES ('ab', 1.0, NULL)")
    with closing(Ledger(tmp_path)) as ledger:
        assert [row["digest"] for row in ledger.unused_tokens()] == ["ab"]  # tokens never expired then
        assert ledger.enrol("ab", "kerry", "00" * 32)


def test_a_missing_or_damaged_ledger_is_never_replaced_in_silence(tmp_path: Path) -> None:
    with ExitStack() as held:
        open_ledger(tmp_path / "network", held).close()
    ledger = tmp_path / "network" / "ledger.db"
    (tmp_path / "network" / "server.key").touch()
    ledger.rename(tmp_path / "kept.db")
    with (
        ExitStack() as held,
        pytest.raises(StoreError, match=r"ledger.db is missing.* Restore it from a copy.*--fresh"),
    ):
        open_ledger(tmp_path / "network", held)
    assert not ledger.exists()
    ledger.write_bytes(b"no database" * 1000)
    with ExitStack() as held, pytest.raises(StoreError, match=r"cannot be used.* Restore it from a copy.*--fresh"):
        open_ledger(tmp_path / "network", held)
    content = bytearray((tmp_path / "kept.db").read_bytes())
    content[4096:8192] = bytes(4096)
    ledger.write_bytes(content)
    with ExitStack() as held, pytest.raises(StoreError, match=r"Restore it from a copy.*--fresh"):
        open_ledger(tmp_path / "network", held)


def test_a_certificate_that_agents_trust_is_never_replaced_in_silence(world: World) -> None:
    network = world.ledger.folder
    world.ledger.set_fact("fingerprint", local_authority(network).fingerprint)
    known = world.ledger.fact("fingerprint")
    assert local_authority(network, known=known).fingerprint == known
    (network / "server.key").write_text("damaged")
    with pytest.raises(
        InputError, match=r"certificate or key in .* is damaged.*`fedloom agents renew-certificate DIR --at-once`"
    ):
        local_authority(network, known=known)
    (network / "server.key").unlink()
    with pytest.raises(
        InputError, match=r"server.key is missing in .*`fedloom agents renew-certificate DIR --at-once`"
    ):
        local_authority(network, known=known)
    set_certificate_aside(world.ledger)
    again = local_authority(network, known=world.ledger.fact("fingerprint"))
    assert again.fingerprint != known


def test_the_successor_of_an_agent_gets_its_number_and_its_clients(world: World) -> None:
    agent = world.speaker()
    agent.hello()
    world.ledger.add_clients([(0, agent.signer.agent, 0, "c")])
    path = replace(world.ledger, "kerry", 60.0)
    assert code(agent.send("POST", "/v1/heartbeat", HEARTBEAT)) == "revoked"
    token, key = Token.parse(path.read_text()), "ab" * 32
    with pytest.raises(InputError, match="the token replaces another agent: use its name"):
        world.ledger.enrol(token.digest, "clare", key)
    enrolment = {"secret": token.secret.hex(), "name": "kerry", "public_key": key}
    for _ in range(2):  # the first reply was lost
        reply = world.client.post("/v1/enrol", json=enrolment).json()
        assert (reply["agent"], reply["replaced"]) == (agent.signer.agent, True)
    assert [row["revoked"] for row in world.ledger.agents()] == [None]
    fewer = HELLO.model_copy(update={"clients": (HELLO.clients[0].model_copy(update={"train": 5}),)})
    with pytest.raises(InputError, match="the sizes of their splits are not those that the run began with"):
        agent.hello(fewer)
    agent.hello(HELLO.model_copy(update={"data_mark": "of another key"}))
    with pytest.raises(InputError, match="its data has changed since the run began"):
        agent.hello()


def test_a_new_run_and_a_fresh_start_keep_the_agents_and_the_certificate(tmp_path: Path) -> None:
    first, key = tmp_path / "first", "00" * 32
    with ExitStack() as held:
        ledger = open_ledger(first / "network", held)
        ledger.set_fact("fingerprint", local_authority(first / "network").fingerprint)
        used, unused = (Token.parse(path.read_text()) for path in invite(ledger, 2))
        agent = ledger.enrol(used.digest, "kerry", key)
        ledger.set_hello(agent, HELLO.model_dump(mode="json"))
        ledger.add_clients([(0, agent, 0, "c")])
        ledger.close()
    prepare_folder(tmp_path / "second", fresh=False, like=first)
    prepare_folder(first, fresh=True)
    for folder in (tmp_path / "second", first):
        with closing(coordinator_ledger(folder)) as ledger:
            known = ledger.fact("fingerprint")
            assert local_authority(folder / "network", known=known).fingerprint == known == unused.fingerprint
            assert [(row["agent"], row["key"], row["hello"]) for row in ledger.agents()] == [(agent, key, None)]
            assert ledger.clients() == []  # they belong to one run
            assert [row["digest"] for row in ledger.unused_tokens()] == [unused.digest]
            assert Token.parse(token_file(ledger, unused.digest).read_text()) == unused
            assert ledger.enrol(used.digest, "kerry", key) == agent
    (first / "network" / "ledger.db").write_bytes(b"damaged" * 1000)
    prepare_folder(first, fresh=True)
    assert not (first / "network").exists()


def test_the_operators_token_stays_until_the_certificate_changes(tmp_path: Path) -> None:
    path, token = operator_token(tmp_path, "ab" * 32)
    assert operator_token(tmp_path, "ab" * 32) == (path, token)
    assert operator_token(tmp_path, "cd" * 32)[1] != token
    path.write_text("damaged")
    with pytest.raises(InputError, match=r"operator.token is damaged. Delete it"):
        operator_token(tmp_path, "cd" * 32)


def test_a_fresh_start_moves_the_old_run_aside_unless_a_coordinator_uses_it(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "network").mkdir(parents=True)
    with locked(folder / "network"), pytest.raises(StoreError, match="Another process is running"):
        prepare_folder(folder, fresh=True)
    prepare_folder(folder, fresh=False)
    assert (folder / "network").is_dir()
    prepare_folder(folder, fresh=True)
    assert not (folder / "network").exists()
    assert len(list(tmp_path.iterdir())) == 2


def test_a_folder_without_a_ledger_is_not_a_coordinators(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is not the folder of a run of `fedloom serve`"):
        coordinator_ledger(tmp_path)


def test_a_change_of_the_certificate_that_a_crash_interrupted_is_finished_by_the_next_start(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, write = world.ledger.folder, network_folder.write_private
    set_certificate(world.ledger, local_authority(network).authority)
    prepare_successor(world.ledger)
    new = (network / "successor" / "ca.pem").read_bytes()
    for count in range(1, 4):
        written = iter(range(count))

        def crash(path: Path, content: bytes, written: Any = written) -> None:
            if next(written, None) is None:
                raise KeyboardInterrupt
            write(path, content)

        with monkeypatch.context() as patch:
            patch.setattr(network_folder, "write_private", crash)
            if count < 3:
                with pytest.raises(KeyboardInterrupt):
                    change_certificate(world.ledger, world.said.append)
            else:
                change_certificate(world.ledger, world.said.append)
    made = local_authority(network, known=world.ledger.fact("fingerprint"))
    assert made.authority == new
    set_certificate(world.ledger, made.authority)
    assert not (network / "successor").exists()


def test_a_successor_that_was_prepared_twice_has_the_files_of_the_last_time(world: World) -> None:
    network, mine = world.ledger.folder, local_authority(world.folder / "mine").certificate
    present = local_authority(network).authority
    set_certificate(world.ledger, present)
    prepare_successor(world.ledger)
    prepare_successor(world.ledger, mine)
    assert [path.name for path in (network / "successor").iterdir()] == ["ca.pem"]
    change_certificate(world.ledger, world.said.append)  # `serve --certificate` will use it
    assert local_authority(network).authority == present
    prepare_successor(world.ledger)
    made = local_authority(network / "successor").authority
    prepare_successor(world.ledger)
    assert local_authority(network / "successor").authority == made


def test_a_successor_of_files_that_do_not_belong_together_is_not_used(world: World) -> None:
    network = world.ledger.folder
    present = local_authority(network).authority
    set_certificate(world.ledger, present)
    prepare_successor(world.ledger)
    (network / "successor" / "ca.pem").write_bytes(local_authority(world.folder / "other").authority)
    with pytest.raises(InputError, match=r"ca\.pem and server\.pem in .*successor do not belong together"):
        change_certificate(world.ledger, world.said.append)
    assert local_authority(network).authority == present
    prepare_successor(world.ledger)
    change_certificate(world.ledger, world.said.append)
    assert local_authority(network).authority != present
