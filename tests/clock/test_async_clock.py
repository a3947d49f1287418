"""The queue of events of asynchronous rounds: schedules computed by hand, and what is remembered."""

from pathlib import Path
from typing import Any

import pytest

from fedloom import tree
from fedloom.algorithm import Algorithm
from fedloom.algorithms import FedAvg, LocalOnly, Scaffold
from fedloom.clock.async_clock import Flight
from fedloom.clock.fleet import Fleet
from fedloom.clock.system import System
from fedloom.errors import InputError, QuorumError
from fedloom.federation.engine import Evaluation, RoundRecord, Snapshot, fit
from fedloom.federation.sampling import Sampling
from fedloom.task import Task
from tests.conftest import ALL_TRAIN, Dense, federation

QUIET = Evaluation(splits=(), server=())


def system(folder: Path, speeds: list[float], **more: Any) -> System:
    rows = "".join(f"{client},{speed}\n" for client, speed in enumerate(speeds))
    (folder / "fleet.csv").write_text("client,speed\n" + rows)
    return System(step=1.0, speed={"name": "file", "file": folder / "fleet.csv"}, **more)


def rounds(number: int, machines: System, clients: int, algorithm: Any = None, **cohort: Any) -> list[RoundRecord]:
    data = federation((10,) * clients, split=ALL_TRAIN, names=None)
    sampling = Sampling(mode="async", **cohort)
    algorithm = algorithm or FedAvg(batch_size=10)
    fleet = Fleet.of(machines, data)
    return list(fit(data, Task(Dense), algorithm, number, sampling=sampling, evaluation=QUIET, fleet=fleet))


def events(record: RoundRecord) -> list[tuple[int, int, float, float, str]]:
    assert record.time is not None
    return [(one.client, one.version, one.began, one.ended, one.status) for one in record.time.clients]


def test_two_clients_of_unequal_speed_by_hand(tmp_path: Path) -> None:
    records = rounds(5, system(tmp_path, [1.0, 0.4]), 2, buffer=1)
    assert [events(record) for record in records] == [
        [(0, 1, 0.0, 1.0, "counted")],
        [(0, 2, 1.0, 2.0, "counted")],
        [(1, 1, 0.0, 2.5, "counted")],
        [(0, 3, 2.0, 3.0, "counted")],
        [(0, 5, 3.0, 4.0, "counted")],
    ]
    assert [record.notes["staleness"] for record in records] == [0, 0, 2, 1, 0]
    assert [record.cohort for record in records] == [(0,), (0,), (1,), (0,), (0,)]


def test_a_free_slot_starts_at_once_with_the_version_of_the_round(tmp_path: Path) -> None:
    first, second = rounds(2, system(tmp_path, [1.0, 1.0, 0.5, 0.5]), 4, buffer=2, concurrency=2)
    assert first.time is not None
    assert second.time is not None
    everyone = {one.client for one in (*first.time.clients, *second.time.clients)}
    assert len(everyone) >= 3  # a client whose answer is in the round is not drawn again in it
    for record in (first, second):
        for _, version, began, _, _ in events(record):
            assert (version == 2) == (began >= first.time.ended)


def test_versions_that_nobody_trains_from_are_dropped(tmp_path: Path) -> None:
    records = rounds(5, system(tmp_path, [1.0, 0.4]), 2, buffer=1)
    kept = [{name.split("/")[0] for name in record.state["clock"] if "/" in name} for record in records]
    assert kept == [{"version 1"}, {"version 1"}, {"version 3"}, {"version 4"}, {"version 4"}]


def test_answers_of_one_instant_that_no_round_has_taken_wait_for_the_next(tmp_path: Path) -> None:
    first, second, third = rounds(3, system(tmp_path, [1.0] * 4), 4, buffer=3)
    assert events(first) == [(client, 1, 0.0, 1.0, "counted") for client in (0, 1, 2)]
    assert (3, 1, 0.0, 1.0, "counted") in events(second)
    # the fourth answer counts before anyone starts, so three of the others start in its round
    assert [event[:4] for event in events(second) if event[0] != 3] == [(0, 2, 1.0, 2.0), (1, 2, 1.0, 2.0)]
    assert third.complete


def test_clients_that_are_late_or_lost_free_their_slots(tmp_path: Path) -> None:
    records = rounds(6, system(tmp_path, [1.0, 1.0, 1.0, 0.1], vanish=0.3), 4, buffer=2, deadline="5s")
    found = {status for record in records for *_, status in events(record)}
    assert found == {"counted", "late", "vanished"}
    late = [event for record in records for event in events(record) if event[4] == "late"]
    assert all(client == 3 and ended - began == 5.0 for client, _, began, ended, _ in late)
    assert all(len(record.cohort) == 2 for record in records)


def test_if_nobody_answers_rounds_are_abandoned_and_end(tmp_path: Path) -> None:
    records = rounds(3, system(tmp_path, [0.1, 0.1]), 2, buffer=1, deadline="5s")
    assert [record.complete for record in records] == [False] * 3
    assert [record.time.ended for record in records if record.time] == [5.0, 10.0, 15.0]
    assert tree.sha256(records[-1].state["model"]) == tree.sha256(Task(Dense).initial())


def test_a_run_continues_after_abandoned_rounds(tmp_path: Path) -> None:
    data = federation((10, 10), split=ALL_TRAIN, names=None)
    fleet = Fleet.of(system(tmp_path, [0.1, 0.07]), data)
    sampling = Sampling(mode="async", buffer=1, deadline="5s")
    options: dict[str, Any] = {"sampling": sampling, "evaluation": QUIET, "fleet": fleet}
    whole = list(fit(data, Task(Dense), FedAvg(batch_size=10), 5, **options))
    assert not any(record.complete for record in whole)
    for cut in range(1, 5):
        resume = Snapshot(cut, whole[cut - 1].state)
        rest = list(fit(data, Task(Dense), FedAvg(batch_size=10), 5, resume=resume, **options))
        assert [record.time for record in rest] == [record.time for record in whole[cut:]]


def test_answers_of_an_abandoned_round_count_in_a_later_one(tmp_path: Path) -> None:
    rows = "0,0,2\n1,20,30\n"
    (tmp_path / "trace.csv").write_text("client,from,to\n" + rows)
    machines = System(step=1.0, availability={"name": "file", "file": tmp_path / "trace.csv"})
    first, second = rounds(2, machines, 2, buffer=2, deadline="15s")
    assert (first.complete, first.time and first.time.ended) == (False, 16.0)
    assert second.complete
    assert events(second) == [(0, 1, 0.0, 1.0, "counted"), (1, 2, 20.0, 21.0, "counted")]


def test_nobody_for_ever_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("client,from,to\n0,0,2\n1,0,2\n")
    machines = System(step=1.0, availability={"name": "file", "file": tmp_path / "trace.csv"})
    with pytest.raises(QuorumError, match="nobody will be available"):
        rounds(4, machines, 2, buffer=2)


@pytest.mark.parametrize("algorithm", [Scaffold(batch_size=10), LocalOnly(batch_size=10)], ids=["scaffold", "local"])
def test_a_run_that_continues_has_the_same_flights_and_bits(algorithm: Algorithm) -> None:
    data = federation((10, 20, 30, 40, 50, 60), split=ALL_TRAIN)
    machines = System(
        step=1.0,
        speed={"name": "lognormal", "sigma": 1.0},
        vanish=0.1,
        availability={"name": "cycle", "period": "40s", "share": 0.8},
    )
    options: dict[str, Any] = {
        "sampling": Sampling(mode="async", buffer=2, concurrency=4),
        "evaluation": QUIET,
        "fleet": Fleet.of(machines, data),
    }
    whole = list(fit(data, Task(Dense), algorithm, 12, **options))
    assert max(record.notes["staleness"] for record in whole) > 1
    for cut in (1, 5, 9):
        own: dict[int, Any] = {}
        for record in whole[:cut]:
            own |= record.own
        resume = Snapshot(cut, whole[cut - 1].state, own)
        rest = list(fit(data, Task(Dense), algorithm, 12, resume=resume, **options))
        assert [record.time for record in rest] == [record.time for record in whole[cut:]]
        assert tree.sha256_of_groups(rest[-1].state) == tree.sha256_of_groups(whole[-1].state)
        for mine, theirs in zip(rest, whole[cut:], strict=True):
            assert {client: tree.sha256_of_groups(own) for client, own in mine.own.items()} == {
                client: tree.sha256_of_groups(own) for client, own in theirs.own.items()
            }


def test_flights_are_ordered_by_end_then_client() -> None:
    flights = [Flight(2.0, 0, 0.0, 1.0, 1, "counted"), Flight(1.0, 5, 0.0, 1.0, 1, "late")]
    flights.append(Flight(1.0, 3, 0.5, 1.0, 2, "counted"))
    assert [flight.client for flight in sorted(flights)] == [3, 5, 0]


@pytest.mark.parametrize(
    ("cohort", "message"),
    [
        ({"concurrency": 5}, "cohort.concurrency = 5, but there are only 4 clients"),
        ({"buffer": 5}, "cohort.buffer = 5, but only 4 clients are at work"),
        ({"buffer": 3, "concurrency": 2}, "cohort.buffer = 3, but only 2 clients are at work"),
        ({"over_select": 0.5}, "over_select is for rounds that wait"),
        ({"quorum": 0.5}, "quorum is for rounds that wait"),
        ({"sampling": "window"}, "sampling is for rounds that wait"),
    ],
)
def test_what_cannot_be_met_is_refused(tmp_path: Path, cohort: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        rounds(1, system(tmp_path, [1.0] * 4), 4, **{"buffer": 2, **cohort})


def test_keys_of_asynchronous_rounds_need_the_mode() -> None:
    with pytest.raises(InputError, match='buffer is for mode = "async"'):
        Sampling(buffer=3)
    assert Sampling().identity() == Sampling(mode="sync").identity()
    assert "mode" not in Sampling().identity()
    assert Sampling(mode="async").identity()["buffer"] == 10
