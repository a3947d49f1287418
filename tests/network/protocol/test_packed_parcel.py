"""What the coordinator shares arrives as it was sent, or is refused."""

from __future__ import annotations

import pytest
import torch

from fedloom.compression.downlink import Downlink
from fedloom.compression.method import form_of
from fedloom.compression.methods import METHODS
from fedloom.network.protocol.packed_parcel import pack, unpack
from fedloom.network.protocol.tensors import WireError, read_parcel, unflatten

WEIGHT = torch.randn(50, generator=torch.Generator().manual_seed(1))
GROUPS = {"model": {"w": WEIGHT}, "none": {}, "now": {"n": torch.ones(2)}}


def link(name: str) -> Downlink:
    return Downlink(METHODS[name](), form_of(GROUPS["model"]), ("w",))


@pytest.mark.parametrize("name", ["float16", "bfloat16", "lossless"])
def test_what_is_sent_arrives(name: str) -> None:
    expected, _ = link(name).received(GROUPS)
    header, leaves = read_parcel(pack(GROUPS, link(name)).whole)
    found = unpack(header, unflatten(leaves), link(name))
    assert {group: set(tree) for group, tree in found.items()} == {group: set(tree) for group, tree in GROUPS.items()}
    for group, tree in expected.items():
        assert all(torch.equal(found[group][leaf], value) for leaf, value in tree.items())


def test_without_compression_nothing_changes() -> None:
    header, leaves = read_parcel(pack(GROUPS, None).whole)
    content = unflatten(leaves)
    assert unpack(header, content, None) is content
    assert unpack(header, content, link("float16")) is content


def test_compression_that_was_not_announced_is_refused() -> None:
    header, leaves = read_parcel(pack(GROUPS, link("float16")).whole)
    with pytest.raises(WireError, match=r"announced no \[compress\] down"):
        unpack(header, unflatten(leaves), None)
    with pytest.raises(WireError, match="cannot be decompressed"):
        unpack(header, unflatten(leaves), link("bfloat16"))


@pytest.mark.parametrize("names", [3, {"model": "w"}, {"model": [["w"]]}, {"model": ["w", "w"]}, {"model": ["x"]}, {}])
def test_a_strange_header_is_refused(names: object) -> None:
    _, leaves = read_parcel(pack(GROUPS, link("lossless")).whole)
    with pytest.raises(WireError):
        unpack({"packed": names}, unflatten(leaves), link("lossless"))
