"""Tokens as text."""

from __future__ import annotations

import pytest

from fedloom.errors import InputError
from fedloom.network.protocol.token import Token


def test_a_token_is_read_again_and_nonsense_is_not() -> None:
    token = Token.new("cd" * 32)
    assert Token.parse(f" {token}\n") == token
    for wrong in ("", "fl1-", "fl1-abc", str(token)[:-3], "x" + str(token)):
        with pytest.raises(InputError, match="enrolment token"):
            Token.parse(wrong)
