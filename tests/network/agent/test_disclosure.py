"""What others learn about an error, and what the audit log says."""

from __future__ import annotations

import json
from pathlib import Path

from fedloom.errors import TrainingError
from fedloom.network.agent.disclosure import Audit, error_summary


def test_an_error_is_reported_without_the_values_in_its_message() -> None:
    def model() -> None:
        raise ValueError("could not convert 'Jane Doe' to float")

    try:
        try:
            model()
        except ValueError as error:
            raise TrainingError(f"Round 1, client 'a', training: {error}") from error
    except TrainingError as error:
        told = error_summary(error)
    assert "Jane" not in told
    assert told.startswith("ValueError (its message stays at the site)\n")
    assert told.endswith("in model")
    assert error_summary(TrainingError("the loss is not finite")) == "the loss is not finite"
    assert error_summary(OSError(28, "No space left on device")) == "OSError: No space left on device"


def test_the_audit_log_continues_after_half_a_line(tmp_path: Path) -> None:
    Audit(tmp_path / "audit.jsonl").write("hello", clients=1)
    with open(tmp_path / "audit.jsonl", "a") as file:
        file.write('{"time": "2026')
    Audit(tmp_path / "audit.jsonl").write("answered", round=1)
    first, half, last = (tmp_path / "audit.jsonl").read_text().splitlines()
    assert (json.loads(first)["event"], json.loads(last)["event"]) == ("hello", "answered")
    assert half == '{"time": "2026'
