"""The coordinator's durable memory in one SQLite file: agents, the clients they host, attempts, accepted updates.

A commit that an agent relies on is on the disk before the agent hears of it (WAL with synchronous = FULL). The bodies
of accepted updates are files beside the database, which holds their SHA-256, so that damage by a power cut is noticed.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from fedloom import faults, files
from fedloom.errors import InputError, StoreError
from fedloom.experiment.checkpoint import kept

Row = dict[str, Any]
# why a round leaves out a client's update
OUTLIER = "outlier"  # its change is far longer than the others'
NOT_FINITE = "not-finite"  # it is the largest, and the result with it is not finite
REVOKED = "revoked"  # its agent was revoked before the round was closed

SCHEMA = (Path(__file__).parent / "templates" / "ledger.sql").read_text(encoding="utf-8").split(";")[:-1]

FLIGHT = """SELECT 1 FROM flights AS one
    WHERE (one.cell, one.version, one.client) = (updates.cell, updates.round, updates.client)"""  # of an update
RESTORE = "Restore it from a copy, or start over with --fresh: the old folder is kept, and agents need new tokens."
ADDED = {  # columns that ledgers of earlier versions lack
    "tokens": {"expires": "REAL", "replaces": "TEXT", "late": "INTEGER"},
    "agents": {"replaced": "REAL", "mark": "TEXT", "pins": "TEXT"},
    "clients": {"late": "INTEGER"},
}
AUDITED = {  # record → its rows; tokens are left out
    "agent": "SELECT enrolled AS time, agent, name, key AS public_key, revoked FROM agents ORDER BY enrolled, agent",
    "client": "SELECT agent, client, name FROM clients ORDER BY client",
    "round": """SELECT began AS time, cell, round, attempt, asked, accepted, status FROM attempts
        ORDER BY began, cell, round""",
    "taken": """SELECT cell, taken AS round, version, client FROM flights WHERE taken IS NOT NULL
        ORDER BY cell, taken, client""",
    "event": "SELECT time, agent, kind, message FROM events ORDER BY id",
}


@dataclass(frozen=True)
class AcceptedUpdate:
    """One client's accepted update: the question that it answers, and the file with its body."""

    cell: str
    round: int
    call: int
    client: int
    digest: str  # of the question: the answer to another one does not count
    file: str
    sha256: str


class Ledger:
    """The database `ledger.db` of a coordinator, and the folder of accepted updates beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.updates = folder / "updates"
        path = folder / "ledger.db"
        self._lock, self._reading = threading.Lock(), threading.Lock()
        try:
            self.updates.mkdir(parents=True, exist_ok=True, mode=0o700)
            files.make_private_database(path)
            self._database, self._reader = (
                sqlite3.connect(path, timeout=30.0, isolation_level=None, check_same_thread=False) for _ in range(2)
            )  # two connections, so that reading does not wait for writing
            self._reader.row_factory = sqlite3.Row
            for pragma in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
                self._database.execute(f"PRAGMA {pragma}")
            with self._transaction() as database:
                for statement in SCHEMA:
                    database.execute(statement)
                for table, columns in ADDED.items():
                    known = {row[1] for row in database.execute(f"PRAGMA table_info({table})")}
                    for name in columns.keys() - known:
                        database.execute(f"ALTER TABLE {table} ADD COLUMN {name} {columns[name]}")
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"The coordinator's ledger {path} cannot be used: {error}. {RESTORE}") from error

    def check(self) -> None:
        """Raise `StoreError` if the database is damaged."""
        found = self._rows("PRAGMA quick_check(1)")[0]["quick_check"]
        if found != "ok":
            raise StoreError(f"The coordinator's ledger in {self.folder} is damaged ({found}). {RESTORE}")

    def close(self) -> None:
        with self._lock, self._reading:
            self._database.close()
            self._reader.close()

    @contextmanager
    def _transaction(self, *, durable: bool = True) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                if not durable:
                    self._database.execute("PRAGMA synchronous = NORMAL")
                self._database.execute("BEGIN IMMEDIATE")
                yield self._database
                self._database.execute("COMMIT")
            except sqlite3.Error as error:
                raise StoreError(f"The coordinator's ledger in {self.folder} cannot be written: {error}.") from error
            finally:
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
                if not durable:
                    self._database.execute("PRAGMA synchronous = FULL")

    def _write(self, statement: str, *values: Any, durable: bool = True) -> int:
        """Run one statement in its own transaction; return how many rows it changed."""
        with self._transaction(durable=durable) as database:
            return database.execute(statement, values).rowcount

    def _rows(self, query: str, *values: Any) -> list[Row]:
        with self._reading:
            try:
                return [dict(row) for row in self._reader.execute(query, values)]
            except sqlite3.Error as error:
                raise StoreError(f"The coordinator's ledger in {self.folder} cannot be read: {error}.") from error

    # --- facts

    def fact(self, key: str) -> Any:
        found = self._rows("SELECT value FROM facts WHERE key = ?", key)
        return json.loads(found[0]["value"]) if found else None

    def set_fact(self, key: str, value: Any) -> None:
        self._write("INSERT OR REPLACE INTO facts VALUES (?, ?)", key, json.dumps(value))

    def next_attempt(self) -> int:
        """Return a number that no earlier process of this coordinator had, to tell its calls from theirs."""
        number = int(self.fact("attempt") or 0) + 1
        self.set_fact("attempt", number)
        return number

    # --- agents

    def invite(self, digest: str, lasts: float | None = None, replaces: str | None = None, late: bool = False) -> None:
        """Store a one-time token: the seconds until it expires, and the agent whose place its user takes.

        Its user may join a run that has begun if the operator invited it `late`.
        """
        now = faults.clock()
        values = (digest, now, None if lasts is None else now + lasts, replaces, late)
        self._write(
            "INSERT OR IGNORE INTO tokens (digest, made, expires, replaces, late) VALUES (?, ?, ?, ?, ?)", *values
        )

    def unused_tokens(self) -> list[Row]:
        """Return the tokens with which an agent can still enrol."""
        query = "SELECT * FROM tokens WHERE agent IS NULL AND coalesce(expires > ?, 1) ORDER BY made, digest"
        return self._rows(query, faults.clock())

    def is_invited_late(self, agent: str) -> bool:
        """Return whether the operator invited an agent after the run began."""
        return bool(self._rows("SELECT 1 FROM tokens WHERE agent = ? AND late", agent))

    def withdraw(self, digest: str) -> None:
        """Delete a token that no agent has used."""
        self._write("DELETE FROM tokens WHERE digest = ? AND agent IS NULL", digest)

    def enrol(self, digest: str, name: str, key: str) -> str:
        """Exchange a token for an agent's number. The same agent may repeat this if the reply was lost."""
        with self._transaction() as database:
            query = "SELECT agent, expires, replaces FROM tokens WHERE digest = ?"
            found = database.execute(query, (digest,)).fetchone()
            if found is None:
                raise InputError("unknown token")
            user, expires, replaces = found
            known = database.execute("SELECT agent FROM agents WHERE key = ?", (key,)).fetchone()
            agent = str(known[0]) if known else hashlib.sha256(bytes.fromhex(key)).hexdigest()[:16]
            is_former = not known and database.execute("SELECT 1 FROM agents WHERE agent = ?", (agent,)).fetchone()
            if is_former and (replaces is None or user is not None):
                raise InputError("this key was replaced: use `fedloom agents replace`")
            if user is not None:
                if user == agent:
                    return agent
                raise InputError(
                    "the token was used by another agent: every agent needs its own. The operator makes one with "
                    "`fedloom agents invite`, or with `fedloom agents replace` for an agent that lost its state "
                    "folder. A site whose file had another name before names its old folder with --state"
                )
            if expires is not None and expires <= faults.clock():
                raise InputError("the token has expired: ask the operator for another (`fedloom agents invite`)")
            taken = database.execute("SELECT agent FROM agents WHERE name = ?", (name,)).fetchone()
            if replaces is not None:
                if taken is None or taken[0] != replaces or (known and agent != replaces):
                    raise InputError("the token replaces another agent: use its name, and a key of no other agent")
                statement = "UPDATE agents SET key = ?, revoked = NULL, replaced = ?, mark = '' WHERE agent = ?"
                database.execute(statement, (key, time.time(), replaces))
                database.execute("UPDATE tokens SET agent = ? WHERE digest = ?", (replaces, digest))
                return str(replaces)
            if taken is not None and taken[0] != agent:
                raise InputError(f"there is another agent with the name '{name}': choose a different name")
            values = (agent, name, key, time.time())
            database.execute("INSERT OR IGNORE INTO agents (agent, name, key, enrolled) VALUES (?, ?, ?, ?)", values)
            database.execute("UPDATE tokens SET agent = ? WHERE digest = ?", (agent, digest))
            return agent

    def identity(self) -> dict[str, list[Row]]:
        """Return the agents and the tokens, without what belongs to one run."""
        columns = {
            "agents": "agent, name, key, enrolled, revoked, replaced",
            "tokens": "digest, made, agent, expires, replaces",
        }
        return {table: self._rows(f"SELECT {names} FROM {table}") for table, names in columns.items()}

    def adopt(self, identity: Mapping[str, Sequence[Row]]) -> None:
        """Store the agents and tokens of another run's coordinator."""
        with self._transaction() as database:
            for table, rows in identity.items():
                for row in rows:
                    marks = ", ".join("?" * len(row))
                    database.execute(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({marks})", tuple(row.values()))

    def agent(self, agent: str) -> Row | None:
        found = self._rows("SELECT * FROM agents WHERE agent = ?", agent)
        return found[0] if found else None

    def agents(self) -> list[Row]:
        return self._rows("SELECT * FROM agents ORDER BY name")

    def revoke(self, name: str) -> None:
        """Reject this agent's requests from now on."""
        statement = "UPDATE agents SET revoked = coalesce(revoked, ?) WHERE name = ? OR agent = ?"
        if not self._write(statement, time.time(), name, name):
            known = ", ".join(row["name"] for row in self.agents()) or "none"
            raise InputError(f"There is no agent '{name}'. Enrolled: {known}.")

    def revoked(self) -> set[str]:
        """Return the agents that were revoked."""
        return {row["agent"] for row in self._rows("SELECT agent FROM agents WHERE revoked IS NOT NULL")}

    def set_mark(self, agent: str, mark: str) -> None:
        """Store the mark of a replaced agent's data, which it makes with another key."""
        self._write("UPDATE agents SET mark = ? WHERE agent = ?", mark, agent)

    def set_key(self, agent: str, key: str) -> None:
        self._write("UPDATE agents SET key = ? WHERE agent = ?", key, agent)

    def set_pins(self, agent: str, pins: str) -> None:
        """Store which certificates an agent trusts, as the SHA-256 of their text."""
        self._write("UPDATE agents SET pins = ? WHERE agent = ?", pins, agent, durable=False)

    def set_hello(self, agent: str, hello: Row) -> None:
        self._write("UPDATE agents SET hello = ? WHERE agent = ?", json.dumps(hello), agent)

    # --- clients: which agent hosts which. Their numbers never change; others may join later

    def clients(self) -> list[Row]:
        return self._rows("SELECT * FROM clients ORDER BY client")

    def add_clients(self, rows: Iterable[tuple[int, str, int, str]], late: bool = False) -> None:
        with self._transaction() as database:
            statement = "INSERT INTO clients (client, agent, local, name, late) VALUES (?, ?, ?, ?, ?)"
            database.executemany(statement, [(*row, late) for row in rows])

    def begin_round(self, cell: str, round: int) -> tuple[int, int, set[str]]:
        """Return how many clients a round has, how many the one before had, and which agents were replaced in between.

        This is decided when the round first begins, and stays the same after a restart.
        """
        replaced = self._rows("SELECT agent, replaced FROM agents WHERE replaced IS NOT NULL ORDER BY agent")
        statement = "INSERT OR IGNORE INTO rosters VALUES (?, ?, (SELECT count(*) FROM clients), ?)"
        # an update that is accepted later is on the disk only together with this
        self._write(statement, cell, round, json.dumps([list(row.values()) for row in replaced]), durable=False)
        query = """SELECT * FROM rosters WHERE rowid <= (SELECT rowid FROM rosters WHERE cell = ? AND round = ?)
            ORDER BY rowid DESC LIMIT 2"""
        now, *before = self._rows(query, cell, round)
        (smaller,) = self._rows("SELECT max(clients) AS clients FROM rosters WHERE cell = ? AND round < ?", cell, round)
        previous = before[0] if before else now  # of the cell before, if this is the first round
        known = json.loads(previous["replaced"])
        news = {agent for agent, when in json.loads(now["replaced"]) if [agent, when] not in known}
        return now["clients"], smaller["clients"] or previous["clients"], news

    # --- rounds

    def begin(self, cell: str, round: int, attempt: int, asked: int) -> None:
        statement = "INSERT OR REPLACE INTO attempts VALUES (?, ?, ?, ?, ?, NULL, 'running')"
        self._write(statement, cell, round, attempt, time.time(), asked, durable=False)

    def end(self, cell: str, round: int, attempt: int, accepted: int, status: str) -> None:
        statement = "UPDATE attempts SET accepted = ?, status = ? WHERE cell = ? AND round = ? AND attempt = ?"
        self._write(statement, accepted, status, cell, round, attempt, durable=False)

    def accept(self, updates: Sequence[AcceptedUpdate]) -> None:
        """Store accepted updates in one commit, which is on the disk when this returns."""
        faults.point("ledger.accept")
        with self._transaction() as database:
            rows = [astuple(update) for update in updates]
            database.executemany("INSERT OR REPLACE INTO updates VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
        faults.point("ledger.accepted")

    def accepted(self, cell: str, round: int, call: int, digest: str) -> list[AcceptedUpdate]:
        """Return the updates that were accepted for exactly this question and are not damaged."""
        query = "SELECT * FROM updates WHERE cell = ? AND round = ? AND call = ? AND digest = ? ORDER BY client"
        found = [AcceptedUpdate(**row) for row in self._rows(query, cell, round, call, digest)]
        return [update for update in found if _is_undamaged(self.updates / update.file, update.sha256)]

    def drop(self, update: AcceptedUpdate) -> None:
        """Delete an update that came too late after all, but not one that was accepted in its place."""
        statement = "DELETE FROM updates WHERE cell = ? AND round = ? AND call = ? AND client = ? AND file = ?"
        self._write(statement, update.cell, update.round, update.call, update.client, update.file, durable=False)
        (self.updates / update.file).unlink(missing_ok=True)

    def leave_out(self, cell: str, round: int, call: int, clients: Mapping[int, str]) -> None:
        """Record which clients a round leaves out from this call on, and why; on the disk when this returns."""
        faults.point("ledger.leave_out")
        if clients:
            with self._transaction() as database:
                rows = [(cell, round, call, client, why) for client, why in clients.items()]
                database.executemany("INSERT OR REPLACE INTO left_out VALUES (?, ?, ?, ?, ?)", rows)

    def left_out(self, cell: str, round: int, call: int) -> dict[int, str]:
        """Return the clients that this call of a round leaves out, and why."""
        query = "SELECT client, why FROM left_out WHERE cell = ? AND round = ? AND call <= ? ORDER BY client"
        return {row["client"]: row["why"] for row in self._rows(query, cell, round, call)}

    # --- clients at work across asynchronous rounds: they trained from the version of the round in which they started

    def start_flights(self, cell: str, version: int, assignments: Mapping[int, str]) -> None:
        """Record which clients start from a version, and their assignments."""
        faults.point("ledger.start")
        rows = [(cell, version, client, assignment, None) for client, assignment in assignments.items()]
        with self._transaction(durable=False) as database:  # an answer is on the disk only together with this
            database.executemany("INSERT OR REPLACE INTO flights VALUES (?, ?, ?, ?, ?)", rows)

    def end_flight(self, cell: str, version: int, client: int) -> None:
        """Forget a client that is no longer awaited."""
        statement = "DELETE FROM flights WHERE cell = ? AND version = ? AND client = ?"
        self._write(statement, cell, version, client, durable=False)

    def flights(self, cell: str, round: int) -> list[Row]:
        """Return the answers that a round took, and the clients of which no round has taken an answer."""
        query = """SELECT * FROM flights WHERE cell = ? AND (taken IS NULL OR taken = ?)
            ORDER BY version, client"""
        return self._rows(query, cell, round)

    def at_work(self, cell: str) -> list[int]:
        """Return the clients that have started and not answered."""
        query = """SELECT client FROM flights WHERE cell = ? AND taken IS NULL AND NOT EXISTS (SELECT 1 FROM updates
            WHERE (cell, round, client) = (flights.cell, flights.version, flights.client))"""
        return [row["client"] for row in self._rows(query, cell)]

    def take(self, cell: str, round: int | None, answers: Iterable[tuple[int, int]]) -> None:
        """Record which answers a round takes, by version and client, or None; on the disk when this returns."""
        faults.point("ledger.take")
        with self._transaction() as database:
            statement = "UPDATE flights SET taken = ? WHERE cell = ? AND version = ? AND client = ?"
            database.executemany(statement, [(round, cell, *answer) for answer in answers])
        faults.point("ledger.taken")

    def versions_in_use(self, cell: str, round: int) -> set[int]:
        """Return the versions that answers of rounds after this one start from."""
        query = "SELECT DISTINCT version FROM flights WHERE cell = ? AND (taken IS NULL OR taken > ?)"
        return {row["version"] for row in self._rows(query, cell, round)}

    def first_unsaved(self, cell: str, client: int, durable: int) -> int | None:
        """Return the first version whose answer by a client no round up to the oldest checkpoint took."""
        query = """SELECT min(version) AS version FROM flights
            WHERE cell = ? AND client = ? AND (taken IS NULL OR taken > ?)"""
        (found,) = self._rows(query, cell, client, durable)
        return None if found["version"] is None else int(found["version"])

    # --- what is no longer needed

    def forget(self, cell: str, round: int) -> None:
        """Delete the updates up to a round that is checkpointed, but those that no round up to it has taken."""
        faults.point("ledger.forget")
        kept = f"EXISTS ({FLIGHT} AND (taken IS NULL OR taken > ?))"
        self._forget_updates(f"cell = ? AND round <= ? AND NOT {kept}", cell, round, round)
        done = "UPDATE flights SET assignment = '' WHERE cell = ? AND taken <= ? AND assignment != ''"
        self._write(done, cell, round, durable=False)

    def forget_after(self, cell: str, round: int) -> None:
        """Delete what is known about the rounds after this one, because the run returns to it."""
        self._forget_updates("cell = ? AND round > ?", cell, round)
        with self._transaction() as database:
            for table in ("left_out", "attempts", "rosters"):
                database.execute(f"DELETE FROM {table} WHERE cell = ? AND round > ?", (cell, round))
            database.execute("DELETE FROM flights WHERE cell = ? AND version > ?", (cell, round))
            database.execute("UPDATE flights SET taken = NULL WHERE cell = ? AND taken > ?", (cell, round))

    def forget_untaken(self, cell: str) -> None:
        """Delete the answers that no round has taken, because no round follows."""
        self._forget_updates(f"cell = ? AND EXISTS ({FLIGHT} AND taken IS NULL)", cell)

    def _forget_updates(self, which: str, *values: Any) -> None:
        rows = self._rows(f"SELECT file FROM updates WHERE {which}", *values)
        if rows:
            self._write(f"DELETE FROM updates WHERE {which}", *values, durable=False)
        for row in rows:
            (self.updates / row["file"]).unlink(missing_ok=True)

    def forget_closed(self, label: str, seed: int, checkpoints: Path) -> None:
        """Delete the updates of a cell whose rounds are checkpointed, so closed for good."""
        _, newest = kept(checkpoints)
        if newest:
            self.forget(f"{label}-{seed}", newest)

    def sweep(self) -> None:
        """Delete bodies without a row: uploads that a crash interrupted."""
        known = {row["file"] for row in self._rows("SELECT file FROM updates")}
        for file in self.updates.iterdir():
            if file.name not in known:
                file.unlink(missing_ok=True)

    # --- what happened

    def note(self, kind: str, message: str, agent: str | None = None) -> None:
        statement = "INSERT INTO events (time, agent, kind, message) VALUES (?, ?, ?, ?)"
        self._write(statement, time.time(), agent, kind, message, durable=False)

    # --- for people who look from outside

    def last_events(self, most: int) -> list[Row]:
        """Return the last events, the newest first."""
        return self._rows("SELECT time, agent, kind, message FROM events ORDER BY id DESC LIMIT ?", most)

    def round_counts(self) -> dict[str, int]:
        """Return how many rounds were accepted, abandoned or are running. Of several attempts the last one counts."""
        query = "SELECT status, max(attempt) FROM attempts GROUP BY cell, round"
        statuses = [row["status"] for row in self._rows(query)]
        return {status: statuses.count(status) for status in ("accepted", "abandoned", "running")}

    def size(self) -> int:
        """Return the bytes of the database and of the updates that it holds."""
        total = 0
        for file in (*self.folder.glob("ledger.db*"), *self.updates.iterdir()):
            with suppress(FileNotFoundError):  # a round that ends deletes its updates
                total += file.stat().st_size
        return total

    def audit_records(self) -> Iterator[Row]:
        """Yield agents, clients, rounds and events. Raise `StoreError` if the database is damaged."""
        (found, *_) = self._rows("PRAGMA integrity_check")
        if found["integrity_check"] != "ok":
            raise StoreError(f"The coordinator's ledger in {self.folder} is damaged: {found['integrity_check']}.")
        for record, query in AUDITED.items():
            for row in self._rows(query):
                yield {"record": record, **row}


def _is_undamaged(path: Path, sha256: str) -> bool:
    try:
        return files.sha256(path) == sha256
    except OSError:
        return False
