"""The database of a run folder: what every cell (one algorithm label × one seed) measured, round by round.

One process writes while any number of others read. An undefined value (the AUROC of a single class) is None.
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedloom import files
from fedloom.data.federation import Federation
from fedloom.data.split import SPLITS
from fedloom.errors import InputError, StoreError, nearest
from fedloom.experiment.round_rows import fetching, tabulate
from fedloom.federation.engine import RoundRecord
from fedloom.task import Task

Row = dict[str, Any]
Status = Literal["waiting", "running", "done", "stopped", "failed"]

APPLICATION = 0x666C6F6D  # marks a database as fedloom's
SCHEMA = (Path(__file__).parent / "templates" / "schema.sql").read_text(encoding="utf-8")
PER_ROUND = tuple(re.findall(r"CREATE TABLE (\w+) \(\s+cell ", SCHEMA))  # what rounds write: the cell comes first
# One tuple of statements per schema version.
MIGRATIONS: tuple[tuple[str, ...], ...] = tuple(
    tuple(statement.strip() for statement in version.split(";")[:-1])
    for version in re.split(r"-- version \d+\n", SCHEMA)[1:]
)
TABLES = (*PER_ROUND, "cells", "clients", "metrics", "facts")
OWN_MODELS = "own models"  # a fact: the labels of algorithms whose clients use models of their own
# The pooled baseline trains a client that does not exist, numbered after the last one that does.
CLIENT_NAME = """coalesce(clients.name, CASE t.client WHEN (SELECT max(client) + 1 FROM clients) THEN 'everyone'
    ELSE CAST(t.client AS TEXT) END) AS client"""
# The last round that has a phase is what a summary is about. A single undefined value of a mean over examples leaves no
# mean; other metrics, such as the AUROC of a client with one class, are left out where they are undefined.
CLIENT_MEANS = """SELECT split, metric, avg(value) FROM client_metrics JOIN metrics USING (metric)
    WHERE cell = :cell AND phase = :phase AND round = :round
    GROUP BY split, metric HAVING count(value) = count(*) OR (count(value) AND NOT is_mean)"""
LAST = "SELECT round FROM client_metrics WHERE cell = ? AND phase = ? ORDER BY round DESC LIMIT 1"
# The last round before which the pooled model was measured: a round of which the others have values, or the next one.
LAST_POOLED = """SELECT max(round) FROM client_metrics WHERE cell = ? AND phase = 'pre_fit' AND round - ? IN
    (SELECT round FROM client_metrics WHERE cell = ? AND phase = 'post_fit')"""
POOLED = """SELECT split, metric, value FROM pooled_metrics WHERE cell = :cell AND phase = :phase AND value NOTNULL
    AND round = (SELECT max(round) FROM pooled_metrics WHERE cell = :cell AND phase = :phase)"""
SERVER = """SELECT split, metric, value FROM server_metrics WHERE cell = :cell AND value NOTNULL
    AND round = (SELECT max(round) FROM server_metrics WHERE cell = :cell)"""


class Store:
    """The database `run.db` of a run folder, for one `with` block.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, Store(folder) as store:
    ...     store.set_status(store.cell("fedavg", seed=1), "running")
    ...     [(cell["label"], cell["seed"], cell["status"]) for cell in store.cells()]
    [('fedavg', 1, 'running')]
    """

    def __init__(self, folder: str | Path, *, read_only: bool = False, timeout: float = 30.0) -> None:
        self.path = Path(folder) / "run.db"
        self.read_only = read_only
        if read_only and not self.path.is_file():
            raise StoreError(f"There is no run in {folder}: {self.path} does not exist.")
        try:
            if not read_only:
                files.make_private_database(self.path)
            uri = _uri(self.path, read_only)
            # a store may be made in one thread and used in another, never in two at once
            self._database = sqlite3.connect(
                uri, uri=True, timeout=timeout, isolation_level=None, check_same_thread=False
            )
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"The run's database {self.path} cannot be opened: {error}.") from error
        try:
            self._prepare()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def cell(self, label: str, seed: int) -> int:
        """Return the number of a cell; a new one is added."""
        with self._transaction() as database:
            database.execute("INSERT OR IGNORE INTO cells (label, seed) VALUES (?, ?)", (label, seed))
            found = database.execute("SELECT id FROM cells WHERE label = ? AND seed = ?", (label, seed))
            return int(found.fetchone()[0])

    def cells(self) -> list[Row]:
        """Return all cells in the order in which they were added."""
        return self.rows("cells")

    def set_status(
        self, cell: int, status: Status, *, weights_sha256: str | None = None, error: str | None = None
    ) -> None:
        """Record the status of a cell, and since when. A cell that continues loses its earlier end."""
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        with self._transaction() as database:
            if status in ("waiting", "running"):
                _update(database, cell, "weights_sha256 = NULL, error = NULL, finished = NULL")
            else:
                _update(database, cell, "finished = ?", now)
            if status != "waiting":
                _update(database, cell, "started = coalesce(started, ?)", now)
            values = (status, weights_sha256, error)
            _update(database, cell, "status = ?, weights_sha256 = coalesce(?, weights_sha256), error = ?", *values)

    def set_clients(self, federation: Federation) -> None:
        """Record the clients' names and numbers of examples."""
        sizes = zip(*(federation.sizes(split).tolist() for split in SPLITS), strict=True)
        rows = ((client, federation.name(client), *parts) for client, parts in enumerate(sizes))
        with self._transaction() as database:
            database.execute("DELETE FROM clients")
            database.executemany("INSERT INTO clients VALUES (?, ?, ?, ?, ?)", rows)
        self.set_policies(federation)

    def set_policies(self, federation: Federation) -> None:
        """Record what the policies of sites on a network say about metrics."""
        self.set_fact("withheld", federation.withheld)
        self.set_fact("sending scores", federation.sending_scores)

    def save(self, cell: int, record: RoundRecord, task: Task, *, durable: bool = False) -> None:
        """Save one round, all or nothing; saving a round again replaces it.

        `durable` waits for the disk, so that a checkpoint made afterwards is not ahead of the store after a power cut.
        """
        here = (cell, record.round)
        first: set[int] = set()
        if task.frozen:
            earlier = "SELECT DISTINCT client FROM participants WHERE cell = ? AND round < ?"
            first = fetching(record, (client for (client,) in self._database.execute(earlier, here)))
        tables = tabulate(record, task, first)
        with self._transaction(durable=durable) as database:
            _update(database, cell, "rounds_done = max(rounds_done, ?)", record.round)
            if database.execute("SELECT 1 FROM rounds WHERE cell = ? AND round = ?", here).fetchone():
                for table in PER_ROUND:
                    database.execute(f"DELETE FROM {table} WHERE cell = ? AND round = ?", here)
            # the run continues, so what was final until now no longer is
            (before,) = database.execute("SELECT max(round) FROM rounds WHERE cell = ? AND round < ?", here).fetchone()
            for table in ("client_metrics", "pooled_metrics"):
                stale = f"DELETE FROM {table} WHERE cell = ? AND round = ? AND phase IN ('final', 'universal')"
                database.execute(stale, (cell, before))
            for table, rows in tables.items():
                if rows:
                    places = ", ".join("?" * (1 + len(rows[0])))
                    database.executemany(f"INSERT INTO {table} VALUES ({places})", ((cell, *row) for row in rows))
            kinds = [("loss", True, False), *((m.name, m.is_mean, m.higher_is_better) for m in task.measures)]
            database.executemany("INSERT OR REPLACE INTO metrics VALUES (?, ?, ?)", kinds)

    def forget_after(self, cell: int, round: int) -> None:
        """Delete the rounds after this one: a run that continues from a checkpoint computes them again."""
        with self._transaction() as database:
            _update(database, cell, "rounds_done = min(rounds_done, ?)", round)
            for table in PER_ROUND:
                database.execute(f"DELETE FROM {table} WHERE cell = ? AND round > ?", (cell, round))

    def lost(self, cell: int, round: int) -> list[int]:
        """Return the rounds up to one that are not in the database, though the cell computed them."""
        with self._transaction("BEGIN") as database:
            known = {number for (number,) in database.execute("SELECT round FROM rounds WHERE cell = ?", (cell,))}
        return [number for number in range(1, round + 1) if number not in known]

    def forget_all(self) -> None:
        """Delete everything: for a run that never reached its first round."""
        with self._transaction() as database:
            for table in TABLES:
                database.execute(f"DELETE FROM {table}")

    def rows(self, table: str, cell: int | None = None, after: int = -1) -> list[Row]:
        """Return the rows of a table, in order, with clients by name; of rounds, those of a cell after one of them."""
        if table not in TABLES:
            known = ", ".join(TABLES)
            raise InputError(f"There is no table '{table}' in a run. Known: {known}.{nearest(table, TABLES)}")
        with self._transaction("BEGIN") as database:
            cursor = _select(database, table, cell, after)
            names = [column[0] for column in cursor.description]
            return [dict(zip(names, row, strict=True)) for row in cursor]

    def columns(self, table: str) -> list[str]:
        """Return the names that the rows of a table have."""
        with self._transaction("BEGIN") as database:
            return [column[0] for column in _select(database, table).description]

    def client_values(self, cell: int, phase: str, split: str, metric: str, after: int = -1) -> NDArray[np.float64]:
        """Return round, client number and value of one metric of one cell, in the rounds after one of them.

        This is faster than `rows` for many clients. An undefined value is infinite.
        """
        query = """SELECT round, client, ifnull(value, 9e999) FROM client_metrics WHERE cell = ? AND round > ? AND
            phase = ? AND split = ? AND metric = ? ORDER BY round, client"""
        return self._numbers(query, 3, cell, after, phase, split, metric)

    def participations(self, cell: int, after: int = -1) -> NDArray[np.float64]:
        """Return round, client number, bytes up and bytes down of every participation in the rounds after one."""
        query = """SELECT round, client, bytes_up, bytes_down FROM participants WHERE cell = ? AND round > ?
            ORDER BY round, client"""
        return self._numbers(query, 4, cell, after)

    def marked(self, cell: int, name: str, statuses: Sequence[str] = (), after: int = -1) -> NDArray[np.float64]:
        """Return round and number of clients that a round after one is marked with, or that had one of these statuses.

        Marks are public numbers, such as `left_out`; statuses are those of the virtual clock.
        """
        query = f"""SELECT round, client FROM public_numbers WHERE cell = ? AND round > ? AND name = ? UNION
            SELECT round, client FROM client_times WHERE cell = ? AND round > ? AND
            status IN ({", ".join("?" * len(statuses))}) ORDER BY 1, 2"""
        return self._numbers(query, 2, cell, after, name, cell, after, *statuses)

    def _numbers(self, query: str, columns: int, *values: Any) -> NDArray[np.float64]:
        with self._transaction("BEGIN") as database:
            rows = database.execute(query, values).fetchall()
        flat = np.fromiter(chain.from_iterable(rows), np.float64, columns * len(rows))
        return flat.reshape(-1, columns)

    def is_pooled(self, cell: int) -> bool:
        """Return whether the cell trained on everybody's examples in one place."""
        with self._transaction("BEGIN") as database:
            query = "SELECT client = (SELECT max(client) + 1 FROM clients) FROM participants WHERE cell = ? LIMIT 1"
            found = database.execute(query, (cell,)).fetchone()
            return found is not None and bool(found[0])

    def trained_rounds(self, cell: int) -> set[int]:
        """Return the rounds after whose training a cell was measured."""
        query = "SELECT DISTINCT round FROM client_metrics WHERE cell = ? AND phase = 'post_fit'"
        return set(self._numbers(query, 1, cell)[:, 0].astype(int).tolist())

    def abandoned(self, cell: int) -> int:
        """Return how many rounds did not count."""
        with self._transaction("BEGIN") as database:
            query = "SELECT count(*) FROM rounds WHERE cell = ? AND NOT complete"
            return int(database.execute(query, (cell,)).fetchone()[0])

    def learnt(self, cell: int) -> bool:
        """Return whether clients took part in a round that counted."""
        with self._transaction("BEGIN") as database:
            query = "SELECT 1 FROM rounds WHERE cell = ? AND complete AND participants LIMIT 1"
            return database.execute(query, (cell,)).fetchone() is not None

    def summary(self, cell: int) -> dict[str, float]:
        """Return the final numbers of a cell that are defined.

        `test_accuracy` is the mean over clients at the end of the run, where each client counts once; in
        `pooled_test_accuracy` each example counts once. `post_fit_…` and `pre_fit_…` are the same for the last measured
        round, `universal_accuracy` is the mean over the clients' models on all test data, `server_test_accuracy` is
        the global model on the server's data. For a metric that is not a mean over examples (AUROC), the mean is over
        the clients where it is defined, and the pooled value ranks the scores of all clients together.

        Before training and at the end, a pooled number is that of one model on all tests. It is left out if clients
        have models of their own: each would be tested on its own part, which says nothing about all tests.

        The pooled baseline trains at no client, so after training its clients have the model that comes next: the one
        before the next round, or at the end.
        """
        found: dict[str, float] = {}
        own_models, pooled = self.fact(OWN_MODELS) or (), self.is_pooled(cell)
        with self._transaction("BEGIN") as database:
            label = database.execute("SELECT label FROM cells WHERE id = ?", (cell,)).fetchone()
            shared = label is None or label[0] not in own_models
            for phase in ("final", "post_fit", "pre_fit", "universal"):
                prefix = "" if phase == "final" else f"{phase}_"
                where = {"cell": cell} | dict(
                    zip(("phase", "round"), _last(database, cell, phase, pooled), strict=True)
                )
                for split, metric, value in database.execute(CLIENT_MEANS, where):
                    found[prefix + (metric if phase == "universal" else f"{split}_{metric}")] = value
                if not shared and phase != "post_fit":
                    continue
                for split, metric, value in database.execute(POOLED, {"cell": cell, "phase": phase}):
                    found[f"pooled_{prefix}{split}_{metric}"] = value
            for split, metric, value in database.execute(SERVER, {"cell": cell}):
                found[f"server_{split}_{metric}"] = value
        return found

    def set_fact(self, key: str, value: Any) -> None:
        """Record a fact about the run, such as versions or the machine; any JSON value."""
        with self._transaction() as database:
            database.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (key, json.dumps(value)))

    def fact(self, key: str) -> Any:
        """Return a fact, or None."""
        return self.facts().get(key)

    def facts(self) -> dict[str, Any]:
        """Return all facts about the run."""
        return {row["key"]: json.loads(row["value"]) for row in self.rows("facts")}

    def _prepare(self) -> None:
        """Bring the file to this version's schema, or raise an error that says why it cannot be."""
        latest = len(MIGRATIONS)
        with self._transaction("BEGIN") as database:
            (application,) = database.execute("PRAGMA application_id").fetchone()
            (version,) = database.execute("PRAGMA user_version").fetchone()
            (tables,) = database.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if tables and application != APPLICATION:
            raise StoreError(
                f"{self.path} is a database that fedloom did not write. Choose another folder for the run."
            )
        if version > latest:
            raise StoreError(
                f"{self.path} has version {version} of the schema, and this fedloom knows versions up to {latest}. "
                "A newer fedloom wrote it: update fedloom to use it."
            )
        if self.read_only:
            if version < latest:
                raise StoreError(
                    f"{self.path} has version {version} of the schema, and this fedloom reads version {latest}. "
                    "Open it for writing once, which brings it up to date: Store(folder)."
                )
            return
        with _in_words(self.path):
            for pragma in ("journal_mode = WAL", "synchronous = NORMAL", "foreign_keys = ON"):
                self._database.execute(f"PRAGMA {pragma}")
        if version < latest:
            with self._transaction() as database:
                (version,) = database.execute("PRAGMA user_version").fetchone()  # another process may be done already
                for statement in (statement for migration in MIGRATIONS[version:] for statement in migration):
                    database.execute(statement)
                database.execute(f"PRAGMA application_id = {APPLICATION}")
                database.execute(f"PRAGMA user_version = {latest}")

    @contextmanager
    def _transaction(self, begin: str = "BEGIN IMMEDIATE", *, durable: bool = False) -> Iterator[sqlite3.Connection]:
        """Do all or nothing, with errors in words."""
        with _in_words(self.path):
            try:
                if durable:
                    self._database.execute("PRAGMA synchronous = FULL")
                self._database.execute(begin)
                yield self._database
                self._database.execute("COMMIT")
            finally:
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
                if durable:
                    self._database.execute("PRAGMA synchronous = NORMAL")


def _last(database: sqlite3.Connection, cell: int, phase: str, pooled: bool) -> tuple[str, int | None]:
    """Return the stored phase that says how a phase of a cell ended, and its last round."""
    if pooled and phase == "post_fit" and database.execute(LAST, (cell, "final")).fetchone():
        phase = "final"
    if pooled and phase in ("pre_fit", "post_fit"):
        (round,) = database.execute(LAST_POOLED, (cell, int(phase == "post_fit"), cell)).fetchone()
        return "pre_fit", round
    found = database.execute(LAST, (cell, phase)).fetchone()
    return phase, found[0] if found else None


def no_run(folder: Path) -> str:
    """Return why there is no run to read in a folder."""
    if folder.suffix == ".toml" and folder.is_file():
        return f"{folder} is an experiment file. Give the folder of its run, such as runs/{folder.stem}."
    lacking = "run.db in it" if folder.exists() else "such folder"
    return (
        f"{folder} is not a run folder: there is no {lacking}. Check its name, or start the run first: `fedloom run "
        f"FILE` makes runs/NAME. If you just did, wait for its first lines.{nearest(folder.name, runs_beside(folder))}"
    )


def runs_beside(folder: Path) -> list[str]:
    """Return the names of the runs in the same folder."""
    return sorted(path.parent.name for path in folder.parent.glob("*/run.db"))


def _select(database: sqlite3.Connection, table: str, cell: int | None = None, after: int = -1) -> sqlite3.Cursor:
    query = _tidy(database, table) if table in PER_ROUND else f"SELECT * FROM {table} ORDER BY 1"
    return database.execute(query, {"cell": cell, "after": after})


def _tidy(database: sqlite3.Connection, table: str) -> str:
    """Return the query for a table of rounds, in the order of its key, with algorithm, seed and clients by name."""
    _, *about = database.execute("SELECT name, pk FROM pragma_table_info(?)", (table,))  # the first is the cell
    columns = ", ".join(CLIENT_NAME if name == "client" else f"t.{name}" for name, _ in about)
    named = " LEFT JOIN clients ON clients.client = t.client" if "client" in dict(about) else ""
    order = ", ".join(f"t.{name}" for name, in_key in about if in_key)
    source = f"cells JOIN {table} AS t ON t.cell = cells.id{named}"
    here = "(:cell IS NULL OR cells.id = :cell) AND t.round > :after"
    return (
        f"SELECT cells.label AS algorithm, cells.seed, {columns} FROM {source} WHERE {here} ORDER BY cells.id, {order}"
    )


def _update(database: sqlite3.Connection, cell: int, change: str, *values: str | int | None) -> None:
    if not database.execute(f"UPDATE cells SET {change} WHERE id = ?", (*values, cell)).rowcount:
        raise StoreError(f"There is no cell {cell} in the run: make it with Store.cell(label, seed).")


def _uri(path: Path, read_only: bool) -> str:
    # reading a WAL database writes beside it; if that is forbidden and no process writes, read the file alone
    alone = read_only and not os.access(path.parent, os.W_OK) and not path.with_name(f"{path.name}-wal").exists()
    return f"{path.resolve().as_uri()}?mode={'ro' if read_only else 'rwc'}{'&immutable=1' if alone else ''}"


@contextmanager
def _in_words(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        said = str(error)
        if "locked" in said:
            message = f"The run's database {path} is locked: another process writes to it. Wait for it, or stop it."
        elif "not a database" in said or "malformed" in said:
            message = f"{path} is damaged or not a database ({said}). Restore it, or choose another folder."
        else:
            message = f"The run's database {path} cannot be used: {said}."
        raise StoreError(message) from error
