"""Describe a federation before training: numbers, a table and warnings."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import shorten
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from fedloom.data import scarcity
from fedloom.data.federation import Federation
from fedloom.data.plausibility import OTHER_UNIT_THERE, suspicions
from fedloom.data.scarcity import Numbers, client_and_label, first_five, labels_of_clients
from fedloom.data.split import SPLITS
from fedloom.data.stale_agreement import AGREE_AGAIN

TESTED = ("tested", "server")  # what `label_counts` says of test examples
LABELS_OF_SEED = "labels of seed "  # how the names of facts of a run begin: TESTED, for seeds with other test examples
SOME = 10_000  # examples whose values are looked at
COMMON = 0.6  # a share of one label that a model should be compared with
WIDTH = 80  # columns of a terminal
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
    most_common: Numbers  # that label's number; -1 for a regression
    classes: tuple[str, ...]
    server: dict[str, int]
    warnings: tuple[str, ...]
    features: tuple[str, ...] = ()
    missing: Mapping[str, Numbers] = field(default_factory=dict)  # of each client, by columns that lack some values

    @property
    def clients(self) -> int:
        """The number of clients."""
        return len(self.labels)

    @property
    def examples(self) -> int:
        """The number of all clients' examples in all splits, without those of the server."""
        return int(self.sizes.sum())

    def message(self) -> dict[str, Any]:
        """Return everything in a form for JSON."""
        clients = []
        for number, sizes in enumerate(self.sizes.T.tolist()):
            one = {"name": str(self.names[number]), "examples": sum(sizes), **dict(zip(SPLITS, sizes, strict=True))}
            if self.classes:
                most = {"class": self.classes[self.most_common[number]], "share": float(self.largest[number])}
                one |= {"labels": int(self.labels[number]), "largest": most}
            lacking = {name: int(counts[number]) for name, counts in self.missing.items() if counts[number]}
            clients.append({**one, "missing": lacking} if lacking else one)
        named = {"classes": list(self.classes), "features": list(self.features), "server": self.server}
        return {"examples": self.examples, "clients": clients, **named, "warnings": list(self.warnings)}


def describe(federation: Federation, where: str = "", at_site: bool = False) -> Description:
    """Count the examples of every client. Warnings about clients add `where`, such as " in seed 1".

    `at_site`, these are the clients of one site among others.

    >>> federation = Federation.from_arrays(np.zeros((6, 1)), [0, 0, 0, 0, 1, 1], client=["a"] * 3 + ["b"] * 3)
    >>> description = describe(federation)
    >>> description.sizes.tolist(), description.labels.tolist()
    ([[1, 1], [1, 1], [1, 1]], [1, 2])
    >>> description.warnings[0]
    '1 of 2 clients has only one label: a.'
    """
    sizes = np.stack([federation.sizes(split) for split in SPLITS])
    labels, largest, most_common = labels_of_clients(federation)
    doubts = [*suspicions(federation, where, at_site)]
    other_unit = any(OTHER_UNIT_THERE in doubt for doubt in doubts)
    return Description(
        names=range(federation.clients) if federation.names is None else federation.names,
        sizes=sizes,
        labels=labels,
        largest=largest,
        most_common=most_common,
        classes=federation.classes,
        server={name: len(y) for name, (_, y) in federation.server.items()},
        warnings=(*doubts, *_warnings(federation, sizes, where), *_of_values(federation, other_unit)),
        features=federation.features,
        missing=_missing(federation),
    )


def label_counts(federation: Federation, most: int = 200) -> dict[str, object] | None:
    """Return the number of examples of every label at every client, in a form for JSON: of all and of test examples.

    No client has a row if there are more than `most` of them, or if their examples are elsewhere, as on a network. If
    the server holds test examples, "server" has their labels. The result is None for a regression, and for more than
    `most` classes.

    >>> federation = Federation.from_arrays(np.zeros((6, 1)), [0, 0, 0, 0, 1, 1], client=["a"] * 3 + ["b"] * 3)
    >>> label_counts(federation)
    {'classes': ['0', '1'], 'counts': [[3, 0], [1, 2]], 'tested': [[1, 0], [1, 0]]}
    """
    classes, clients = len(federation.classes), federation.clients
    if not 0 < classes <= most:
        return None
    counted: dict[str, list[Any]] = {"counts": [], "tested": []}
    if len(federation.y) and clients <= most:
        pairs = client_and_label(federation)
        some = {"counts": pairs, "tested": pairs[federation.indices(federation.everyone, "test").numpy()]}
        counted = {
            name: np.bincount(one, minlength=clients * classes).reshape(clients, classes).tolist()
            for name, one in some.items()
        }
    if "test" in federation.server:  # which may have labels that are no class, such as ignored ones
        _, at_server = federation.server["test"]
        counted["server"] = [int((at_server == number).sum()) for number in range(classes)]
    return {"classes": list(federation.classes), **counted}


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
    shown = range(min(limit, description.clients))
    common = [f"{description.largest[number]:.0%} {_most_common(description, number)}" for number in shown]
    for_client, for_class = 20, 0
    if description.classes:  # what numbers leave of 80 columns
        numbers = sum(max(len(name), len(f"{counts.sum():,}")) for name, counts in columns.items())
        left = WIDTH - numbers - len("labels") - 3 * (len(columns) + 3) - 1
        name = max(len("client"), *(cell_len(str(description.names[number])) for number in shown))
        for_class = max(len("largest"), left // 2, left - min(name, 20))
        for_client = max(len("client"), min(20, left - min(for_class, max(map(cell_len, common)))))
    result.add_column("client", "all", max_width=for_client, overflow="ellipsis", no_wrap=True)
    for name, counts in columns.items():
        result.add_column(name, f"{counts.sum():,}", justify="right", no_wrap=True)
    if description.classes:
        result.add_column("labels", justify="right", no_wrap=True)
        result.add_column("largest", max_width=for_class, overflow="ellipsis", no_wrap=True)
    for number in shown:
        cells = [f"{counts[number]:,}" for counts in columns.values()]
        if description.classes:
            cells += [f"{description.labels[number]:,}", common[number]]
        # as Text, so that a name like [red] is not taken for markup
        result.add_row(*map(Text, (str(description.names[number]), *cells)))
    if description.clients > limit:
        result.add_row(f"… {description.clients - limit:,} more")
    return result


def _most_common(description: Description, number: int) -> str:
    return description.classes[description.most_common[number]] if description.classes else ""


def missing_table(description: Description, limit: int = 20) -> Table | None:
    """Return a table of the first `limit` columns that lack values, and at which clients. It fits 80 columns."""
    if not description.missing:
        return None
    result = Table(title="Missing values")
    result.add_column("column", max_width=24, overflow="ellipsis", no_wrap=True)
    result.add_column("missing", justify="right", no_wrap=True)
    result.add_column("clients", max_width=36)
    sizes = description.sizes.sum(axis=0)
    for name, counts in list(description.missing.items())[:limit]:
        order = np.argsort(-counts, kind="stable")[: np.count_nonzero(counts)].tolist()
        where = [f"{_cut(str(description.names[one]))} {counts[one]:,} of {sizes[one]:,}" for one in order[:5]]
        more = [f"{len(order) - 5:,} more"] if len(order) > 5 else []
        result.add_row(*map(Text, (name, f"{counts.sum():,}", ", ".join([*where, *more]))))
    if len(description.missing) > limit:
        result.add_row(f"… {len(description.missing) - limit:,} more")
    return result


def _cut(name: str, most: int = 20) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


def _missing(federation: Federation) -> dict[str, Numbers]:
    """Return how many values each client lacks, by the columns that lack some."""
    if federation.gaps is None:
        return {}
    names = [column.name for column in federation.preprocessing.columns]
    return {name: counts for name, counts in zip(names, federation.gaps.T, strict=True) if counts.any()}


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


def _of_values(federation: Federation, other_unit: bool) -> Iterator[str]:
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
        yield from _scales(federation, some.double().numpy(), other_unit)


def _like_pictures(some: torch.Tensor) -> bool:
    """Whether rows are probably pictures without their shape: many numbers from 0 to 255, most of them once large."""
    largest = some.amax(0)
    bytes_alone = bool((some >= 0).all() and (some <= 255).all())
    return bytes_alone and len(largest) >= MANY and float(largest.median()) > BYTES


def _how_to_scale(federation: Federation, other_unit: bool) -> str:
    fitted = federation.preprocessing
    if federation.agreed is None:
        if fitted.bounds:
            return "Give each of them bounds in [data] normalize, near the values that it has."
        if fitted.mean:
            return "They are scaled by the training rows of all clients, and others are far from them: are these right?"
        if fitted.clients or fitted.reach:  # statistics of very many clients are not kept
            return (
                "They are scaled by each client's own training rows, and only centred where these never vary, as a "
                'single one: normalize = "federated" scales by the training rows of all clients.'
            )
        return 'Set normalize = "federated" or "client".'
    if not fitted.mean:
        return "Leave normalize out: features are then scaled as the sites agreed."
    if other_unit:  # which the summaries of an agreement would only take over
        return "They are scaled as the sites agreed, which does not fit another unit."
    return f"They are scaled as the sites agreed, which does not fit this data. {AGREE_AGAIN}"


def _scales(federation: Federation, some: NDArray[np.float64], other_unit: bool) -> Iterator[str]:
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
    advice = _how_to_scale(federation, other_unit)
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
