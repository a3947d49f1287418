"""What is signed cannot be read in two ways, and a client's floors hold whatever the server says."""

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from fedloom.privacy.secure.session import (
    Advertisement,
    Floors,
    Refusal,
    confirmation_text,
    is_signed,
    pack,
    session_id,
    smallest_threshold,
    survivors_digest,
    without_repeated_keys,
)
from tests.privacy.secure.helpers import session

PARTS = st.lists(st.one_of(st.text(max_size=5), st.binary(max_size=5), st.integers(0, 2**40)), max_size=4)


@given(PARTS, PARTS)
def test_different_parts_never_give_the_same_bytes(first, second) -> None:
    assert (pack(*first) == pack(*second)) == (first == second)


@given(st.floats(0.51, 1.0), st.integers(3, 1000))
def test_the_threshold_is_the_share_rounded_up(share: float, clients: int) -> None:
    threshold = smallest_threshold(share, clients)
    assert threshold - 1 < share * clients <= threshold + 1e-6


def test_two_thirds_of_the_clients_is_the_design_s_threshold_against_an_active_server() -> None:
    assert [smallest_threshold(0.67, n) for n in range(3, 98)] == [2 * n // 3 + 1 for n in range(3, 98)]


@pytest.mark.parametrize("change", ["run", "round", "call", "attempt", "clients", "threshold", "config"])
def test_every_part_of_a_session_changes_its_number_and_what_is_signed(change: str) -> None:
    one = session()
    other = session(**{change: "other" if change in ("run", "config") else 9})
    keys = Advertisement(0, bytes(32), bytes(32))
    assert keys.text(one) != keys.text(other)
    assert session_id(one, [keys]) != session_id(other, [keys])


def test_a_session_s_number_depends_on_all_keys_and_on_no_order() -> None:
    first, second = Advertisement(0, b"a" * 32, b"b" * 32), Advertisement(1, b"c" * 32, b"d" * 32)
    assert session_id(session(), [first, second]) == session_id(session(), [second, first])
    assert session_id(session(), [first]) != session_id(session(), [first, second])


def test_clients_with_a_key_that_is_there_twice_are_left_out() -> None:
    honest = Advertisement(0, b"a" * 32, b"b" * 32)
    alike, copies = Advertisement(1, b"c" * 32, b"c" * 32), [Advertisement(n, b"d" * 32, bytes([n])) for n in (2, 3)]
    assert without_repeated_keys([honest, alike, *copies]) == [honest]


def test_survivors_are_signed_as_a_set() -> None:
    found = survivors_digest(b"sid", [2, 1])
    assert found == survivors_digest(b"sid", {1, 2}) != survivors_digest(b"sid", {1, 2, 3})
    assert confirmation_text(1, found) == confirmation_text(1, found) != confirmation_text(2, found)


def test_only_the_owner_of_a_key_signs() -> None:
    key, other = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    public = key.public_key().public_bytes_raw()
    assert is_signed(public, b"text", key.sign(b"text"))
    assert not is_signed(public, b"text", other.sign(b"text"))
    assert not is_signed(public, b"other", key.sign(b"text"))
    assert not is_signed(b"no key", b"text", key.sign(b"text"))


@pytest.mark.parametrize(
    ("agreed", "floors", "why"),
    [
        (session(2, 2), Floors(), "at least 3 clients, and this session invites 2"),
        (session(4, 2), Floors(1), "at least 3 of 4 clients must be needed .* threshold of 2"),
        (session(5, 3), Floors(5), "at least 5 clients, and this session invites 5 and goes on with 3"),
        (session(10, 6), Floors(3, 0.67), "at least 7 of 10 clients"),
        (session(10, 5), Floors(3, 0.1), "at least 6 of 10"),
    ],
)
def test_floors_refuse_what_is_below_them(agreed, floors, why: str) -> None:
    with pytest.raises(Refusal, match=why):
        floors.check(agreed)


def test_floors_accept_what_is_not_below_them() -> None:
    Floors(3, 0.67).check(session(100, 67))
    Floors().check(session(3, 3))
