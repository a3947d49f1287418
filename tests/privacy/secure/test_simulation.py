"""A secure sum is, bit by bit, the sum of those that sent a masked value, whoever vanishes and when."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.errors import RoundAbandoned
from fedloom.privacy.secure.client import STAGES
from fedloom.privacy.secure.session import Floors, Refusal
from fedloom.privacy.secure.simulation import secure_sum
from tests.privacy.secure.helpers import session

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
