"""The tables of docs/how-to/compression.md, from what `benchmarks/accuracy_and_bytes.py` stored.

    python docs/_generate/compression_results.py

`docs/how-to/compression-results` has its files, with a record for each method. A test compares the page with them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

FOLDER = Path(__file__).parents[1] / "how-to" / "compression-results"


def tables() -> list[str]:
    """Return the tables in the order of the page."""
    mnist, next_word, same = (_records(name) for name in ("mnist", "next-word", "mnist-same-clients"))
    rows = [(_method(record), record) for record in mnist if "held_back" in record]
    rows += [(f"{_method(record)}, the same ten clients", record) for record in same if "held_back" in record]
    return [_costs(mnist), _costs(next_word), _held_back(rows)]


def _records(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return found


def _costs(records: Sequence[dict[str, Any]]) -> str:
    plain = mean(next(record for record in records if not record["up"])["bytes_up"])
    rows = []
    for record in records:
        sent = mean(record["bytes_up"])
        accuracy = _percent(record["accuracy"])
        rows.append((_method(record), accuracy, f"{sent / 1e6:.1f} MB", f"{plain / sent:.1f}"))
    return _table(("`up`", "test accuracy", "sent by clients", "times fewer"), rows)


def _held_back(rows: Sequence[tuple[str, dict[str, Any]]]) -> str:
    columns = ("`up`", "held back / the model's change", "test accuracy", "with all that is held back")
    return _table(
        columns,
        [
            (name, f"{mean(one['held_back']):.2f}", _percent(one["accuracy"]), _percent(one["accuracy_with_it"]))
            for name, one in rows
        ],
    )


def _method(record: dict[str, Any]) -> str:
    return f"`{record['up']}`" if record["up"] else "nothing"


def _percent(shares: Sequence[float]) -> str:
    return f"{100 * mean(shares):.2f} % ± {100 * stdev(shares):.2f}"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ("---", *["---:"] * (len(columns) - 1)), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    sys.stdout.write("\n\n".join(tables()) + "\n")
