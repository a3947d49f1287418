"""What clients could not do is said in words: how many, and why the first one did not."""

from __future__ import annotations

from fedloom.network.coordinator.failures import nobody_could_work, reasons_of
from fedloom.network.protocol.messages import Failure


def test_errors_come_before_refusals() -> None:
    refused = Failure(ask="ask", clients=(0,), kind="refused", message="not here")
    failed = Failure(ask="ask", clients=(1,), kind="error", message="no memory")
    said = reasons_of({0: refused, 1: failed, 2: refused}, ["kerry", "clare", "cork"].__getitem__)
    assert said == "Clients that failed: 1, refused or rejected: 2. The first is 'clare': no memory"
    assert reasons_of({}, str) == ""
    assert str(nobody_could_work(3, said)).startswith("Round 3: no client could do its work. Correct the cause, and ")
