"""Draw a federation: a map of clients × labels, and the number of examples of each client."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unicodedata import east_asian_width

import numpy as np
from numpy.typing import NDArray

from fedloom import keys
from fedloom.data.federation import Federation
from fedloom.data.split import SPLITS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

Numbers = NDArray[np.int64]
COLOURS = ("#0072B2", "#E69F00", "#009E73")  # Okabe and Ito's, distinct for all common kinds of colour vision
EVERY_CLIENT = 200  # up to this number, each client has a row; beyond it, a sample is shown
SAMPLE = 100
EVERY_LABEL = 40  # up to this number, each label has a column; beyond it, labels are grouped in bins
BINS = 20


# Matplotlib brings one font, which has no Chinese, Japanese or Korean letters. These have them, where installed.
FONTS = (
    *("Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans CJK KR", "Noto Sans SC", "Noto Sans JP", "Noto Sans KR"),
    *("Source Han Sans SC", "Microsoft YaHei", "Yu Gothic", "Malgun Gothic", "PingFang SC", "Hiragino Sans GB"),
    *("Apple SD Gothic Neo", "Arial Unicode MS", "WenQuanYi Zen Hei", "WenQuanYi Micro Hei", "Droid Sans Fallback"),
)


class Columns(NamedTuple):
    """The columns of the map: the column of every example, the number of columns, ticks and title."""

    of: Numbers
    many: int
    ticks: list[tuple[float, str]]
    title: str


@lru_cache(maxsize=1)
def font_families() -> tuple[str, ...]:
    """Return matplotlib's own font, and those for other letters that are installed."""
    from matplotlib import font_manager

    installed = set(font_manager.get_font_names())
    return ("sans-serif", *(name for name in FONTS if name in installed))


@contextmanager
def readable_names() -> Iterator[None]:
    """Draw names in all letters that this machine has fonts for; others become boxes, and there is no warning."""
    import matplotlib

    with matplotlib.rc_context({"font.family": list(font_families())}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph \d+ .* missing from font")
        warnings.filterwarnings("ignore", message="Matplotlib currently does not support .* natively")
        yield


def save(figure: Figure, target: Any, **settings: Any) -> None:
    """Write a figure. Its fonts in a PDF are TrueType, because many publishers refuse Type 3, wherever that works."""
    import matplotlib
    from matplotlib.text import Text

    texts = (text.get_text() for text in figure.findobj(Text) if isinstance(text, Text))
    kind = 3 if _from_postscript_font("".join(texts)) else 42
    with readable_names(), matplotlib.rc_context({"pdf.fonttype": kind, "ps.fonttype": kind}):
        figure.savefig(target, **settings)


def _from_postscript_font(letters: str) -> bool:
    """Whether a font with PostScript outlines draws one of the letters: matplotlib cannot embed it as TrueType."""
    from matplotlib import font_manager

    left = {ord(letter) for letter in letters}
    for family in font_families() if left else ():
        path = font_manager.findfont(font_manager.FontProperties(family=[family]))
        found = left & font_manager.get_font(path).get_charmap().keys()
        if found and _has_postscript_outlines(path):
            return True
        left -= found
    return False


@lru_cache
def _has_postscript_outlines(path: str) -> bool:
    """Whether a font file has such outlines, as that of Noto Sans CJK has; all fonts of a collection are alike."""
    with open(path, "rb") as file:
        kind, _, start = (file.read(size) for size in (4, 8, 4))
        if kind == b"ttcf":  # a collection: where its first font starts
            file.seek(int.from_bytes(start, "big"))
            kind = file.read(4)
    return kind == b"OTTO"


@readable_names()
def plot(federation: Federation, path: str | Path) -> None:
    """Write a picture of the federation. The suffix of the path gives the format: png, svg or pdf."""
    from matplotlib.figure import Figure  # not pyplot: it has global state and may open windows

    clients = _shown(federation)
    everybody = len(clients) == federation.clients
    figure = Figure(figsize=(10, float(np.clip(1.8 + 0.3 * len(clients), 3.4, 8.0))), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2), sharey=everybody)
    plural = "" if federation.clients == 1 else "s"
    figure.suptitle(f"{federation.clients:,} client{plural}, {len(federation.y):,} examples")
    _map(figure, left, federation, clients)
    left.set_ylabel("client" if everybody else f"client (a sample of {len(clients)})")
    if everybody:
        _bars(figure, right, federation)
    else:
        _histogram(right, np.diff(federation.offsets))
    right.set_title("Number of examples", fontsize=11)
    save(figure, path, dpi=150)


def _shown(federation: Federation) -> Numbers:
    if federation.clients <= EVERY_CLIENT:
        return np.arange(federation.clients)
    return np.sort(keys.permutation(keys.key(federation.seed, "picture"), federation.clients)[:SAMPLE])


def _columns(federation: Federation) -> Columns:
    y, classes = federation.y.numpy(), len(federation.classes)
    if 0 < classes <= EVERY_LABEL:
        step = _step(classes, 20)
        names = shorten_all([federation.classes[at] for at in range(0, classes, step)], 12)
        return Columns(y, classes, [(float(at * step), name) for at, name in enumerate(names)], "label")
    if classes:
        edges = np.linspace(0, classes, BINS + 1).astype(np.int64)
        texts, values, title = [f"{edge:,}" for edge in edges], y, f"label's number ({classes:,} labels in {BINS} bins)"
    else:
        values = y.reshape(len(y), -1)[:, 0]
        edges = np.histogram_bin_edges(values, bins=BINS)
        texts, title = [f"{edge:.3g}" for edge in edges], "value of the target"
    of = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, BINS - 1)
    return Columns(of, BINS, [(at - 0.5, texts[at]) for at in range(0, BINS + 1, 4)], title)  # at the bins' edges


def _map(figure: Figure, axes: Axes, federation: Federation, clients: Numbers) -> None:
    """Draw one row per client. A darker cell is a larger share of its examples."""
    columns = _columns(federation)
    ranges = [slice(federation.offsets[client], federation.offsets[client + 1]) for client in clients]
    counts = np.array([np.bincount(columns.of[examples], minlength=columns.many) for examples in ranges])
    image = draw_shares(axes, counts, write_numbers=len(clients) <= 30, size=7)
    figure.colorbar(image, ax=axes, pad=0.02, format=lambda share, _: f"{100 * share:.0f} %")
    places, texts = zip(*columns.ticks, strict=True)
    slanted = sum(text_width(text) + 1 for text in texts) > 50
    axes.set_xticks(places, texts, rotation=40 if slanted else 0, ha="right" if slanted else "center")
    axes.set_xlabel(columns.title)
    step = _step(len(clients), 25)
    rows = range(0, len(clients), step)
    axes.set_yticks(rows, shorten_all([federation.name(int(clients[row])) for row in rows], 18))
    axes.set_title("Labels of each client (shares of its examples)", fontsize=11)


def draw_shares(axes: Axes, counts: Numbers, *, write_numbers: bool, size: float, ink: str = "black") -> AxesImage:
    """Draw the shares of each client's examples; with few columns, also write how many examples there are."""
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    darkest = max(float(shares.max()), min(1.0, 3 / counts.shape[1]))  # so that equal shares look light
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=darkest, aspect="auto", interpolation="nearest")
    if write_numbers and counts.shape[1] <= 12:
        for row, column in zip(*np.nonzero(counts), strict=True):
            colour = "white" if shares[row, column] > 0.6 * darkest else ink
            axes.text(column, row, f"{counts[row, column]:,}", ha="center", va="center", size=size, color=colour)
    return image


def _bars(figure: Figure, axes: Axes, federation: Federation) -> None:
    """Draw the examples of every client, one split after another."""
    start, rows = np.zeros(federation.clients), np.arange(federation.clients)
    for split, colour in zip(SPLITS, COLOURS, strict=True):
        sizes = federation.sizes(split)
        if not sizes.any():
            continue
        axes.barh(rows, sizes, left=start, height=0.8 if len(rows) <= 50 else 1, color=colour, label=split)
        start += sizes
    axes.tick_params(axis="y", labelleft=False)
    axes.set_xlabel("examples")
    figure.legend(loc="outside lower right", ncols=3, frameon=False)


def _histogram(axes: Axes, sizes: Numbers) -> None:
    """Draw the number of clients by their number of examples."""
    low, high = int(sizes.min()), int(sizes.max())
    wide = high > 50 * low
    edges = _doubling(low, high) if wide else np.linspace(low, high + 1, min(30, high - low + 1) + 1).round()
    axes.hist(sizes, bins=list(edges - 0.5), color=COLOURS[0])  # bars are centred on whole numbers
    median = float(np.median(sizes))
    axes.axvline(median, color=COLOURS[1], label=f"median {median:,.0f}")
    if wide:
        axes.set_xscale("log")
    elif low == high:
        axes.set_xlim(low - 2, high + 2)
    axes.set_xlabel("examples of a client")
    axes.set_ylabel("clients")
    axes.legend(frameon=False)


def _doubling(low: int, high: int) -> NDArray[np.float64]:
    """Return the edges among 1, 2, 3, 4, 6, 8, 12 … that enclose `low` to `high`."""
    edges = np.unique([factor * 2**power // 2 for power in range(high.bit_length() + 1) for factor in (2, 3)])
    return edges[np.searchsorted(edges, low, "right") - 1 : np.searchsorted(edges, high, "right") + 1].astype(float)


def _step(count: int, most: int) -> int:
    """Return the smallest step of 1, 2, 5, 10, 20 … that leaves at most `most` of `count`."""
    steps: list[int] = [digit * 10**power for power in range(9) for digit in (1, 2, 5)]
    return next(step for step in steps if count <= most * step)


def shorten(text: str, length: int) -> str:
    """Leave out the middle of a long name: names of clients often differ only at the end. A $ starts no formula."""
    cut = text if len(text) <= length else f"{text[: length // 2]}…{text[-(length // 2 - 1) :]}"
    return cut.replace("$", r"\$")


def shorten_all(names: Sequence[str], length: int) -> list[str]:
    """Shorten the names of one figure so that they stay different: where the middle tells them apart, keep that part.

    >>> shorten_all(["Hospital 11 of the North", "Hospital 12 of the North", "Clinic"], 12)
    ['Hospi…11…', 'Hospi…12…', 'Clinic']
    """
    short = [shorten(name, length) for name in names]
    alike: dict[str, list[str]] = {}
    for name, cut in zip(names, short, strict=True):
        alike.setdefault(cut, []).append(name)
    shown = [
        cut if len(alike[cut]) == 1 else _around_difference(name, alike[cut], length)
        for name, cut in zip(names, short, strict=True)
    ]
    if len({*shown}) == len({*names}):
        return shown
    return [f"{at + 1}: {cut}" for at, cut in enumerate(short)]


def _around_difference(name: str, alike: Sequence[str], length: int) -> str:
    """The start of a name, and the part in which it differs from others, with the whole of a number."""
    start, after = _common(alike), _common([other[::-1] for other in alike])
    end = len(name) - after
    while start and name[start - 1].isdigit():
        start -= 1
    while end < len(name) and name[end - 1 : end + 1].isdigit():
        end += 1
    part = name[start : max(end, start + 1)][: length - 2]
    head = name[: min(start, max(0, length - len(part) - 2), length // 2 - 1)].rstrip()
    return f"{head}…{part}…".replace("$", r"\$")


def _common(names: Sequence[str]) -> int:
    """How many letters all names begin with."""
    return len([*takewhile(lambda letters: len({*letters}) == 1, zip(*names, strict=False))])


def text_width(text: str) -> int:
    """How many usual letters wide a text is: Chinese, Japanese and Korean letters, and …, are twice as wide.

    >>> text_width("ab"), text_width("健康"), text_width("a…")
    (2, 4, 3)
    """
    return sum(2 if letter == "…" or east_asian_width(letter) in "WF" else 1 for letter in text)
