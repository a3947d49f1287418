"""With every algorithm, a secure sum gives the fixed-point mean bit by bit, or is refused with the reason."""

import hashlib
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedloom as fl
from fedloom import tree
from fedloom.algorithms import ALGORITHMS
from fedloom.errors import InputError, RoundAbandoned, TrainingError
from fedloom.federation.engine import RoundRecord, fit
from fedloom.privacy.dp.distributed import NoiseShare
from fedloom.privacy.protection import Protection
from fedloom.privacy.secure import aggregation
from fedloom.privacy.secure.aggregation import SecureCall, secure_sum, weight_bound
from fedloom.privacy.secure.client import STAGES
from fedloom.privacy.secure.ring import RingConfig
from fedloom.privacy.secure.session import Floors, Refusal
from fedloom.privacy.table import PrivacyTable, SecureTable
from fedloom.task import Task
from tests.conftest import Dense, Logit, Normed, federation, two_classes
from tests.privacy.secure.helpers import session

SIZES = (12, 9, 7, 11, 8)
REFUSED = {
    "evaluation_weighted": "shows the server the update or score of each client",
    "selective": "shows the server the update or score of each client",
    "peer": "clients see each other's weights",
    "ifca": "ifca sums over some of a round's clients: such a sum could be that of a single client",
    "staged": "staged sums over some",
    "fed_dropout": "fed_dropout sums over some",
    "qfedavg": "qfedavg weighs clients by other numbers than",
    "pooled": "pooled trains on all examples in one place",
    "svrg": "svrg trains on all examples in one place",
}
RANGES: dict[str, Any] = dict.fromkeys(("neuroevolution", "openai_es", "snes", "fsvrg", "cocoa"), 1000000.0)


def protected(name: str, table: SecureTable | None = None, rounds: int = 2, **settings: Any) -> list[RoundRecord]:
    kind = ALGORITHMS[name]
    data, task = federation(SIZES), Task(Dense)
    if kind.needs == "linear":
        data, task = two_classes(data), Task(Logit, loss="bce")
    secure = table or SecureTable(range=RANGES.get(name, 100.0))
    sampling = fl.Sampling(max_examples=20)
    protection = Protection(PrivacyTable(secure_aggregation=secure), sampling, len(SIZES), rounds)
    return list(fit(data, task, kind(**settings), rounds, sampling=sampling, protection=protection))


def fingerprint(record: RoundRecord) -> str:
    return tree.sha256({f"{group}/{name}": x for group, leaves in record.state.items() for name, x in leaves.items()})


def plain_fixed_point_sum(session: Any, ids: Any, value: Any, lost: Any, *rest: Any) -> Any:
    """The sum of the same whole numbers, without any mask."""
    gone = {client for stage in ("advertise", "share", "mask") for client in lost(stage)}
    members = [client for client in ids if client not in gone]
    return sum((value(client) for client in members), start=np.zeros((), value(members[0]).dtype)), frozenset(members)


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_an_algorithm_works_and_equals_the_fixed_point_mean_or_is_refused(name: str, monkeypatch: Any) -> None:
    if name in REFUSED:
        with pytest.raises(InputError, match=REFUSED[name]):
            protected(name)
        return
    secure = [fingerprint(record) for record in protected(name)]
    monkeypatch.setattr(aggregation, "secure_sum", plain_fixed_point_sum)
    assert secure == [fingerprint(record) for record in protected(name)]


def test_no_refusal_is_forgotten() -> None:
    assert REFUSED.keys() <= ALGORITHMS.keys()


@pytest.mark.parametrize("name", ["ifca", "staged", "fed_dropout", "qfedavg"])
def test_settings_with_which_every_client_counts_are_not_refused(name: str) -> None:
    setting = {"ifca": {"clusters": 1}, "staged": {"groups": 1}, "fed_dropout": {"rate": 0.0}, "qfedavg": {"q": 0.0}}
    assert protected(name, **setting[name])[-1].complete


def test_the_model_is_that_of_the_plain_run_to_the_precision_of_the_ring() -> None:
    plain = list(fit(federation(SIZES), Task(Normed), fl.FedAvg(lr=0.1), 2))[-1].state["model"]
    sampling = fl.Sampling(max_examples=20)
    protection = Protection(PrivacyTable(secure_aggregation=SecureTable()), sampling, len(SIZES), 2)
    records = list(fit(federation(SIZES), Task(Normed), fl.FedAvg(lr=0.1), 2, sampling=sampling, protection=protection))
    secure = records[-1].state["model"]
    assert secure.keys() == plain.keys()
    assert all(torch.allclose(secure[name].double(), plain[name].double(), atol=1e-6) for name in plain)


@pytest.mark.parametrize("stage", range(5))
def test_clients_that_are_lost_before_masking_are_not_in_the_mean_and_keep_their_state(stage: int) -> None:
    lost = tuple(0.3 if number == stage else 0.0 for number in range(5))
    table = SecureTable(range=100.0, threshold=0.51, lost=lost)
    records = protected("scaffold", table, rounds=6)
    sizes = {len(record.cohort) for record in records if record.complete}
    assert sizes <= {3, 4, 5}
    assert (sizes == {5}) == (stage >= 3)
    assert all(set(record.own) <= set(record.cohort) for record in records)
    assert all(record.notes["lost"] == 5 - len(record.cohort) for record in records if record.complete)


def test_who_is_lost_is_the_same_in_every_run() -> None:
    table = SecureTable(range=100.0, threshold=0.51, lost=(0.1, 0.1, 0.1, 0.0, 0.0))
    first, second = ([(r.cohort, fingerprint(r)) for r in protected("fedavg", table, rounds=4)] for _ in range(2))
    assert first == second


def test_a_round_with_too_few_clients_is_abandoned_and_the_model_stays() -> None:
    table = SecureTable(range=100.0, threshold=1.0, lost=(0.0, 0.0, 0.9, 0.0, 0.0))
    record = protected("fedavg", table, rounds=1)[0]
    assert not record.complete
    assert fingerprint(record) == tree.sha256({f"model/{name}": x for name, x in Task(Dense).initial().items()})


def test_updates_out_of_range_end_a_run_that_could_never_work() -> None:
    with pytest.raises(TrainingError, match=r"needs 4. 5 clients sent nothing, such as 'client-0': a number of 'mo"):
        protected("fedavg", SecureTable(range=1e-9))


def test_a_client_with_more_examples_than_the_bound_counts_as_one_at_the_bound() -> None:
    sampling = fl.Sampling(max_examples=5)
    protection = Protection(PrivacyTable(secure_aggregation=SecureTable()), sampling, 5, 1)
    data = federation((400, 60, 70, 50, 80))
    record = next(fit(data, Task(Dense), fl.FedAvg(), 1, sampling=sampling, protection=protection))
    equal = next(fit(data, Task(Dense), fl.FedAvg(weights="uniform"), 1))
    assert record.cohort == (0, 1, 2, 3, 4)
    mean, plain = record.state["model"], equal.state["model"]
    assert all(torch.allclose(mean[name], plain[name], atol=1e-6) for name in plain)


@pytest.mark.parametrize(
    ("table", "sampling", "why"),
    [
        (SecureTable(min_clients=6), fl.Sampling(max_examples=9), "min_clients = 6 clients in a round, .* has 5"),
        (SecureTable(), fl.Sampling(over_select=0.5, max_examples=9), "leave out \\[cohort\\] over_select"),
        (SecureTable(), fl.Sampling(), 'fedavg weighs clients by examples. Set weights = "uniform"'),
    ],
)
def test_what_cannot_be_protected_is_refused_when_it_is_planned(table: Any, sampling: Any, why: str) -> None:
    with pytest.raises(InputError, match=why):
        aggregation.check(table, fl.FedAvg(), sampling, 5)


def test_equal_weights_need_no_bound() -> None:
    assert weight_bound(fl.FedAvg(weights="uniform"), fl.Sampling()) == 1
    assert weight_bound(fl.FedAvg(), fl.Sampling(max_examples=600)) == 600


def test_everybody_must_agree_on_the_ring() -> None:
    rings = [RingConfig(4.0, 5, 1), RingConfig(4.0, 5, 2), RingConfig(5.0, 5, 1)]
    rings += [RingConfig(4.0, 5, 1, noise=NoiseShare(z, 5, 3, adaptive=False)) for z in (1.0, 2.0)]
    calls = [SecureCall.of(SecureTable(), ring, "run", 1, 0) for ring in rings]
    assert len({call.session.config for call in calls}) == 5
    assert calls[0].session.threshold == 4


def test_clients_that_send_nothing_need_no_session() -> None:
    records = protected("local")
    assert records[-1].cohort == (0, 1, 2, 3, 4)


IN_THE_SUM_IF_LOST_AT = {"advertise": False, "share": False, "mask": False, "confirm": True, "unmask": True}


def vectors(clients: int, size: int = 50, dtype: type = np.uint32) -> dict:  # type: ignore[type-arg]
    random = np.random.default_rng(clients)
    largest = np.iinfo(dtype).max
    return {client: random.integers(0, largest, size, dtype, endpoint=True) for client in range(clients)}


def plain_sum(values: dict, members: set[int]) -> np.ndarray:  # type: ignore[type-arg]
    return sum((values[client] for client in members), np.zeros_like(values[0]))


@pytest.mark.parametrize("dtype", [np.uint32, np.uint64])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("stage", STAGES)
def test_the_sum_is_bit_equal_to_the_plain_one_with_clients_lost_at_a_stage(stage: str, share: float, dtype) -> None:
    values = vectors(20, dtype=dtype)
    gone = set(list(values)[3 : 3 + int(20 * share)])
    total, members = secure_sum(
        session(20, 14), values, lambda c: values[c].copy(), lambda now: gone if now == stage else ()
    )
    expected = set(values) if IN_THE_SUM_IF_LOST_AT[stage] else set(values) - gone
    assert members == expected
    assert hashlib.sha256(total).digest() == hashlib.sha256(plain_sum(values, expected)).digest()


@settings(deadline=None, max_examples=40)
@given(st.integers(3, 9), st.lists(st.sampled_from([*STAGES, "stays"]), min_size=9, max_size=9), st.data())
def test_clients_may_vanish_at_every_stage_down_to_the_threshold(clients: int, fates: list[str], data) -> None:
    threshold = data.draw(st.integers(max(3, clients // 2 + 1), clients))
    values, fate = vectors(clients, 7), dict(enumerate(fates[:clients]))

    def lost(stage: str) -> list[int]:
        return [client for client, when in fate.items() if when == stage]

    staying = [client for client, when in fate.items() if when == "stays"]
    if len(staying) < threshold:
        with pytest.raises(RoundAbandoned, match=f"needs {threshold}"):
            secure_sum(session(clients, threshold), values, lambda c: values[c].copy(), lost)
        return
    total, members = secure_sum(session(clients, threshold), values, lambda c: values[c].copy(), lost)
    assert members == {client for client, when in fate.items() if IN_THE_SUM_IF_LOST_AT.get(when, True)}
    assert np.array_equal(total, plain_sum(values, set(members)))


def test_a_sparse_graph_gives_the_same_sum() -> None:
    values = vectors(120, 9)
    gone = {"share": range(5), "mask": range(5, 15), "unmask": range(15, 25)}
    agreed = session(120, 81)
    total, members = secure_sum(agreed, values, lambda c: values[c].copy(), lambda stage: gone.get(stage, ()))
    assert members == set(range(15, 120))
    assert np.array_equal(total, plain_sum(values, set(members)))


def test_what_the_server_receives_from_a_client_is_not_its_value() -> None:
    values = {client: np.zeros(1000, np.uint32) for client in range(3)}
    seen = []

    def value(client: int) -> np.ndarray:  # type: ignore[type-arg]
        seen.append(client)
        return values[client].copy()

    total, _ = secure_sum(session(3, 3), values, value)
    assert not total.any()
    assert seen == [0, 1, 2]


def test_a_client_that_refuses_to_send_its_value_is_not_in_the_sum() -> None:
    values = vectors(5)

    def value(client: int) -> np.ndarray:  # type: ignore[type-arg]
        if client == 2:
            raise Refusal("out of range")
        return values[client].copy()

    total, members = secure_sum(session(5, 3), values, value)
    assert members == {0, 1, 3, 4}
    assert np.array_equal(total, plain_sum(values, set(members)))


def test_clients_keep_their_floors() -> None:
    with pytest.raises(Refusal, match="at least 5 clients"):
        secure_sum(session(4, 3), range(4), vectors(4).__getitem__, floors=Floors(5))
