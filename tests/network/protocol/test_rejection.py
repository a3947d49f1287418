"""The HTTP status of each code."""

from __future__ import annotations

import pytest

from fedloom.network.protocol.rejection import Rejected


@pytest.mark.parametrize(
    ("code", "status"), [("signature", 401), ("hello", 409), ("too-large", 413), ("busy", 503), ("norm", 422)]
)
def test_a_code_decides_the_status(code: str, status: int) -> None:
    why = Rejected(code, "why")
    assert (why.status, why.code, str(why)) == (status, code, "why")
    assert Rejected(code, "why", status=404).status == 404
