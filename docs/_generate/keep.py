"""Keeps the results of a reproduction: copies its reproduction.json into docs/reproductions/results.

    python docs/_generate/keep.py mcmahan-table2 runs/reproduce-mcmahan-table2
    python docs/_generate/keep.py postures runs/reproduce-postures --data 'users 0 to 2, classes 1 to 3'

A row that was run in the same way before is replaced. If it was not the published data, `--data` says in words which
data it was, instead of the changed keys of [data]. Then name the weights on the page of the reproduction, and run
`make summary`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from fedloom.files import write_atomically

RESULTS = Path(__file__).parents[1] / "reproductions" / "results"


def keep(name: str, run: Path, data: str = "", results: Path = RESULTS) -> None:
    """Put the records of a run beside those of earlier ones."""
    path = results / f"{name}.json"
    kept = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    found = {_way(record): record for record in kept}
    for record in json.loads((run / "reproduction.json").read_text(encoding="utf-8")):
        changes = {key: value for key, value in record["changes"].items() if key != "data.path"}
        if data:
            changes = {key: value for key, value in changes.items() if not key.startswith("data.")} | {"data": data}
        record = _rounded({**record, "changes": changes})
        found[_way(record)] = record
    lines = ",\n".join(json.dumps(record, ensure_ascii=False) for record in found.values())
    write_atomically(path, f"[\n{lines}\n]\n".encode())


def _way(record: dict[str, Any]) -> tuple[Any, ...]:
    """Return the row and how it was run; more seeds replace fewer."""
    return record["row"], *sorted((key, value) for key, value in record["changes"].items() if key != "seeds")


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return round(value, 4) if isinstance(value, float) else value


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="the reproduction")
    parser.add_argument("run", type=Path, help="the folder of the run")
    parser.add_argument("--data", default="", help="which data it was")
    options = parser.parse_args()
    keep(options.name, options.run, options.data)
