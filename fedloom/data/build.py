"""Make a federation from a dataset: set the server's examples aside, partition the rest, check and normalise them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom import keys
from fedloom.data import checks
from fedloom.data import partition as partitions
from fedloom.data.federation import Dataset, Federation
from fedloom.data.normalize import normalized, scaled_target
from fedloom.data.preprocessing import Preprocessing, numbers_first
from fedloom.data.split import SPLITS, Split
from fedloom.errors import InputError, nearest

NORMALIZE = ("none", "client", "federated")
Rows = NDArray[np.int64]


def federate(
    dataset: Dataset,
    *,
    partition: str | Mapping[str, Any] | partitions.Partition | None = None,
    clients: int | None = None,
    split: Split | Sequence[float] | None = None,
    seed: int = 0,
    normalize: str = "none",
    scale_target: bool | None = False,
    server: str | float | Mapping[str, Any] | None = None,
    agreed: Preprocessing | None = None,
) -> Federation:
    """Divide a dataset among clients.

    Without a `partition`, the client of each example decides, or there are `clients` equal iid parts. Statistics for
    normalisation may be those that several sites `agreed` on.

    >>> federate(Dataset(torch.zeros(6, 2), torch.tensor([0, 1, 0, 1, 0, 1]), classes=("a", "b")), clients=3)
    Federation(3 clients, 6 examples of 2 features, 2 classes)
    """
    if normalize not in NORMALIZE:
        raise InputError(
            f"The 'normalize' of the data must be {', '.join(NORMALIZE)}. Got {normalize!r} instead."
            f"{nearest(str(normalize), NORMALIZE)}"
        )
    if dataset.missing and normalize == "none":
        raise InputError(
            "This data has missing values, which normalisation fills with means: set normalize = "
            '"federated" (means over all clients, learnt from sums) or "client" (each client\'s own).'
        )
    if server not in (None, "none") and normalize == "client":
        raise InputError(
            'normalize = "client" uses each client\'s own statistics, so there are none for the data of the server. '
            'Use normalize = "federated", or server = "none".'
        )
    federation = divided(dataset, partition=partition, clients=clients, split=split, seed=seed, server=server)
    federation = scaled_target(federation, agreed) if scale_target else federation
    return federation if normalize == "none" else normalized(federation, normalize, dataset.missing, agreed)


def divided(
    dataset: Dataset,
    *,
    partition: Any = None,
    clients: int | None = None,
    split: Split | Sequence[float] | None = None,
    seed: int = 0,
    server: Any = None,
) -> Federation:
    """Divide a dataset among clients, with features and labels as the source has them."""
    y = checks.labels(dataset)
    on_server = _server_rows(server, len(y), seed)
    drawn = [rows for rows in on_server.values() if rows is not None]
    kept = np.setdiff1d(np.arange(len(y)), np.concatenate(drawn)) if drawn else np.arange(len(y))
    owner, count, names = _owners(dataset, y, kept, partition, clients, seed)
    sizes = np.bincount(owner, minlength=count)
    checks.no_client_empty(sizes, names)
    checks.features(dataset, lambda row: _holder(row, kept, owner, names))
    place = np.zeros(len(kept), np.int64) if dataset.split is None else dataset.split[kept]
    order = kept[np.lexsort((place, owner))]
    return Federation(
        x=_take(dataset.x, order),
        y=_take(y, order),
        offsets=np.concatenate([[0], np.cumsum(sizes)]),
        split=as_split(split),
        seed=seed,
        names=names,
        classes=dataset.classes,
        scale=dataset.scale,
        server={
            name: checks.official_test_set(dataset) if rows is None else (_take(dataset.x, rows), _take(y, rows))
            for name, rows in on_server.items()
        },
        features=dataset.features,
        split_sizes=None if dataset.split is None else _split_sizes(owner, place, count, names),
        preprocessing=dataset.preprocessing.replace(
            shape=tuple(dataset.x.shape[1:]),
            scale=dataset.scale,
            classes=dataset.classes,
            missing=dataset.missing,
        ),
    )


def _split_sizes(owner: Rows, place: Rows, count: int, names: Sequence[str] | None) -> Rows:
    """Return how many examples every client has in each split, where the data says the split of each example."""
    sizes = np.bincount(owner * len(SPLITS) + place, minlength=count * len(SPLITS)).reshape(count, len(SPLITS))
    untrained = np.flatnonzero(sizes[:, 0] == 0)
    if len(untrained):
        first = untrained[0] if names is None else names[untrained[0]]
        raise InputError(f"Client {first} has no training examples: its rows are all for validation or test.")
    return sizes


def as_split(split: Split | Sequence[float] | None) -> Split:
    """Return a split from three shares; None means the default."""
    if split is None or isinstance(split, Split):
        return split or Split()
    if len(split) != 3:
        raise InputError(
            f"The 'split' of the data must be three shares: train, validation, test. Got {list(split)} instead."
        )
    return Split(train=split[0], validation=split[1], test=split[2])


def _server_rows(server: Any, total: int, seed: int) -> dict[str, Rows | None]:
    """Return the rows of each split that the server holds; None stands for the official test set."""
    if server is None or server == "none":
        return {}
    wanted = server if isinstance(server, Mapping) else {"test": "official" if server == "test" else server}
    order = keys.permutation(keys.key(seed, "server"), total)
    result: dict[str, Rows | None] = {}
    used = 0
    for name in sorted(wanted):  # the test set first, so that adding a validation set does not change it
        if name not in ("test", "validation"):
            raise InputError(
                f"The server holds 'test' and 'validation' data, not '{name}'.{nearest(name, ('test', 'validation'))}"
            )
        if name == "test" and wanted[name] == "official":
            result[name] = None
            continue
        size = _amount(wanted[name], total)
        result[name] = np.sort(order[used : used + size])
        used += size
    if used >= total:
        raise InputError(
            f"The server would hold {used} of {total} examples, which leaves none for the clients: choose fewer."
        )
    return result


def _amount(amount: Any, total: int) -> int:
    if isinstance(amount, int) and not isinstance(amount, bool) and amount >= 1:
        return amount
    if isinstance(amount, float) and 0 < amount < 1:
        return max(1, round(amount * total))
    raise InputError(
        'The \'server\' of the data must be "none", "test" (the official test set), a share between 0 and 1, a whole '
        f'number of examples, or a table such as {{ test = "official", validation = 0.1 }}. Got {amount!r} instead.'
    )


def _owners(
    dataset: Dataset, y: Tensor, kept: Rows, partition: Any, clients: int | None, seed: int
) -> tuple[Rows, int, list[str] | None]:
    """Return the client of every kept example, the number of clients, and their names if they have any."""
    if partition is None:
        if dataset.client is None and clients is None:
            raise InputError(
                "This data does not say which client holds each example. Give a partition, such as "
                'partition = { name = "iid", clients = 10 }.'
            )
        partition = "iid" if dataset.client is None else "natural"
    if isinstance(partition, str):
        partition = {"name": partition}
    if isinstance(partition, Mapping):
        if partition.get("name") == "natural":
            return _natural(dataset.client, kept, clients is None and len(partition) == 1)
        partition = partition if clients is None else {"clients": clients, **partition}
    rule = partitions.partition(partition)
    count = rule.count(len(dataset.classes))
    if clients not in (None, count):
        raise InputError(f"There are two numbers of clients, {clients} and {count} in the partition: give one of them.")
    return rule.assign(_take(y, kept), keys.key(seed, "partition"), len(dataset.classes)), count, None


def _natural(client: NDArray[Any] | None, kept: Rows, without_settings: bool) -> tuple[Rows, int, list[str]]:
    """Take the clients from the data, in the order of their names: first numbers, in numeric order, then texts."""
    if client is None:
        raise InputError(
            "The natural partition needs a client for every example, but this data has none. Name the column "
            f'(client = "..."), or choose another partition: {", ".join(partitions.PARTITIONS)}.'
        )
    if not without_settings:
        raise InputError(
            "The natural partition takes its clients from the data: leave out their number, "
            'or choose another partition, such as partition = { name = "iid", clients = 10 }.'
        )
    values = np.asarray(client)
    if values.ndim != 1 or not len(kept) <= len(values):
        raise InputError(
            f"Clients must be one list with a name for every example. Got an array of shape {values.shape}."
        )
    if values.dtype.kind == "O":
        values = np.array(["" if value is None or value != value else str(value) for value in values])
    if values.dtype.kind in "biuf":
        blank = values != values
        found, owner = np.unique(values[kept], return_inverse=True)
        names = [str(int(value)) if float(value).is_integer() else str(value) for value in found]
    else:
        values = np.char.decode(values, "utf-8") if values.dtype.kind == "S" else values.astype(str)
        values = np.char.strip(values)
        blank = values == ""
        found, owner = np.unique(values[kept], return_inverse=True)
        names = sorted(found.tolist(), key=numbers_first)
        place = {name: number for number, name in enumerate(names)}
        owner = np.array([place[name] for name in found.tolist()], dtype=np.int64)[owner]
    if blank.any():
        raise InputError(f"Example {int(np.argmax(blank))} has no client: fill in its name, or remove the example.")
    return owner.astype(np.int64), len(names), names


def _holder(row: int, kept: Rows, owner: Rows, names: list[str] | None) -> str:
    place = int(np.searchsorted(kept, row))
    if place == len(kept) or kept[place] != row:
        return "held by the server"
    return f"client {owner[place] if names is None else names[owner[place]]}"


def _take(values: Tensor, rows: Rows) -> Tensor:
    everything = len(rows) == len(values) and bool((rows[1:] > rows[:-1]).all())
    return values if everything else values[torch.from_numpy(rows)]  # data that is already in order is not copied
