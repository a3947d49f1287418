"""The ledger as a file for auditors."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from fedloom.errors import InputError, StoreError
from fedloom.network.coordinator.audit_export import export_audit
from tests.network.conftest import World


def filled(world: World) -> None:
    """A ledger with an agent that was revoked, one that imitates a formula, a round, and a refusal."""
    for name in ("kerry", "=1+1"):
        world.speaker(name)
    world.ledger.add_clients([(0, world.ledger.agents()[1]["agent"], 0, "kerry")])
    world.ledger.revoke("kerry")
    world.ledger.begin("fedavg-1", 1, 1, 2)
    world.ledger.end("fedavg-1", 1, 1, 1, "abandoned")
    world.ledger.note("denied", "a request as '\x1b[2J' was rejected")


def test_json_lines_hold_agents_clients_rounds_and_refusals(world: World, tmp_path: Path) -> None:
    filled(world)
    path = tmp_path / "audit.jsonl"
    assert export_audit(world.ledger, path) == 5
    text = path.read_text()
    assert text.isascii()
    assert "\x1b" not in text
    first, second, client, round, event = map(json.loads, text.splitlines())
    assert [first["record"], second["record"]] == ["agent", "agent"]
    assert {first["name"]: bool(first["revoked"]), second["name"]: bool(second["revoked"])} == {
        "kerry": True,
        "=1+1": False,
    }
    assert len(first["public_key"]) == 64
    assert (client["record"], client["client"], client["name"]) == ("client", 0, "kerry")
    round.pop("time")
    assert round == {
        "record": "round",
        "cell": "fedavg-1",
        "round": 1,
        "attempt": 1,
        "asked": 2,
        "accepted": 1,
        "status": "abandoned",
    }
    assert (event["record"], event["kind"], event["message"]) == (
        "event",
        "denied",
        "a request as '\x1b[2J' was rejected",
    )
    assert event["time"].endswith("+00:00")
    assert path.stat().st_mode & 0o077 == 0


def test_csv_holds_the_same_without_formulas_and_control_characters(world: World, tmp_path: Path) -> None:
    filled(world)
    assert export_audit(world.ledger, tmp_path / "audit.csv") == 5
    with open(tmp_path / "audit.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["record"] for row in rows] == ["agent", "agent", "client", "round", "event"]
    assert {rows[0]["name"], rows[1]["name"]} == {"kerry", "'=1+1"}
    assert rows[3]["status"] == "abandoned"
    assert rows[4]["message"] == r"a request as '\x1b[2J' was rejected"


def test_no_secret_leaves(world: World, tmp_path: Path) -> None:
    filled(world)
    export_audit(world.ledger, tmp_path / "audit.jsonl")
    digests = [row["digest"] for row in world.ledger._rows("SELECT digest FROM tokens")]
    assert digests
    assert not any(digest in (tmp_path / "audit.jsonl").read_text() for digest in digests)


def test_another_suffix_is_refused(world: World, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"audit\.txt must end in \.jsonl \(JSON lines\) or \.csv"):
        export_audit(world.ledger, tmp_path / "audit.txt")


def test_a_damaged_ledger_is_refused_and_nothing_is_written(world: World, tmp_path: Path) -> None:
    filled(world)
    for number in range(2000):
        world.ledger.note("agent", f"message {number} " + "x" * 100)
    world.ledger._database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    database = world.folder / "network" / "ledger.db"
    content = bytearray(database.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 4096] = b"\xff" * 4096
    database.write_bytes(content)
    world.ledger._reader.execute("PRAGMA shrink_memory")
    with pytest.raises(StoreError, match=r"ledger in .* (is damaged|cannot be read)"):
        export_audit(world.ledger, tmp_path / "audit.jsonl")
    assert not (tmp_path / "audit.jsonl").exists()
