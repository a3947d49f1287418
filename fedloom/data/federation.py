"""A federation: all clients' examples in one contiguous tensor, with an index range per client.

A client costs eight bytes, even if there are millions: splits are computed from a key when they are needed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fedloom import keys
from fedloom.data.preprocessing import Preprocessing, columns_named
from fedloom.data.split import SPLITS, Split, SplitName
from fedloom.errors import InputError

SINGLE = 2.0**-23  # the relative distance of neighbouring numbers in single precision
FEWEST_STEPS = 100  # of single precision, between the smallest and the largest value of a column
NOISE = 1e-13  # relative differences that double precision itself makes


@dataclass(frozen=True)
class Dataset:
    """What a source loads: examples in file order, and the client of each if the file has it."""

    x: Tensor
    y: Tensor
    client: NDArray[Any] | None = None  # one name per example, if the data has natural clients
    test: tuple[Tensor, Tensor] | None = None  # the official test set, if there is one
    classes: tuple[str, ...] = ()  # names of the labels; empty for a regression
    scale: float = 1.0  # the model sees integer features multiplied by this
    features: tuple[str, ...] = ()
    missing: bool = False  # whether NaN marks a missing value, which normalisation fills
    split: NDArray[np.int64] | None = None  # the place in SPLITS of each example, if the data says it
    group: NDArray[Any] | None = None  # examples with the same value stay in one split, such as those of a patient
    cautions: tuple[str, ...] = ()  # sentences about what was left out, or is rounded too much
    preprocessing: Preprocessing = field(
        default_factory=Preprocessing
    )  # how the source made examples, so that new ones can be made


@dataclass(frozen=True, eq=False)
class Federation:
    """All clients with their data. `x[offsets[c]:offsets[c + 1]]` are the examples of client c."""

    x: Tensor
    y: Tensor
    offsets: NDArray[np.int64]
    split: Split = field(default_factory=Split)
    seed: int = 0
    names: Sequence[str] | None = None
    classes: tuple[str, ...] = ()
    scale: float = 1.0
    server: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)  # the server's own data by split
    features: tuple[str, ...] = ()
    split_sizes: NDArray[np.int64] | None = None  # clients × splits, if the data says the splits; rows are in order
    preprocessing: Preprocessing = field(default_factory=Preprocessing)
    cautions: tuple[str, ...] = ()  # as in `Dataset`
    agreed: Preprocessing | None = None  # what several sites agreed on, if the data is prepared by it
    gaps: NDArray[np.int64] | None = None  # clients × columns of a table: missing values before they were filled
    scaled_by: str = ""  # whose training examples decided how features or labels are scaled, if any did
    largest_group: int | None = None  # the most examples of a client that belong together, such as one patient's

    @property
    def clients(self) -> int:
        return len(self.offsets) - 1

    @property
    def advice_if_diverged(self) -> str:
        """What else may help if training diverges: labels in large units make large gradients."""
        scaled = bool(self.classes) or self.preprocessing.target is not None
        return "" if scaled else " So may scale_target = true in [data], if labels are large numbers."

    @property
    def everyone(self) -> int:
        """The number of a virtual client with the data of all clients, for the pooled baseline."""
        return self.clients

    def name(self, client: int) -> str:
        if client == self.everyone:
            return "everyone"
        return str(client) if self.names is None else str(self.names[client])

    def site(self, client: int) -> Hashable:
        """Return where a client is: every client has its own place, unless agents on a network host several."""
        return client

    @property
    def withheld(self) -> dict[str, list[int]]:
        """The metrics that policies of sites on a network withhold, and the clients there."""
        return {}

    @property
    def sending_scores(self) -> list[int]:
        """The clients on a network that send scores and labels of single examples."""
        return []

    def example(self) -> Tensor:
        """Return the first two examples as a model takes them, in single precision."""
        x = self.x[:2].clone()
        plain = not x.is_floating_point() and x.dtype != torch.uint8 and self.scale == 1.0
        return x if plain else x.float() * (1.0 if x.is_floating_point() else self.scale)

    def sizes(self, split: SplitName) -> NDArray[np.int64]:
        """Return the number of examples of every client in one split."""
        return np.array(self._sizes[SPLITS.index(split)])

    def counts(self, clients: Sequence[int], split: SplitName) -> NDArray[np.int64]:
        """Return the number of examples of some clients (or `everyone`) in one split."""
        ids = np.asarray(clients, dtype=np.int64)
        known = self._sizes[SPLITS.index(split)]
        sizes = known[np.minimum(ids, self.clients - 1)]
        if (ids == self.everyone).any():
            sizes = np.where(ids == self.everyone, known.sum(), sizes)
        return sizes

    @cached_property
    def _sizes(self) -> Sequence[NDArray[np.int64]]:
        given = self.split_sizes
        return self.split.sizes(np.diff(self.offsets)) if given is None else [*given.T]

    def indices(self, client: int, split: SplitName) -> Tensor:
        """Return the rows of `x` and `y` that belong to one split of a client (or of `everyone`)."""
        if client == self.everyone:
            return self._unions[split]
        start, end = int(self.offsets[client]), int(self.offsets[client + 1])
        if self.split_sizes is not None:
            sizes = self.split_sizes[client].tolist()
            return torch.split(torch.arange(start, end), sizes)[SPLITS.index(split)]
        return _split_rows(self.split, self.seed, client, start, end)[split]

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all examples and their clients: two federations with the same hash are the same."""
        digest = hashlib.sha256(repr((self.split, self.seed, self.scale, self.classes)).encode())
        server = [tensor.numpy() for split in sorted(self.server) for tensor in self.server[split]]
        server += [] if self.split_sizes is None else [self.split_sizes]
        for array in (self.x.numpy(), self.y.numpy(), self.offsets, *server):
            digest.update(f"{array.dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    @cached_property
    def test_fingerprint(self) -> str | None:
        """A hash of the examples that a global model is tested on, if they stay the same however the rest is divided.

        They are the server's or, if the data says the splits, the test splits of all clients together.
        """
        if "test" not in self.server and self.split_sizes is None:
            return None
        rows = self.indices(self.everyone, "test") if "test" not in self.server else slice(None)
        x, y = (one[rows].numpy() for one in self.server.get("test", (self.x, self.y)))
        digest = hashlib.sha256(f"{x.dtype} {x.shape} {y.dtype} {y.shape} {self.classes}".encode())
        for example in sorted(hashlib.sha256(a.tobytes() + b.tobytes()).digest() for a, b in zip(x, y, strict=True)):
            digest.update(example)
        return digest.hexdigest()

    @staticmethod
    def from_arrays(
        x: ArrayLike | Tensor,
        y: ArrayLike | Tensor,
        *,
        client: ArrayLike | None = None,
        group: ArrayLike | None = None,
        partition: Any = None,
        clients: int | None = None,
        split: Split | Sequence[float] = (0.6, 0.2, 0.2),
        seed: int = 0,
        normalize: str | Mapping[str, Sequence[float]] = "none",
        scale_target: bool = False,
        server: Any = None,
        test: tuple[Any, Any] | None = None,
    ) -> Federation:
        """Make a federation from arrays. Give `client` (one name per example), a `partition`, or a number of `clients`.

        The options mean what the keys of the `[data]` table mean. `test` is an official test set, (x, y). Examples with
        the same `group`, such as those of one patient, stay in one split.

        >>> Federation.from_arrays(np.zeros((6, 2)), [0, 1, 0, 1, 0, 1], client=["a", "a", "b", "b", "b", "b"])
        Federation(2 clients, 6 examples of 2 features, 2 classes)
        """
        from fedloom.data.build import federate  # here, because build imports this module

        keys.check_seed(seed)
        return federate(
            as_dataset(x, y, client=client, group=group, test=test),
            partition=partition,
            clients=clients,
            split=split,
            seed=seed,
            normalize=normalize,
            scale_target=scale_target,
            server=server,
        )

    @cached_property
    def _unions(self) -> dict[SplitName, Tensor]:
        return {split: torch.cat([self.indices(client, split) for client in range(self.clients)]) for split in SPLITS}

    def __repr__(self) -> str:
        width = " × ".join(str(side) for side in self.x.shape[1:]) or "1"
        kind = f"{len(self.classes)} classes" if self.classes else "regression"
        return f"Federation({self.clients} clients, {len(self.y)} examples of {width} features, {kind})"


@lru_cache(maxsize=20_000)
def _split_rows(split: Split, seed: int, client: int, start: int, end: int) -> dict[SplitName, Tensor]:
    # not a cached method: its cache would keep the tensors of every federation alive
    sizes = dict(zip(SPLITS, (int(size[0]) for size in split.sizes(np.array([end - start]))), strict=True))
    rows, order = torch.arange(start, end), list(SPLITS)
    if split.shuffle:
        order.reverse()  # shuffled rows are for the test first
        if sizes["train"] < end - start:
            rows = torch.from_numpy(keys.permutation(keys.key(seed, "split", client), end - start) + start)
    return dict(zip(order, torch.split(rows, [sizes[name] for name in order]), strict=True))


def as_dataset(
    x: ArrayLike | Tensor,
    y: ArrayLike | Tensor,
    *,
    client: ArrayLike | None = None,
    group: ArrayLike | None = None,
    test: tuple[Any, Any] | None = None,
) -> Dataset:
    """Make a dataset from arrays. Floating-point labels mean a regression, whole numbers mean classes.

    Labels that are texts mean what they mean in a CSV file: classes by name, sorted.
    """
    if test is not None and (not isinstance(test, (tuple, list)) or len(test) != 2 or len(test[0]) != len(test[1])):
        raise InputError("The official 'test' set must be examples and their labels, (x, y), as many of each.")
    classes: tuple[str, ...] = ()
    if _is_text(y):
        y, test, classes = _numbered(y, test)
    features, labels = _tensor(x), _tensor(y)
    if len(features) != len(labels):
        raise InputError(f"There are {len(features)} examples but {len(labels)} labels: every example needs one label.")
    owner = None if client is None else np.asarray(client)
    if owner is not None and not owner.ndim:
        raise InputError(
            f"'client' has one name per example. Got {client!r} instead: for a number of clients, write "
            f"clients={client!r}."
        )
    if owner is not None and len(owner) != len(labels):
        raise InputError(f"There are {len(labels)} examples but {len(owner)} client names: every example needs one.")
    groups = None if group is None else np.asarray(group)
    if groups is not None and groups.shape != (len(labels),):
        raise InputError(f"There are {len(labels)} examples but {groups.size} groups: every example needs one.")
    if labels.is_floating_point():
        labels = labels.to(torch.float32)
    else:
        labels = labels.long()
        if len(labels) and int(labels.max()) >= 1_000_000:  # an identifier used as a label would fill the memory
            raise InputError(
                f"Whole-number labels are class numbers from 0, and the largest here is {int(labels.max())}. "
                "Number the classes, or give floating-point labels for a regression."
            )
        classes = classes or (tuple(str(name) for name in range(int(labels.max()) + 1)) if len(labels) else ())
    official = None if test is None else (_tensor(test[0]), _tensor(test[1]).to(labels.dtype))
    columns = columns_named(getattr(x, "columns", ()))  # of a data frame
    preprocessing = Preprocessing(columns=columns)
    names = preprocessing.features
    made = Dataset(
        features, labels, owner, official, classes, features=names, group=groups, preprocessing=preprocessing
    )
    return replace(made, cautions=(*_rounded(x, names), *_rounded(y, ("the label",))))


def _is_text(y: Any) -> bool:
    kind = "f" if isinstance(y, Tensor) else getattr(getattr(y, "dtype", None), "kind", "O")
    one_each = getattr(y, "ndim", 1) == 1 and np.iterable(y)  # a data frame has several columns
    return kind in "OU" and one_each and any(isinstance(label, str) for label in y)


def _numbered(y: Any, test: tuple[Any, Any] | None) -> tuple[Tensor, tuple[Any, Any] | None, tuple[str, ...]]:
    """Return the numbers of labels that are texts, also those of an official test set, and the names of the classes."""
    from fedloom.data.sources.base import targets  # here, because it imports this module

    texts = [*y, *(test[1] if test is not None else ())]
    for row, text in enumerate(texts):
        if not isinstance(text, str) or not text.strip():
            raise InputError(f"Some labels are texts, so all must be. Label {row} is {text!r}.")
    numbers, classes = targets(texts, "auto")
    return numbers[: len(y)], None if test is None else (test[0], numbers[len(y) :]), classes


def _rounded(values: ArrayLike | Tensor, names: Sequence[str]) -> Iterator[str]:
    """Yield a sentence for each column in double precision whose values are too close together for single precision."""
    if isinstance(values, Tensor) and values.dtype != torch.float64:  # numpy does not have all of them
        return
    array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    if array.dtype != np.float64 or not array.size:
        return
    columns = array.reshape(len(array), -1)
    low, high = columns.min(axis=0), columns.max(axis=0)
    size = np.maximum(np.abs(low), np.abs(high))
    coarse = (high - low < FEWEST_STEPS * SINGLE * size) & (high - low > NOISE * size)
    for place in np.flatnonzero(coarse)[:3].tolist():
        name = names[place] if place < len(names) else f"feature {place}"
        yield (
            f"{name} has values from {low[place]:.12g} to {high[place]:.12g}. fedloom keeps examples in single "
            "precision, which has only a few numbers there. Subtract the mean before."
        )


def _tensor(values: ArrayLike | Tensor) -> Tensor:
    if isinstance(values, Tensor):
        tensor = values
    else:
        try:
            array = np.asarray(values)
        except ValueError as error:
            raise InputError(f"Features and labels must be arrays, with examples of one shape: {error}") from None
        if array.dtype.kind not in "biuf":
            raise InputError(
                f"Features must be numbers, and labels numbers or texts. Got values of type {array.dtype} instead: "
                "encode them."
            )
        wide = np.int64 if array.dtype.kind == "u" and array.itemsize > 1 else array.dtype.newbyteorder("=")
        # pandas returns read-only arrays, which torch does not accept
        tensor = torch.from_numpy(np.require(array, dtype=wide, requirements=["C", "W"]))
    return tensor.float() if tensor.dtype in (torch.float64, torch.float16, torch.bfloat16) else tensor
