"""Who leads if clients count by their test examples, in numbers that are computed here once more."""

from __future__ import annotations

from fedloom.results.report_warnings import cautions, on_screen
from fedloom.results.weighted_means import another_leads_by_examples
from tests.results.conftest import Made


def test_a_leader_by_clients_that_is_not_the_leader_by_examples_is_named(made: Made) -> None:
    small = [(0.9, 0.9), (0.0, 0.0), (0.9, 0.9), (0.5, 0.5), (0.9, 0.9)]
    run = made(fedavg=small, alone=[(0.8, 0.8), (0.9, 0.9), (0.8, 0.8), (0.5, 0.5), (0.8, 0.8)])
    # by clients 67.50 and 82.50 %; by examples (90 + 0 + 90 + 36) / 249 and (80 + 8.1 + 80 + 32) / 249
    said = (
        "Each client counts once, and they have 0 to 100 test examples. If each example counts once, fedavg (86.75 %) "
        "is ahead of alone (80.36 %)."
    )
    assert said in cautions(run)
    assert said in on_screen(run)


def test_nothing_is_said_where_clients_and_examples_agree_on_the_leader(made: Made) -> None:
    run = made(fedavg=[(0.9, 0.9)] * 5, alone=[(0.8, 0.8)] * 5)
    assert [*another_leads_by_examples(run)] == []
