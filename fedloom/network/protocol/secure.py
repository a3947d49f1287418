"""How the messages of a secure sum are written: bytes as hexadecimal digits, and vectors as whole numbers."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fedloom.algorithm import Update
from fedloom.network.protocol.messages import SecurePeer
from fedloom.privacy.secure.masks import Vector
from fedloom.privacy.secure.session import Advertisement, pack

MASKED = "masked"  # the group of an update that holds nothing but a masked vector


def to_hex(values: Mapping[int, bytes]) -> dict[str, str]:
    """Write bytes by client."""
    return {str(client): value.hex() for client, value in values.items()}


def from_hex(values: Mapping[str, str]) -> dict[int, bytes]:
    """Read bytes by client."""
    return {int(client): bytes.fromhex(value) for client, value in values.items()}


def advertisement(peer: SecurePeer) -> Advertisement:
    """Return a client's keys, as it signed them."""
    keys = (bytes.fromhex(value) for value in (peer.mask_key, peer.channel_key, peer.signature))
    return Advertisement(peer.client, *keys)


def masked_update(vector: Vector) -> Update:
    """Return a masked vector as an update."""
    signed = torch.from_numpy(vector.view(f"<i{vector.itemsize}"))
    return Update({MASKED: {MASKED: signed[None]}}, torch.ones(1, dtype=torch.float64))


def masked_vector(update: Update) -> Vector:
    """Return the masked vector of an update."""
    signed = update.groups[MASKED][MASKED][0].numpy()
    return signed.view(f"<u{signed.itemsize}")


def question(method: str, model: str, clip: float | None = None) -> bytes:
    """Return what a secure sum is about: all its clients must run this method on the model with this SHA-256.

    `clip` is what they bound their changes by, with differential privacy of clients.
    """
    return pack("question", method, model, repr(clip))
