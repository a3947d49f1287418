"""What clients could not do is said in words: how many, and why the first one did not."""

from __future__ import annotations

from fedloom.network.coordinator.failures import nobody_could_work, reasons_of
from fedloom.network.protocol.messages import SPENT, Failure


def test_errors_come_before_refusals() -> None:
    refused = Failure(ask="ask", clients=(0,), kind="refused", message="not here")
    failed = Failure(ask="ask", clients=(1,), kind="error", message="no memory")
    said = reasons_of({0: refused, 1: failed, 2: refused}, ["kerry", "clare", "cork"].__getitem__)
    assert said == "Clients that failed: 1, refused or rejected: 2. The first is 'clare': no memory"
    assert reasons_of({}, str) == ""
    assert str(nobody_could_work(3, {1: failed}, str)).startswith(
        "Round 3: no client could do its work. Correct the cause, and serve the same file to continue. Clients that "
    )


def test_where_a_budget_is_spent_the_advice_is_not_to_serve_again() -> None:
    spent = Failure(ask="ask", clients=(0,), kind="refused", message=SPENT)
    failed = Failure(ask="ask", clients=(1,), kind="error", message="no memory")
    advice = "Where a site's privacy budget is spent, serving again does not help unless the site raises it."
    assert str(nobody_could_work(3, {0: spent}, lambda _: "kerry")) == (
        f"Round 3: no client could do its work. Clients that failed: 0, refused or rejected: 1. {advice} The first is "
        "'kerry': the site's privacy budget is spent"
    )
    both = str(nobody_could_work(3, {0: spent, 1: failed}, str))
    assert "Correct the cause, and serve the same file to continue." in both
    assert both.endswith(f"failed: 1, refused or rejected: 1. {advice} The first is '1': no memory")
