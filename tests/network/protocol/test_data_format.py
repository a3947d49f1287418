"""The format of a site's examples."""

from __future__ import annotations

from fedloom.network.protocol.data_format import DataFormat
from tests.conftest import federation as some_clients


def test_a_format_goes_through_a_message_and_differences_are_named() -> None:
    ours = DataFormat.of(some_clients((4, 4)))
    assert DataFormat.read(ours.message()) == ours
    assert ours.differences(ours) == ""
    theirs = DataFormat(ours.features, "int64", ("a", "c"))
    mine = DataFormat(ours.features, "float32", ("a", "b"))
    assert (
        mine.differences(theirs) == 'dtype: "int64" there, "float32" here; classes: ["a", "c"] there, ["a", "b"] here'
    )
