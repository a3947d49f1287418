"""Describe a federation before training: numbers, a table and warnings."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from textwrap import shorten

import numpy as np
import torch
from numpy.typing import NDArray
from rich.table import Table
from rich.text import Text

from fedloom.data import scarcity
from fedloom.data.federation import Federation
from fedloom.data.plausibility import suspicions
from fedloom.data.scarcity import Numbers, client_and_label, first_five, labels_of_clients
from fedloom.data.split import SPLITS

SOME = 10_000  # examples whose values are looked at
COMMON = 0.6  # a share of one label that a model should be compared with
LARGE = 30.0  # from this size of features on, steps with usual learning rates are too long
BYTES = 100.0  # pictures whose values go beyond this are bytes that nobody scaled
MANY = 64  # features that a picture has at least: a table of measurements rarely has as many
CONSTANT = 0.95  # a share of one value from which on a feature counts as constant, such as a pixel at the edge
FAR_FROM_ZERO = 1000.0  # a feature this many of the smallest standard deviations from 0 outweighs all others
APART = 30.0  # features whose standard deviations differ by this factor are hard to learn from together


@dataclass(frozen=True, eq=False)
class Description:
    """All clients, with one array per column so that a million clients cost little, and warnings."""

    names: Sequence[object]
    sizes: Numbers  # splits × clients
    labels: Numbers  # the number of labels of each client; 0 for a regression
    largest: NDArray[np.float64]  # the share of each client's most common label; nan for a regression
    classes: tuple[str, ...]
    server: dict[str, int]
    warnings: tuple[str, ...]
    features: tuple[str, ...] = ()

    @property
    def clients(self) -> int:
        """The number of clients."""
        return len(self.labels)

    @property
    def examples(self) -> int:
        """The number of all clients' examples in all splits, without those of the server."""
        return int(self.sizes.sum())


def describe(federation: Federation, where: str = "") -> Description:
    """Count the examples of every client. Warnings about clients add `where`, such as " in seed 1".

    >>> federation = Federation.from_arrays(np.zeros((6, 1)), [0, 0, 0, 0, 1, 1], client=["a"] * 3 + ["b"] * 3)
    >>> description = describe(federation)
    >>> description.sizes.tolist(), description.labels.tolist()
    ([[1, 1], [1, 1], [1, 1]], [1, 2])
    >>> description.warnings[0]
    '1 of 2 clients has only one label: a.'
    """
    sizes = np.stack([federation.sizes(split) for split in SPLITS])
    labels, largest = labels_of_clients(federation)
    return Description(
        names=range(federation.clients) if federation.names is None else federation.names,
        sizes=sizes,
        labels=labels,
        largest=largest,
        classes=federation.classes,
        server={name: len(y) for name, (_, y) in federation.server.items()},
        warnings=(*suspicions(federation, where), *_warnings(federation, sizes, where), *_of_values(federation)),
        features=federation.features,
    )


def label_counts(federation: Federation, most: int = 200) -> dict[str, object] | None:
    """Return the number of examples of every label at every client, in a form for JSON: of all and of test examples.

    If the server holds test examples, "server" has their labels. The result is None for a regression, and for more than
    `most` clients or classes.

    >>> federation = Federation.from_arrays(np.zeros((6, 1)), [0, 0, 0, 0, 1, 1], client=["a"] * 3 + ["b"] * 3)
    >>> label_counts(federation)
    {'classes': ['0', '1'], 'counts': [[3, 0], [1, 2]], 'tested': [[1, 0], [1, 0]]}
    """
    classes, clients = len(federation.classes), federation.clients
    if not 0 < classes <= most or clients > most:
        return None
    pairs = client_and_label(federation)
    some = {"counts": pairs, "tested": pairs[federation.indices(federation.everyone, "test").numpy()]}
    counted = {name: np.bincount(one, minlength=clients * classes) for name, one in some.items()}
    _, at_server = federation.server.get("test", (None, None))
    return {
        "classes": list(federation.classes),
        **{name: counts.reshape(clients, classes).tolist() for name, counts in counted.items()},
        **({} if at_server is None else {"server": np.bincount(at_server.numpy(), minlength=classes).tolist()}),
    }


def table(description: Description, limit: int = 20) -> Table:
    """Return a table of the first `limit` clients, with totals and warnings. It fits 80 columns."""
    kind = f"{len(description.classes):,} classes" if description.classes else "a regression"
    plural = "" if description.clients == 1 else "s"
    server = " and ".join(f"{count:,} {name} examples" for name, count in description.server.items())
    result = Table(
        title=f"{description.clients:,} client{plural}, {description.examples:,} examples, {kind}"
        + (f"\nThe server holds {server}" if server else "")
        + _names("features", description.features)
        + _names(
            "classes", [f"{number} = {name}" for number, name in _named(description.classes)], " (number = label)"
        ),
        caption=Text("\n".join(description.warnings)) if description.warnings else None,
        caption_justify="left",
        show_footer=True,
    )
    columns = {"examples": description.sizes.sum(axis=0), **dict(zip(SPLITS, description.sizes, strict=True))}
    result.add_column("client", "all", max_width=20, overflow="ellipsis", no_wrap=True)
    for name, counts in columns.items():
        result.add_column(name, f"{counts.sum():,}", justify="right", no_wrap=True)
    for name in ("labels", "largest") if description.classes else ():
        result.add_column(name, justify="right", no_wrap=True)
    for number in range(min(limit, description.clients)):
        cells = [f"{counts[number]:,}" for counts in columns.values()]
        if description.classes:
            cells += [f"{description.labels[number]:,}", f"{description.largest[number]:.0%}"]
        name = Text(str(description.names[number]))  # as Text, so that a name like [red] is not taken for markup
        result.add_row(name, *cells)
    if description.clients > limit:
        result.add_row(f"… {description.clients - limit:,} more")
    return result


def _named(classes: Sequence[str]) -> list[tuple[int, str]]:
    """Return the numbers and names of classes, if the names say more than the numbers."""
    return [] if list(classes) == [str(number) for number in range(len(classes))] else list(enumerate(classes))


def _names(what: str, names: Sequence[str], meaning: str = "") -> str:
    return f"\n{len(names):,} {what}{meaning}: {shorten(', '.join(names), 400, placeholder=' …')}" if names else ""


def _warnings(federation: Federation, sizes: Numbers, where: str) -> Iterator[str]:
    yield from scarcity.sentences(federation, where)
    if not sizes[SPLITS.index("test")].any() and "test" not in federation.server:
        yield "There are no test examples, so results have no numbers on test data: split = [0.6, 0.2, 0.2] makes some."
    if federation.classes:
        counts = np.bincount(federation.y.numpy(), minlength=len(federation.classes))
        absent = [name for name, count in zip(federation.classes, counts, strict=True) if count == 0]
        if absent:
            few = f"{len(absent):,} of {len(counts):,} classes"
            yield f"No client has examples of {few}{where}: {first_five(absent)}."


def _of_values(federation: Federation) -> Iterator[str]:
    """Cautions about features and labels themselves, from some of the examples. On a network there are none here."""
    if not len(federation.y):
        return
    if len(federation.classes) > 1:
        counts = np.bincount(federation.y.numpy(), minlength=len(federation.classes))
        share = counts.max() / counts.sum()
        if share >= COMMON:
            yield f"Always predicting {federation.classes[counts.argmax()]} is right for {share:.0%} of the examples."
    some = federation.x[:: len(federation.x) // SOME + 1]
    table = some.dim() == 2 and some.is_floating_point()
    if some.dtype == torch.uint8 or (some.dim() > 2 and some.is_floating_point()) or (table and _like_pictures(some)):
        largest = float(some.max()) * (1.0 if some.is_floating_point() else federation.scale)
        if largest > BYTES:
            yield f"Features go up to {largest:g}, as bytes of pictures do: scale them, such as by 1/255, or normalise."
    elif table and not federation.preprocessing.untouched:
        yield from _scales(federation, some.double().numpy())


def _like_pictures(some: torch.Tensor) -> bool:
    """Whether rows are probably pictures without their shape: many numbers from 0 to 255, most of them once large."""
    largest = some.amax(0)
    bytes_alone = bool((some >= 0).all() and (some <= 255).all())
    return bytes_alone and len(largest) >= MANY and float(largest.median()) > BYTES


def _scales(federation: Federation, some: NDArray[np.float64]) -> Iterator[str]:
    with np.errstate(invalid="ignore"):
        spread = np.nan_to_num(np.nanstd(some, axis=0))
    few = some[:: len(some) // 1000 + 1]  # medians take long
    with warnings.catch_warnings():  # about a column that is empty
        warnings.simplefilter("ignore", RuntimeWarning)
        middle = np.nanmedian(few, axis=0)
    same = (few == middle).mean(axis=0)  # a feature that hardly ever varies says nothing of its scale
    varying = np.flatnonzero((spread > 0) & (same < CONSTANT))
    if not len(varying):
        return
    names = federation.features or [f"feature {place}" for place in range(some.shape[1])]
    small, large = (int(varying[pick(spread[varying])]) for pick in (np.argmin, np.argmax))
    far = int(varying[np.argmax(np.abs(middle[varying]))])
    advice = 'Set normalize = "federated" or "client".'
    if spread[large] > APART * spread[small]:
        times = f"{spread[large] / spread[small]:,.0f} times as much as {names[small]}"
        yield f"Features differ in scale: {names[large]} varies {times}. {advice}"
    elif abs(middle[far]) > FAR_FROM_ZERO * spread[small]:
        varies = "it" if far == small else names[small]
        yield (
            f"Features differ in scale: {names[far]} is about {middle[far]:.3g}, and {varies} varies by "
            f"{spread[small]:.2g} only. {advice}"
        )
    elif (size := np.hypot(middle, spread)[varying]).max() > LARGE:
        name = names[int(varying[size.argmax()])]
        yield f"Features are large: {name} is about {size.max():.3g}, and models learn best near 1. {advice}"
