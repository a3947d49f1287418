"""A client's training rows, and the errors of clients that cannot train on them."""

from __future__ import annotations

from torch import Tensor

from fedloom.errors import InputError
from fedloom.training.clients import Clients


def training_rows(data: Clients, position: int, batch_size: int | None = None, drop_last: bool = False) -> Tensor:
    """Return one client's training rows. Raise if there are none, or if batch normalisation would see one alone."""
    rows = data.rows(position, "train")
    check_size(data.name(position), len(rows), data.setup.normalises_features, batch_size, drop_last)
    return rows


def check_size(name: str, count: int, normalises: bool, batch_size: int | None, drop_last: bool) -> None:
    """Raise if a client with `count` training examples cannot train, or if batch normalisation would see one alone."""
    if count == 0:
        raise InputError(
            f"Client '{name}' has no training examples, so it cannot train. Change data.split or the partition."
        )
    if normalises and min(count, batch_size or count) == 1:
        what = "has one training example" if count == 1 else "trains on batches of one example"
        raise InputError(
            f"Client '{name}' {what}, but the model's batch normalisation needs at least two in a batch. "
            "Leave such clients out, use a larger batch_size, or normalise with nn.LayerNorm or nn.GroupNorm."
        )
    if normalises and batch_size and not drop_last and count % batch_size == 1:
        raise InputError(
            f"Client '{name}' has {count} training examples, so with batch_size = {batch_size} its last batch has "
            "one, and the model's batch normalisation needs at least two. Use drop_last = true, another batch_size, or "
            "normalise with nn.LayerNorm or nn.GroupNorm."
        )


def needs_validation(name: str) -> InputError:
    """Return the error for a client that stops early and has nothing to decide by."""
    return InputError(
        f"Client '{name}' has no validation examples, which patience (early stopping) needs. Change data.split, or "
        "leave patience out."
    )
