"""The coordinator's files: tokens, a fresh start, and folders of other runs."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from fedloom import faults
from fedloom.errors import InputError, StoreError
from fedloom.experiment.run_folder import locked
from fedloom.network.coordinator.ledger import Ledger
from fedloom.network.coordinator.network_folder import (
    coordinator_ledger,
    invite,
    operator_token,
    prepare_folder,
    withdraw,
)
from fedloom.network.protocol.token import Token
from tests.network.conftest import World


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


def test_the_operators_token_stays_until_the_certificate_changes(tmp_path: Path) -> None:
    path, token = operator_token(tmp_path, "ab" * 32)
    assert operator_token(tmp_path, "ab" * 32) == (path, token)
    assert operator_token(tmp_path, "cd" * 32)[1] != token


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
