-- The tables of a run's database. A version is never changed once it is released: a new version comes at the end.
-- Only values may be NULL: an undefined one is.

-- version 1
CREATE TABLE cells (
    id INTEGER PRIMARY KEY, label TEXT NOT NULL, seed INTEGER NOT NULL,
    status TEXT NOT NULL DEFAULT 'waiting' CHECK (status IN ('waiting', 'running', 'done', 'stopped', 'failed')),
    rounds_done INTEGER NOT NULL DEFAULT 0, weights_sha256 TEXT, error TEXT, started TEXT, finished TEXT,
    UNIQUE (label, seed)
);
CREATE TABLE rounds (
    cell INTEGER REFERENCES cells, round INTEGER, seconds REAL NOT NULL, participants INTEGER NOT NULL,
    complete INTEGER NOT NULL, bytes_up INTEGER NOT NULL, bytes_down INTEGER NOT NULL,
    PRIMARY KEY (cell, round)
) WITHOUT ROWID;
CREATE TABLE participants (
    cell INTEGER REFERENCES cells, round INTEGER, client INTEGER, bytes_up INTEGER NOT NULL, bytes_down INTEGER NOT NULL,
    PRIMARY KEY (cell, round, client)
) WITHOUT ROWID;
CREATE TABLE client_metrics (
    cell INTEGER REFERENCES cells, round INTEGER, client INTEGER, phase TEXT, split TEXT, metric TEXT, value REAL,
    examples INTEGER NOT NULL,
    PRIMARY KEY (cell, round, client, phase, split, metric)
) WITHOUT ROWID;
CREATE TABLE pooled_metrics (
    cell INTEGER REFERENCES cells, round INTEGER, phase TEXT, split TEXT, metric TEXT, value REAL,
    examples INTEGER NOT NULL,
    PRIMARY KEY (cell, round, phase, split, metric)
) WITHOUT ROWID;
CREATE TABLE server_metrics (
    cell INTEGER REFERENCES cells, round INTEGER, split TEXT, metric TEXT, value REAL, examples INTEGER NOT NULL,
    PRIMARY KEY (cell, round, split, metric)
) WITHOUT ROWID;
CREATE TABLE history (
    cell INTEGER REFERENCES cells, round INTEGER, client INTEGER, epoch INTEGER, metric TEXT, value REAL,
    PRIMARY KEY (cell, round, client, epoch, metric)
) WITHOUT ROWID;
CREATE TABLE clients (
    client INTEGER PRIMARY KEY, name TEXT NOT NULL,
    train INTEGER NOT NULL, validation INTEGER NOT NULL, test INTEGER NOT NULL
);
CREATE TABLE metrics (metric TEXT PRIMARY KEY, is_mean INTEGER NOT NULL, higher_is_better INTEGER NOT NULL);
CREATE TABLE facts (key TEXT PRIMARY KEY, value TEXT NOT NULL);

-- version 2
CREATE TABLE public_numbers (
    cell INTEGER REFERENCES cells, round INTEGER, client INTEGER, name TEXT, about INTEGER, value REAL,
    PRIMARY KEY (cell, round, client, name, about)
) WITHOUT ROWID;

-- version 3
CREATE TABLE times (
    cell INTEGER REFERENCES cells, round INTEGER, began REAL NOT NULL, ended REAL NOT NULL, available INTEGER NOT NULL,
    asked INTEGER NOT NULL,
    PRIMARY KEY (cell, round)
) WITHOUT ROWID;
CREATE TABLE client_times (
    cell INTEGER REFERENCES cells, round INTEGER, client INTEGER, status TEXT NOT NULL, began REAL NOT NULL,
    ended REAL NOT NULL, computing REAL NOT NULL, version INTEGER NOT NULL,
    PRIMARY KEY (cell, round, client)
) WITHOUT ROWID;
