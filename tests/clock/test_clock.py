"""Rounds in virtual time, computed by hand: who answers in time, and when a round ends."""

from pathlib import Path
from typing import Any

import pytest

from fedloom import tree
from fedloom.algorithms import FSVRG, Ditto, FedAvg, Peer, Pooled, Scaffold
from fedloom.clock.fleet import Fleet
from fedloom.clock.system import System
from fedloom.errors import InputError, QuorumError
from fedloom.federation.engine import Evaluation, RoundRecord, Snapshot, fit
from fedloom.federation.sampling import Sampling
from fedloom.task import Task
from tests.conftest import ALL_TRAIN, Dense, federation

SIZES = (10, 20, 30, 40)  # training examples: one step of ten for each ten of them
QUIET = Evaluation(splits=(), server=())


def rounds(
    number: int = 1,
    *,
    sizes: tuple[int, ...] = SIZES,
    algorithm: Any = None,
    system: System | None = None,
    **cohort: Any,
) -> list[RoundRecord]:
    data = federation(sizes, split=ALL_TRAIN, names=None)
    fleet = Fleet.of(system or System(step=1.0), data)
    algorithm = algorithm or FedAvg(batch_size=10)
    return list(fit(data, Task(Dense), algorithm, number, sampling=Sampling(**cohort), evaluation=QUIET, fleet=fleet))


def statuses(record: RoundRecord) -> dict[int, str]:
    assert record.time is not None
    return {one.client: one.status for one in record.time.clients}


def ends(record: RoundRecord) -> list[float]:
    assert record.time is not None
    return [one.ended for one in record.time.clients]


def span(record: RoundRecord) -> tuple[float, float]:
    assert record.time is not None
    return record.time.began, record.time.ended


def test_a_round_lasts_as_long_as_its_slowest_client() -> None:
    first, second = rounds(2)
    assert span(first) == (0.0, 4.0)
    assert span(second) == (4.0, 8.0)
    assert ends(first) == [1.0, 2.0, 3.0, 4.0]
    assert first.time is not None
    assert [one.computing for one in first.time.clients] == [1.0, 2.0, 3.0, 4.0]


def test_the_clock_alone_changes_no_bit() -> None:
    data = federation(SIZES, split=ALL_TRAIN, names=None)
    *_, plain = fit(data, Task(Dense), FedAvg(batch_size=10), 2, sampling=Sampling(count=2), evaluation=QUIET)
    timed = rounds(2, count=2)[-1]
    assert tree.sha256(timed.state["model"]) == tree.sha256(plain.state["model"])
    assert timed.cohort == plain.cohort


def test_clients_after_the_deadline_are_late_and_not_computed() -> None:
    (record,) = rounds(deadline="2s")
    assert statuses(record) == {0: "counted", 1: "counted", 2: "late", 3: "late"}
    assert record.cohort == (0, 1)  # an answer at the deadline counts
    assert [report.client for report in record.reports] == [0, 1]
    assert span(record) == (0.0, 2.0)


def test_over_selection_takes_the_first_and_ends_with_them() -> None:
    (record,) = rounds(count=2, over_select=1.0)
    assert statuses(record) == {0: "counted", 1: "counted", 2: "surplus", 3: "surplus"}
    assert span(record) == (0.0, 2.0)
    assert ends(record) == [1.0, 2.0, 2.0, 2.0]


def test_too_few_answers_abandon_the_round_at_its_deadline() -> None:
    first, second = rounds(2, deadline="2s", quorum=0.75)
    assert not first.complete
    assert span(first) == (0.0, 2.0)
    assert span(second) == (2.0, 4.0)
    assert tree.sha256(first.state["model"]) == tree.sha256(Task(Dense).initial())


def test_a_client_that_leaves_while_it_works_does_not_answer(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("client,from,to\n0,0,9\n1,0,9\n2,0,2.5\n3,5,9\n")
    system = System(step=1.0, availability={"name": "file", "file": tmp_path / "trace.csv"})
    (record,) = rounds(system=system)
    assert statuses(record) == {0: "counted", 1: "counted", 2: "left"}
    assert record.time is not None
    assert record.time.available == 3
    assert ends(record) == [1.0, 2.0, 2.5]
    assert span(record) == (0.0, 2.5)  # that it left is noticed


def test_nobody_waits_longer_than_the_deadline_for_a_client_that_is_lost_later(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("client,from,to\n0,0,9\n1,0,9\n2,0,9\n3,0,3.5\n")
    system = System(step=1.0, availability={"name": "file", "file": tmp_path / "trace.csv"})
    (record,) = rounds(system=system, deadline="3s")
    assert statuses(record) == {0: "counted", 1: "counted", 2: "counted", 3: "late"}
    assert span(record) == (0.0, 3.0)


def test_a_round_waits_for_somebody_and_gives_up_at_the_deadline(tmp_path: Path) -> None:
    rows = "".join(f"{client},15,20\n{client},100,101\n" for client in range(4))
    (tmp_path / "trace.csv").write_text("client,from,to\n" + rows)
    system = System(step=1.0, availability={"name": "file", "file": tmp_path / "trace.csv"})
    first, second, third = rounds(3, system=system, deadline="10s")
    assert (first.complete, span(first), first.cohort) == (False, (0.0, 10.0), ())
    assert (second.complete, span(second), len(second.cohort)) == (True, (10.0, 19.0), 4)
    assert (third.complete, span(third), len(third.cohort)) == (True, (19.0, 20.0), 1)


def test_a_trace_that_ends_before_the_run_is_an_error(tmp_path: Path) -> None:
    rows = "".join(f"{client},0,4\n" for client in range(4))
    (tmp_path / "trace.csv").write_text("client,from,to\n" + rows)
    system = System(step=1.0, availability={"name": "file", "file": tmp_path / "trace.csv"})
    with pytest.raises(QuorumError, match=r"Round 2 begins after 4 virtual seconds.* set 'repeat'"):
        rounds(2, system=system)


def test_clients_that_vanish_are_noticed_and_never_computed() -> None:
    records = rounds(8, system=System(step=1.0, vanish=0.5))
    found = [status for record in records for status in statuses(record).values()]
    assert {*found} == {"counted", "vanished"}
    for record in records:
        assert record.time is not None
        if record.complete:
            assert [*record.cohort] == [client for client, status in statuses(record).items() if status == "counted"]
            assert record.time.ended == max(ends(record))


def test_messages_take_time() -> None:
    plain, slow = (
        rounds(sizes=(10, 10), system=System(step=1.0, **limits))[0]
        for limits in ({}, {"download": 1.0, "upload": 0.5})
    )
    down, up = slow.reports[0].bytes_down, slow.reports[0].bytes_up
    assert span(plain)[1] == 1.0
    assert span(slow)[1] == pytest.approx(1.0 + down / 125_000 + up / 62_500)


def test_every_call_of_a_round_takes_its_time() -> None:
    (record,) = rounds(sizes=(10, 30), algorithm=FSVRG(scaling="identity"), system=System(step=0.1))
    # a step has one example; a full gradient is one pass, and each of the client's steps takes two gradients
    assert record.time is not None
    assert ends(record) == [pytest.approx(3.0 + 2.0), pytest.approx(3.0 + 6.0)]
    assert [one.computing for one in record.time.clients] == pytest.approx([3.0, 9.0])


def test_a_client_that_misses_a_call_is_not_in_the_next() -> None:
    (record,) = rounds(algorithm=FSVRG(scaling="identity"), deadline="3s", system=System(step=0.1))
    assert statuses(record) == {0: "counted", 1: "late", 2: "late", 3: "late"}
    assert span(record) == (0.0, 6.0)
    assert [report.client for report in record.reports] == [0, 1, 2, 0]


def test_personal_models_cost_a_second_training() -> None:
    assert span(rounds(algorithm=Ditto(batch_size=10))[0]) == (0.0, 8.0)


def test_peers_that_are_late_send_nothing_and_receive_nothing() -> None:
    (record,) = rounds(algorithm=Peer(batch_size=10), deadline="3s")
    assert record.cohort == (0, 1, 2)
    model = sum(leaf.numel() * leaf.element_size() for leaf in Task(Dense).initial().values())
    received = {report.client: report.bytes_down for report in record.reports if report.bytes_down > 0}
    assert set(received.values()) == {2 * model}  # of the two others in time, not of itself


def test_a_client_of_an_exchange_pays_for_the_others_trees_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Peer, "passes", lambda self, method: 0.0 if method == "client" else self.train.epochs)
    (record,) = rounds(algorithm=Peer(batch_size=10), deadline="3s")
    model = sum(leaf.numel() * leaf.element_size() for leaf in Task(Dense).initial().values())
    assert {report.bytes_down for report in record.reports if report.bytes_down > 0} == {3 * model}


def test_what_late_clients_keep_does_not_change() -> None:
    (record,) = rounds(algorithm=Scaffold(batch_size=10), deadline="2s")
    assert [*record.own] == [0, 1]


def test_the_pooled_baseline_has_no_clock() -> None:
    (record,) = rounds(algorithm=Pooled(batch_size=10))
    assert record.time is None


def test_a_run_that_continues_has_the_same_times_and_bits() -> None:
    data = federation(SIZES, split=ALL_TRAIN, names=None)
    system = System(step=1.0, vanish=0.3, upload=0.01, availability={"name": "cycle", "period": "9s", "share": 0.6})
    options: dict[str, Any] = {"sampling": Sampling(count=3), "evaluation": QUIET, "fleet": Fleet.of(system, data)}
    whole = list(fit(data, Task(Dense), Scaffold(batch_size=10), 6, **options))
    half = whole[2]
    own: dict[int, Any] = {}
    for record in whole[:3]:
        own |= record.own
    resumed = list(fit(data, Task(Dense), Scaffold(batch_size=10), 6, resume=Snapshot(3, half.state, own), **options))
    assert [record.time for record in resumed] == [record.time for record in whole[3:]]
    assert tree.sha256(resumed[-1].state["model"]) == tree.sha256(whole[-1].state["model"])


def test_patience_is_refused_because_steps_are_not_known_before() -> None:
    with pytest.raises(InputError, match="patience ends training at any time"):
        rounds(algorithm=FedAvg(batch_size=10, patience=2))


def test_single_clients_with_their_own_epochs_take_their_own_time() -> None:
    (record,) = rounds(algorithm=FedAvg(batch_size=10, clients=[{"name": "0", "epochs": 3.0}]))
    assert ends(record) == [3.0, 2.0, 3.0, 4.0]
