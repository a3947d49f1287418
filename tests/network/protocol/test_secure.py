"""The messages of a secure sum come back as they were written."""

import numpy as np
import pytest
from pydantic import ValidationError

from fedloom.network.protocol.messages import ClientAnswer, SecurePeer, SecureResult, read_answer, write_answer
from fedloom.network.protocol.secure import advertisement, from_hex, masked_update, masked_vector, question, to_hex
from fedloom.privacy.secure.session import Advertisement


def test_bytes_by_client_come_back() -> None:
    values = {0: b"", 12: bytes(range(40))}
    assert from_hex(to_hex(values)) == values


@pytest.mark.parametrize("dtype", ["<u4", "<u8"])
def test_a_masked_vector_crosses_the_wire_bit_by_bit(dtype: str) -> None:
    vector = np.array([0, 1, np.iinfo(dtype).max, 2**31], dtype=dtype)
    parcel = write_answer("ask", [ClientAnswer(3, masked_update(vector), (1, 1, 0))])
    found = read_answer(parcel.header, parcel.tensors)[1][3]
    assert np.array_equal(masked_vector(found.update), vector)
    assert masked_vector(found.update).dtype == dtype


def test_the_answer_to_a_stage_comes_back() -> None:
    result = SecureResult(mask_key="ab" * 32, signature="cd" * 64, shares={"1": "ef" * 66})
    parcel = write_answer("ask", [ClientAnswer(3, secure=result)])
    assert read_answer(parcel.header, parcel.tensors)[1][3].secure == result


@pytest.mark.parametrize("shares", [{"one": "ab"}, {"1": "no"}, {"1": "a"}, {"-1": "ab"}])
def test_a_malformed_answer_is_no_message(shares: dict[str, str]) -> None:
    with pytest.raises(ValidationError):
        SecureResult(shares=shares)


def test_keys_come_back_as_they_were_signed() -> None:
    keys = {"mask_key": "01" * 32, "channel_key": "02" * 32, "signature": "03" * 64}
    peer = SecurePeer(client=7, agent="a1", agent_key="04" * 32, **keys)
    assert advertisement(peer) == Advertisement(7, b"\1" * 32, b"\2" * 32, b"\3" * 64)


def test_the_question_is_about_a_method_and_a_model() -> None:
    assert (
        len({question("client", "a"), question("client", "b"), question("judge", "a"), question("client", "a", 1.0)})
        == 4
    )
