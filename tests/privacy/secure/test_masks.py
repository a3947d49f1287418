"""Masks of a pair are equal and cancel; streams are those of AES-256 in CTR mode."""

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from fedloom.privacy.secure import masks
from fedloom.privacy.secure.masks import PairMasks, PairMasksOnce, add_stream, agree, is_usable, pair_sign
from fedloom.privacy.secure.session import Refusal


def public(key: X25519PrivateKey) -> bytes:
    return key.public_key().public_bytes_raw()


def test_two_clients_agree_on_a_key_for_each_session_and_purpose() -> None:
    one, two = X25519PrivateKey.generate(), X25519PrivateKey.generate()
    key = agree(one, public(two), b"sid", "mask")
    assert key == agree(two, public(one), b"sid", "mask")
    assert len({key, agree(one, public(two), b"sid", "enc"), agree(one, public(two), b"other", "mask")}) == 3


def test_a_key_that_every_secret_agrees_with_is_refused() -> None:
    with pytest.raises(Refusal, match="not valid"):
        agree(X25519PrivateKey.generate(), bytes(32), b"sid", "mask")


@pytest.mark.parametrize("dtype", ["<u4", "<u8"])
@pytest.mark.parametrize("size", [0, 1, 5, 70_000])
def test_a_stream_is_the_key_s_aes_ctr_stream_also_beyond_a_block(dtype: str, size: int) -> None:
    key, vector = bytes(range(32)), np.arange(size, dtype=dtype)
    plain = Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor().update(bytes(vector.nbytes))
    expected = vector + np.frombuffer(plain, dtype)
    add_stream(key, (vector, 1))
    assert np.array_equal(vector, expected)
    assert size * vector.itemsize > masks.BLOCK or size < 70_000
    add_stream(key, (vector, -1))
    assert np.array_equal(vector, np.arange(size, dtype=dtype))


def test_a_pair_s_signs_cancel() -> None:
    assert pair_sign(3, 1) == 1
    assert pair_sign(1, 3) == -1


def test_computing_each_pair_once_gives_the_same_masks() -> None:
    keys = {(i, j): bytes([i, j]) * 16 for i in range(4) for j in range(4) if i < j}

    def masked(pairs: PairMasks, client: int) -> np.ndarray:  # type: ignore[type-arg]
        vector = np.arange(10, dtype=np.uint32)
        pairs.add(vector, client, {p: keys[min(client, p), max(client, p)] for p in range(4) if p != client})
        return vector

    once = PairMasksOnce()
    vectors = [masked(once, client) for client in (2, 0, 3, 1)]
    assert all(np.array_equal(v, masked(PairMasks(), c)) for v, c in zip(vectors, (2, 0, 3, 1), strict=True))
    assert np.array_equal(sum(vectors), 4 * np.arange(10, dtype=np.uint32))


def test_a_public_key_is_usable_unless_it_is_weak_or_has_another_length() -> None:
    assert is_usable(X25519PrivateKey.generate().public_key().public_bytes_raw())
    assert not any(is_usable(key) for key in (b"", bytes(31), bytes(32), b"\x01" + bytes(31), bytes(33)))
