"""The audit log."""

from __future__ import annotations

import json
from pathlib import Path

from fedloom.network.agent.audit import Audit


def test_the_audit_log_continues_after_half_a_line(tmp_path: Path) -> None:
    Audit(tmp_path / "audit.jsonl").write("hello", clients=1)
    with open(tmp_path / "audit.jsonl", "a") as file:
        file.write('{"time": "2026')
    Audit(tmp_path / "audit.jsonl").write("answered", round=1)
    first, half, last = (tmp_path / "audit.jsonl").read_text().splitlines()
    assert (json.loads(first)["event"], json.loads(last)["event"]) == ("hello", "answered")
    assert half == '{"time": "2026'
