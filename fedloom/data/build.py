"""Make a federation from a dataset: set the server's examples aside, partition the rest, check and normalise them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom import keys
from fedloom.data import partition as partitions
from fedloom.data.categories import with_doubts
from fedloom.data.federation import Dataset, Federation
from fedloom.data.normalize import between, check_normalize, normalized, scaled_target
from fedloom.data.preprocessing import Preprocessing, numbers_first
from fedloom.data.split import SPLITS, Split
from fedloom.errors import InputError, nearest

VALIDATION, TEST = SPLITS.index("validation"), SPLITS.index("test")
Rows = NDArray[np.int64]
ROWS = 8192  # examples checked at a time, so that checks need little memory besides the data


def federate(
    dataset: Dataset,
    *,
    partition: str | Mapping[str, Any] | partitions.Partition | None = None,
    clients: int | None = None,
    split: Split | Sequence[float] | None = None,
    seed: int = 0,
    normalize: str | Mapping[str, Sequence[float]] = "none",
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
    check_normalize(normalize)
    bounds = normalize if isinstance(normalize, Mapping) else None
    if dataset.missing and normalize == "none":
        raise InputError(
            "This data has missing values, which normalisation fills with means: set normalize = "
            '"federated" (means over all clients, learnt from sums), "client" (each client\'s own), or bounds, whose '
            "middle is then used."
        )
    if server not in (None, "none") and normalize == "client":
        raise InputError(
            'normalize = "client" uses each client\'s own statistics, so there are none for the data of the server. '
            'Use normalize = "federated", or server = "none".'
        )
    here = dataset.preprocessing
    if lacking := [name for name in here.optional if here.columns and name not in {one.name for one in here.columns}]:
        raise InputError(
            f"This table lacks {', '.join(lacking)}, which [data] optional allows, and only the sites together know "
            "where the column belongs: `fedloom data summarize` at each site, `fedloom data agree`, and then "
            '[data] preprocessing = "agreed.json" at each site.'
        )
    federation = divided(dataset, partition=partition, clients=clients, split=split, seed=seed, server=server)
    federation = replace(federation, gaps=_gaps(federation) if dataset.missing else None)
    federation = with_doubts(federation) if agreed is None else federation
    federation = scaled_target(federation, agreed) if scale_target else federation
    federation = replace(federation, agreed=agreed)
    if bounds is not None:
        return normalized(federation, "federated", dataset.missing, between(bounds, federation))
    return federation if normalize == "none" else normalized(federation, str(normalize), dataset.missing, agreed)


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
    y = check_labels(dataset)
    on_server = _server_rows(server, len(y), seed)
    drawn = [rows for rows in on_server.values() if rows is not None]
    kept = np.setdiff1d(np.arange(len(y)), np.concatenate(drawn)) if drawn else np.arange(len(y))
    owner, count, names = _owners(dataset, y, kept, partition, clients, seed)
    sizes = np.bincount(owner, minlength=count)
    check_no_client_empty(sizes, names)
    check_features(dataset, lambda row: _holder(row, kept, owner, names))
    shares = as_split(split)
    place = _places(dataset, kept, owner, names is not None, shares, seed)
    order = kept[np.lexsort((np.zeros(len(kept)) if place is None else place, owner))]
    return Federation(
        x=_take(dataset.x, order),
        y=_take(y, order),
        offsets=np.concatenate([[0], np.cumsum(sizes)]),
        split=shares,
        seed=seed,
        names=names,
        classes=dataset.classes,
        scale=dataset.scale,
        server={
            name: official_test_set(dataset) if rows is None else (_take(dataset.x, rows), _take(y, rows))
            for name, rows in on_server.items()
        },
        features=dataset.features,
        split_sizes=None if place is None else _split_sizes(owner, place, count, names),
        preprocessing=dataset.preprocessing.replace(
            shape=tuple(dataset.x.shape[1:]),
            scale=dataset.scale,
            classes=dataset.classes,
            missing=dataset.missing,
        ),
        cautions=(*dataset.cautions, *_replaced_clients(dataset, names is not None)),
        largest_group=_largest_group(dataset, kept, owner),
    )


def _gaps(federation: Federation) -> Rows | None:
    """Return how many values of each column each client lacks: clients × columns; None if rows are of no table."""
    columns, x = federation.preprocessing.columns, federation.x
    if not columns or x.dim() != 2 or not x.is_floating_point():
        return None
    firsts = np.cumsum([0, *(len(column.features) for column in columns)])[:-1]  # a missing category lacks all of them
    starts = federation.offsets[:-1]
    return np.stack([np.add.reduceat(x[:, first].isnan().numpy().astype(np.int64), starts) for first in firsts], 1)


def _replaced_clients(dataset: Dataset, natural: bool) -> Iterator[str]:
    """Yield a sentence if a partition takes the place of the clients that the data names."""
    if dataset.client is not None and not natural:
        known = len(np.unique(np.asarray(dataset.client).astype(str)))
        whose = f"the {known:,} clients" if known > 1 else "the client"
        yield f"`partition` takes the place of {whose} that the data names: leave it out to keep them."


def _largest_group(dataset: Dataset, kept: Rows, owner: Rows) -> int | None:
    if dataset.group is None or not len(kept):
        return None
    group = np.unique(dataset.group[kept], return_inverse=True)[1]
    return int(np.unique(np.stack([owner, group]), axis=1, return_counts=True)[1].max())


def _places(dataset: Dataset, kept: Rows, owner: Rows, natural: bool, split: Split, seed: int) -> Rows | None:
    """Return the split of each kept example, if the data says it, or says which examples belong together."""
    if dataset.group is None:
        return None if dataset.split is None else dataset.split[kept]
    whole = np.unique(dataset.group, return_inverse=True)[1]
    group, at_server = whole[kept], np.delete(whole, kept)
    # two hospitals may well have a patient 7, but a partition of our own takes one patient's rows apart
    pairs = np.unique(np.stack([owner, group]), axis=1)
    if np.isin(group, at_server).any() or (not natural and len(np.unique(pairs[1])) < pairs.shape[1]):
        advice = 'Name the column with the clients, as in client = "hospital", and leave out partition and server.'
        if dataset.client is not None:  # a column names them already, or there is one file for each
            advice = "The data says which client has each example: leave out partition and server."
        raise InputError(
            "[data] group keeps examples together that belong together, and this partition, or this share of the "
            f"server, takes them apart. {advice}"
        )
    places = np.zeros(len(kept), np.int64)
    for client, rows in enumerate(np.split(np.argsort(owner, kind="stable"), np.cumsum(np.bincount(owner))[:-1])):
        _, first, mine, sizes = np.unique(group[rows], return_index=True, return_inverse=True, return_counts=True)
        order = np.argsort(-first)  # without shuffle, what comes last is for the test
        if split.shuffle:
            order = keys.permutation(keys.key(seed, "split", client), len(sizes))
        before = np.cumsum(sizes[order]) - sizes[order]
        _, validation, test = (int(part[0]) for part in split.sizes(np.array([len(rows)])))
        of_group = np.zeros(len(sizes), np.int64)
        of_group[order] = np.where(before < test, TEST, np.where(before < test + validation, VALIDATION, 0))
        of_group[order[-1]] = 0  # one is for training
        places[rows] = of_group[mine]
    return places


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
    if np.ndim(split) != 1 or len(split) != 3:
        raise InputError(
            "The 'split' of the data must be three shares: train, validation, test. Got "
            f"{np.asarray(split).tolist()!r} instead."
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
            f"The server would hold {used} of {total} examples, which leaves none for the clients: choose fewer. If "
            "clients bring their own to `fedloom serve`, server = 1.0 means all of these."
        )
    return result


def _amount(amount: Any, total: int) -> int:
    if isinstance(amount, int) and not isinstance(amount, bool) and amount >= 1:
        return amount
    if isinstance(amount, float) and 0 < amount <= 1:
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
                "This data does not say which client holds each example. Give a partition: "
                'partition = { name = "iid", clients = 1 } if it is all of one client, such as a site, or clients = 10 '
                "to try out ten."
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


# --- checks of the examples: an error names the client and the place of the first wrong example


def check_labels(dataset: Dataset) -> Tensor:
    """Check the labels; return them as class numbers, or as float32 for a regression."""
    if len(dataset.x) != len(dataset.y):
        raise InputError(
            f"There are {len(dataset.x)} examples but {len(dataset.y)} labels: every example needs one label."
        )
    if len(dataset.y) == 0:
        raise InputError("The data has no examples: check the file.")
    clients = dataset.client
    return _numbers(
        dataset.y,
        dataset.classes,
        lambda row: f"example {row}" if clients is None else f"example {row} (client {clients[row]})",
    )


def official_test_set(dataset: Dataset) -> tuple[Tensor, Tensor]:
    """Return the official test set, checked like the other examples."""
    if dataset.test is None:
        raise InputError(
            "The server should hold the official test set, but this source has none. "
            "Give a share to draw instead, such as server = 0.1."
        )
    x, y = dataset.test
    if len(x) != len(y) or x.shape[1:] != dataset.x.shape[1:]:
        raise InputError(
            f"The official test set has {len(y)} labels for examples of shape {tuple(x.shape)}: it must have one for "
            f"each, and examples of shape {tuple(dataset.x.shape[1:])} like the others."
        )
    row = _not_finite(x, dataset.missing)
    if row is not None:
        raise InputError(
            f"Example {row} of the official test set has a feature that is not a finite number: correct it."
        )
    return x, _numbers(y, dataset.classes, lambda row: f"example {row} of the official test set")


def check_features(dataset: Dataset, holder: Callable[[int], str]) -> None:
    """Check that all features are finite; `holder` names the client of a row."""
    row = _not_finite(dataset.x, dataset.missing)
    if row is None:
        return
    values = dataset.x[row].flatten()
    place = _first(~_allowed(values, dataset.missing))
    feature = f"'{dataset.features[place]}'" if len(dataset.features) == len(values) else place
    raise InputError(
        f"Feature {feature} of example {row} ({holder(row)}) is {values[place].item()}: features must be finite "
        "numbers. Fill in such values or remove the example."
    )


def check_no_client_empty(sizes: NDArray[np.int64], names: Sequence[str] | None) -> None:
    """Check that every client has an example."""
    empty = np.flatnonzero(sizes == 0)
    if len(empty):
        first = empty[0] if names is None else names[empty[0]]
        raise InputError(
            f"Client {first} would have no examples, as would {len(empty) - 1} more of {len(sizes)} clients. "
            "Use fewer clients, another partition, or dirichlet with its 'min_examples'."
        )


def _numbers(y: Tensor, classes: tuple[str, ...], where: Callable[[int], str]) -> Tensor:
    def refuse(wrong: Tensor, why: str) -> None:
        if wrong.any():
            row = _first(wrong)
            raise InputError(f"The label of {where(row)} is {y[row].tolist()}: {why}.")

    if y.is_floating_point():
        refuse(~torch.isfinite(y), "labels must be finite numbers")
    if not classes:
        return y.to(torch.float32)
    numbers = y.long()
    refuse(numbers != y, "the labels of classes must be whole numbers")
    allowed = f"with {len(classes)} classes, labels must be 0 to {len(classes) - 1}"
    refuse((numbers < 0) | (numbers >= len(classes)), allowed)
    return numbers


def _not_finite(x: Tensor, missing: bool) -> int | None:
    if x.is_floating_point():
        for start in range(0, len(x), ROWS):
            allowed = _allowed(x[start : start + ROWS], missing)
            if not allowed.all():
                return start + _first(~allowed)
    return None


def _allowed(values: Tensor, missing: bool) -> Tensor:
    return ~torch.isinf(values) if missing else torch.isfinite(values)


def _first(wrong: Tensor) -> int:
    """Return the first row with a wrong value."""
    return int(wrong.reshape(len(wrong), -1).any(dim=1).nonzero()[0])
