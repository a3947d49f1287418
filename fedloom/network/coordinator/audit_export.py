"""A coordinator's ledger as a file for auditors: agents, clients, rounds, and what happened, refusals included."""

from __future__ import annotations

import csv
import io
import json
from datetime import datetime, timezone
from pathlib import Path

from fedloom.errors import InputError
from fedloom.files import write_private
from fedloom.network.coordinator.ledger import Ledger, Row
from fedloom.results.safe_text import for_spreadsheet, visible


def export_audit(ledger: Ledger, path: Path) -> int:
    """Write the ledger's records as JSON lines or CSV, which the suffix says, and return how many there are."""
    if path.suffix not in (".jsonl", ".csv"):
        raise InputError(f"{path.name} must end in .jsonl (JSON lines) or .csv.")
    rows = [_with_dates(row) for row in ledger.audit_records()]
    if path.suffix == ".jsonl":
        text = "".join(json.dumps(row) + "\n" for row in rows)
    else:
        out = io.StringIO()
        columns = dict.fromkeys(key for row in rows for key in row)
        writer = csv.DictWriter(out, list(columns), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            texts = {key: for_spreadsheet(visible(value)) for key, value in row.items() if isinstance(value, str)}
            writer.writerow({**row, **texts})
        text = out.getvalue()
    write_private(path, text.encode())
    return len(rows)


def _with_dates(row: Row) -> Row:
    dates = {key: row[key] for key in ("time", "revoked") if row.get(key) is not None}
    return {**row, **{key: datetime.fromtimestamp(moment, timezone.utc).isoformat() for key, moment in dates.items()}}
