"""Any `threshold` shares give back a secret, and fewer say nothing."""

import secrets

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom.privacy.secure import shamir


@given(st.binary(min_size=32, max_size=32), st.integers(1, 12), st.integers(0, 6), st.randoms())
def test_any_threshold_of_the_shares_gives_back_the_secret(secret, threshold, more, random) -> None:
    shares = shamir.share(secret, threshold, range(1, threshold + more + 1))
    chosen = random.sample(sorted(shares), threshold)
    assert shamir.combine({holder: shares[holder] for holder in chosen}) == secret


def test_too_few_shares_are_noticed() -> None:
    shares = shamir.share(secrets.token_bytes(32), 3, range(1, 6))
    with pytest.raises(shamir.WrongShares, match="too few"):
        shamir.combine({1: shares[1], 2: shares[2]})


def test_a_share_of_another_secret_is_noticed() -> None:
    shares = shamir.share(secrets.token_bytes(32), 3, range(1, 4))
    shares[2] = shamir.share(secrets.token_bytes(32), 3, range(1, 4))[2]
    with pytest.raises(shamir.WrongShares, match="do not belong together"):
        shamir.combine(shares)


def test_two_sharings_of_one_secret_have_nothing_in_common() -> None:
    secret = bytes(32)
    first, second = (shamir.share(secret, 2, [1, 2]) for _ in range(2))
    assert first[1] != second[1]
    assert first[1] != secret
    with pytest.raises(shamir.WrongShares):
        shamir.combine({1: first[1], 2: second[2]})


@pytest.mark.parametrize("holder", [0, -1])
def test_no_holder_gets_the_secret_itself(holder: int) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        shamir.share(bytes(32), 2, [holder])


def test_secrets_have_the_length_of_a_key() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        shamir.share(bytes(31), 2, [1, 2])
