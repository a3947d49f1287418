"""The audit log: what it holds after a crash, and who notices when it is changed."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from fedloom.errors import InputError, StoreError
from fedloom.network.agent.audit_log import AuditLog, verify
from fedloom.network.protocol.signatures import Signer


def log(folder: Path) -> AuditLog:
    return AuditLog(folder / "audit.jsonl", Signer(folder / "agent.key"))


def test_a_log_continues_after_half_a_line(tmp_path: Path) -> None:
    log(tmp_path).write("hello", clients=1)
    with open(tmp_path / "audit.jsonl", "a") as file:
        file.write('{"time": "2026')
    log(tmp_path).write("answered", round=1)
    first, half, last = (tmp_path / "audit.jsonl").read_text().splitlines()
    assert (json.loads(first)["event"], json.loads(last)["event"]) == ("hello", "answered")
    assert half == '{"time": "2026'
    assert [event["event"] for event in log(tmp_path).events()] == ["hello", "answered"]
    shown = list(verify(tmp_path / "audit.jsonl", Signer(tmp_path / "agent.key").public))
    assert shown[0].startswith("1 line(s) have no signature")
    assert shown[1].startswith("2 signed line(s) are as the agent wrote them")


def test_a_text_that_is_not_valid_unicode_is_logged_and_verified(tmp_path: Path) -> None:
    log(tmp_path).write("refused", why="no split '\ud800' é")
    assert [event["why"] for event in log(tmp_path).events()] == ["no split '\ud800' é"]
    shown = list(verify(tmp_path / "audit.jsonl", Signer(tmp_path / "agent.key").public))
    assert shown[0].startswith("1 signed line(s) are as the agent wrote them")


@pytest.mark.parametrize("change", ["edit", "remove", "swap", "forge", "cut"])
def test_a_changed_line_is_found(tmp_path: Path, change: str) -> None:
    for round in range(4):
        log(tmp_path).write("answered", round=round, why="é")
    path, key = tmp_path / "audit.jsonl", Signer(tmp_path / "agent.key").public
    assert next(iter(verify(path, key))).startswith("4 signed line(s)")
    lines = path.read_bytes().splitlines()
    if change == "edit":
        lines[1] = lines[1].replace(b'"round": 1', b'"round": 7')
    elif change == "remove":
        del lines[1]
    elif change == "swap":
        lines[1], lines[2] = lines[2], lines[1]
    elif change == "forge":
        other = AuditLog(tmp_path / "other.jsonl", Signer(tmp_path / "other.key"))
        other._previous = json.loads(lines[1])["previous"]
        other.write("answered", round=1)
        lines[1] = (tmp_path / "other.jsonl").read_bytes().strip()
    else:
        lines[1] = lines[1][:-60]
    path.write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(InputError, match=r"audit\.jsonl, line [23]: "):
        list(verify(path, key))


def test_a_line_that_a_full_disk_cuts_off_leaves_no_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = log(tmp_path)
    written.write("hello")
    open_file = open

    def short(*given: Any, **more: Any) -> Any:
        file = open_file(*given, **more)
        real = file.write

        class Short:
            def __enter__(self) -> Any:
                return self

            def __exit__(self, *_: object) -> None:
                file.close()

            def write(self, data: bytes) -> int:
                return int(real(data[:10]))

            tell, truncate = file.tell, file.truncate

        return Short()

    monkeypatch.setattr("builtins.open", short)
    with pytest.raises(StoreError, match=f"Errno {errno.ENOSPC}"):
        written.write("answered")
    monkeypatch.undo()
    written.write("answered", round=2)
    assert next(iter(verify(tmp_path / "audit.jsonl", Signer(tmp_path / "agent.key").public))).startswith("2 signed")
