-- The tables of a coordinator's ledger. Columns that later versions added are also in ADDED (ledger.py).

CREATE TABLE IF NOT EXISTS tokens (digest TEXT PRIMARY KEY, made REAL NOT NULL, agent TEXT,
    expires REAL, replaces TEXT, late INTEGER);
CREATE TABLE IF NOT EXISTS agents (agent TEXT PRIMARY KEY, name TEXT NOT NULL UNIQUE, key TEXT NOT NULL UNIQUE,
    enrolled REAL NOT NULL, revoked REAL, hello TEXT, replaced REAL, mark TEXT, pins TEXT);
CREATE TABLE IF NOT EXISTS clients (client INTEGER PRIMARY KEY, agent TEXT NOT NULL REFERENCES agents,
    local INTEGER NOT NULL, name TEXT NOT NULL, late INTEGER);
CREATE TABLE IF NOT EXISTS rosters (cell TEXT, round INTEGER, clients INTEGER NOT NULL, replaced TEXT NOT NULL,
    PRIMARY KEY (cell, round));
CREATE TABLE IF NOT EXISTS attempts (cell TEXT, round INTEGER, attempt INTEGER, began REAL NOT NULL,
    asked INTEGER NOT NULL, accepted INTEGER, status TEXT NOT NULL, PRIMARY KEY (cell, round, attempt));
CREATE TABLE IF NOT EXISTS updates (cell TEXT, round INTEGER, call INTEGER, client INTEGER, digest TEXT NOT NULL,
    file TEXT NOT NULL, sha256 TEXT NOT NULL, PRIMARY KEY (cell, round, call, client));
CREATE TABLE IF NOT EXISTS flights (cell TEXT, version INTEGER, client INTEGER, assignment TEXT NOT NULL,
    taken INTEGER, PRIMARY KEY (cell, version, client));
CREATE INDEX IF NOT EXISTS taken_flights ON flights (cell, taken);
CREATE TABLE IF NOT EXISTS left_out (cell TEXT, round INTEGER, call INTEGER, client INTEGER, why TEXT NOT NULL,
    PRIMARY KEY (cell, round, client));
CREATE TABLE IF NOT EXISTS events (id INTEGER PRIMARY KEY, time REAL NOT NULL, agent TEXT, kind TEXT NOT NULL,
    message TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS facts (key TEXT PRIMARY KEY, value TEXT NOT NULL);
