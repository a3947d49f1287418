"""What the coordinator shares, as a parcel: as it is, or compressed as the run announced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedloom.compression.downlink import Downlink
from fedloom.compression.method import Damaged
from fedloom.network.protocol.tensors import Parcel, WireError, flatten, unflatten
from fedloom.tree import Groups

PACKED = "packed"  # in a parcel's header: the leaves that parts stand for
FROZEN = "frozen"  # in a parcel's header: the SHA-256 of the frozen parameters, which agents have


def pack(groups: Groups, link: Downlink | None, frozen: str = "") -> Parcel:
    """Return the parcel of what is shared. Its SHA-256 also stands for the frozen parameters that belong to it."""
    header = {FROZEN: frozen} if frozen else {}
    if link is None:
        return Parcel(header, flatten(groups))
    rest, parts, names = link.pack(groups)
    return Parcel({**header, PACKED: names}, flatten(rest, "rest/") | flatten(parts, "parts/"))


def unpack(header: Mapping[str, Any], content: Groups, link: Downlink | None) -> Groups:
    """Return what was shared. Raise `WireError` if it is compressed in another way than the run announced."""
    names = header.get(PACKED)
    if names is None:
        return content
    if link is None:
        raise WireError("the coordinator compressed what it sent, and the run announced no [compress] down")
    if not isinstance(names, dict) or not all(isinstance(some, list) for some in names.values()):
        raise WireError("the header of a compressed parcel has the wrong type")
    try:
        return link.unpack(unflatten(content.get("rest", {})), unflatten(content.get("parts", {})), names)
    except (Damaged, TypeError) as error:
        raise WireError(f"what the coordinator sent cannot be decompressed: {error}") from None
