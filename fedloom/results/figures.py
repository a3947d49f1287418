"""The figures of a run, as PNG, SVG and PDF. An algorithm has the same colour in all of them."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedloom.data.figure import draw_shares, shorten, shorten_all, text_width
from fedloom.data.split import SPLITS
from fedloom.errors import InputError
from fedloom.results import audit_findings, headline, learning_curves, round_figure
from fedloom.results import figure_style as style
from fedloom.results.client_tables import average
from fedloom.results.comparisons import finished, main_comparison
from fedloom.results.figure_style import BEFORE_TRAINING, INK, MOST_PANELS, CaptionedFigure
from fedloom.results.glance_figure import at_a_glance
from fedloom.results.run_data import RunData
from fedloom.results.run_values import Curve, Floats, Ints, Stats
from fedloom.results.sentences import say

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_ROWS = 60  # clients in a heat map
UNITS = (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))
FEW_CLIENTS = 6  # up to these, the name of a client has two lines of this many letters
LINE = 20
PANEL_LETTERS = 24  # that fit side by side under a panel
LABEL = 36  # the most letters of an axis that is named after a metric
FILLS = ("min-max", "std")


def draw_all(
    run: RunData, fill: str = "min-max", *, progress: Callable[[str], object] = lambda text: None
) -> list[CaptionedFigure]:
    """Every figure that the run has numbers for.

    `fill` says what is shaded around means over clients: "min-max" (lowest to highest) or "std" (one
    standard deviation).
    """
    if fill not in FILLS:
        raise InputError(f"'fill' must be {' or '.join(FILLS)}. Got {fill!r} instead.")
    metric = run.main_metric
    makers: dict[str, Callable[[], CaptionedFigure | None]] = {
        "the result": partial(at_a_glance, run),
        "learning curves": partial(comparison, run, metric),
        "the global model": partial(global_model, run, metric),
        "rounds": partial(before_and_after, run, metric, "rounds", fill),
        "means of clients": partial(before_and_after, run, metric, "clients", fill),
        "the pooled model": partial(pooled_curve, run),
        "bytes": partial(against_bytes, run, metric),
        "time": partial(against_time, run, metric),
        "a round": partial(round_figure.draw, run),
        "clients": partial(heat_map, run, metric),
        "labels": partial(label_distribution, run),
        "reconstruction": partial(audit_findings.reconstruction, run.audit),
        "poisoning": partial(audit_findings.poisoning, run.audit),
    }
    found = []
    for number, (name, make) in enumerate(makers.items(), 1):
        progress(f"Drawing figure {number} of {len(makers)}: {name}")
        with style.styled():
            drawn = make()
            found += [style.lay_out(drawn)] if drawn is not None else []
    return found


def draw_comparison(run: RunData) -> list[CaptionedFigure]:
    """The figures that compare algorithms: those that also compare the algorithms of several runs."""
    main = main_comparison(run)
    metric = run.main_metric if main is None else main.metric.name
    with style.styled():
        drawn = [
            at_a_glance(run),
            *(make(run, metric) for make in (comparison, global_model, against_bytes, against_time)),
        ]
        return [style.lay_out(figure) for figure in drawn if figure is not None]


def write(drawn: Sequence[CaptionedFigure], folder: Path) -> list[Path]:
    """Write figures as PNG, SVG and PDF files, and return the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    return [path for each in drawn for path in each.save(folder)]


def comparison(run: RunData, metric: str) -> CaptionedFigure | None:
    """The metric against rounds, with the interval over seeds if there are several."""
    try:
        figure = learning_curves.draw_run(run, style.line_styles(run.labels), metric, "test")
    except InputError:  # nothing was measured
        return None
    shown = say("caption", "over_seeds" if len(run.seeds) > 1 else "one_seed")
    caption = f"{shown} " + say("caption", "cut") + _drawn_in_words(run)
    return CaptionedFigure("comparison", f"{run.metric(metric).capital_title} against rounds", caption, figure)


def global_model(run: RunData, metric: str) -> CaptionedFigure | None:
    """The server's model on training, validation and test data, against rounds."""
    curves: dict[str, dict[str, Curve]] = {}
    for split in SPLITS:
        for label in run.labels:
            curves_of_seeds = (run.server_values(label, seed, metric, split) for seed in run.seeds)
            found = [curve for curve in curves_of_seeds if len(curve[0])]
            if found:
                mean = _mean_of_shortest([values for _, values in found])
                curves.setdefault(split, {})[label] = (found[0][0][: len(mean)], mean)
    if not curves:
        return None
    width, height = style.legend_size(list({label: None for lines in curves.values() for label in lines}))
    figure = style.new_figure(0.8 + 2.5 * len(curves) + width, max(2.5, height))
    panels = figure.subplots(1, len(curves), sharey=True, squeeze=False)[0]
    for axes, (name, lines) in zip(panels, curves.items(), strict=True):
        for label, line in lines.items():
            style.plot_line(axes, *line, **style.line_styles(run.labels)[label], label=label)
        style.finish_axes(axes, name.capitalize(), run.metric(metric).percent)
        axes.set_xlabel("Round")
    panels[0].set_ylabel(shorten(run.metric(metric).capital_title, LABEL))
    style.add_legend(figure)
    caption = say("caption", "global_model") + _seeds_in_words(run)
    title = f"The global model: {run.metric(metric).title} against rounds"
    return CaptionedFigure("global_model", title, caption, figure)


def before_and_after(run: RunData, metric: str, against: str, fill: str) -> CaptionedFigure | None:
    """Before and after local training: the mean over clients against rounds, or the mean over rounds against clients.

    The source document calls these sausage graphs, and so do the names of the files.
    """
    panels: dict[str, dict[str, Stats]] = {}
    for label in run.labels:
        for phase in ("pre_fit", "post_fit"):
            seeds = run.seeds if against == "rounds" else run.seeds_of_clients
            found = list(run.client_values_by_seed(label, phase, metric, seeds).values())
            if against == "clients" and phase == "pre_fit":
                found = [one.keep(one.rounds > 1) for one in found]
            stats = average([one.by_round() if against == "rounds" else one.by_client() for one in found if len(one)])
            if stats is not None:
                panels.setdefault(label, {})[phase] = stats
    if not panels or (against == "clients" and len(run.clients) < 2):
        return None
    figure, grid = style.panel_grid(list(panels), 1.75)
    titles = style.panel_titles(list(panels))
    info, over = run.metric(metric), "clients" if against == "rounds" else "rounds"
    shade = f"lowest to highest over {over}" if fill == "min-max" else f"± one standard deviation over {over}"
    for axes, (label, phases) in zip(grid, panels.items(), strict=False):
        for phase, stats in phases.items():
            look = BEFORE_TRAINING if phase == "pre_fit" else {"color": _colours(run)[label]}
            around = (stats.mean - stats.std, stats.mean + stats.std) if fill == "std" else (stats.low, stats.high)
            around = style.clip_share(around, info.percent)
            if against == "rounds":
                axes.fill_between(stats.index, *around, color=look["color"], alpha=0.16, linewidth=0)
                style.plot_line(axes, stats.index, stats.mean, **look)
            else:
                _draw_clients(axes, stats, around, look["color"], -0.18 if phase == "pre_fit" else 0.18)
        style.finish_axes(axes, titles[label], info.percent, most_ticks=5 if against == "rounds" else 0)
        if against == "clients":
            _name_clients_across(axes, run, next(iter(phases.values())).index)
    if against == "clients" and any(text.get_rotation() for axes in grid for text in axes.get_xticklabels()):
        _make_room_for_slanted_names(figure, grid)
    grid[0].set_ylabel(shorten(f"Test {run.metric(metric).title}", LABEL))
    _before_and_after_legend(figure, shade, against)
    figure.supxlabel("Round" if against == "rounds" else "Client", size=8.5, color=INK)
    marks = "Lines" if against == "rounds" else "Dots"
    averaged = len(run.seeds) > 1 and (against == "rounds" or run.same_clients)
    caption = f"{marks}: mean over {over}. Shaded: {shade}" + (", averaged over seeds." if averaged else ".")
    if against == "rounds":
        caption += _drawn_in_words(run)
    else:
        caption = run.about_clients(caption)
        caption += " Measurements before the first round, of the untrained model, are left out."
        if len(run.clients) > MOST_ROWS:
            caption += f" {MOST_ROWS} of {len(run.clients):,} clients."
    if len(panels) > MOST_PANELS:
        caption += f" The first {MOST_PANELS} algorithms."
    title = f"{run.metric(metric).capital_title} against {against}, before and after local training"
    name = "sausage_rounds" if against == "rounds" else "sausage_users"
    return CaptionedFigure(name, title, caption, figure)


def _draw_clients(axes: Axes, stats: Stats, around: Any, colour: str, beside: float) -> None:
    """Draw a bar and a dot for each client: clients have no order, so nothing connects them."""
    shown = np.searchsorted(stats.index, _evenly(stats.index))
    places, width = np.arange(len(shown)) + beside, float(np.clip(40 / len(shown), 0.8, 4))
    low, high = (np.asarray(side)[shown] for side in around)
    axes.vlines(places, low, high, color=colour, alpha=0.3, linewidth=width)
    axes.plot(places, stats.mean[shown], "o", color=colour, markersize=float(np.clip(30 / len(shown), 1.2, 3)))


def _make_room_for_slanted_names(figure: Figure, grid: Sequence[Axes]) -> None:
    """Slanted names need height below each row of panels that shows them, and reach to the left of each panel."""
    named = {axes.get_subplotspec().rowspan.start for axes in grid if axes.xaxis.get_tick_params()["labelbottom"]}  # type: ignore[union-attr]
    lines = max(axes.get_title("left").count("\n") for axes in grid)
    rows, columns = grid[0].get_gridspec().nrows, grid[0].get_gridspec().ncols  # type: ignore[union-attr]
    width, height = figure.get_size_inches()
    figure.set_size_inches(width + 0.55 * columns, height + 0.9 * len(named) + 0.15 * lines * rows)


def _name_clients_across(axes: Axes, run: RunData, clients: Any) -> None:
    names = [run.client_name(int(client)) for client in _evenly(clients)]
    if len(names) <= FEW_CLIENTS and max(map(text_width, names)) > PANEL_LETTERS // len(names):
        axes.set_xticks(range(len(names)), shorten_all(names, 18), rotation=40, ha="right", rotation_mode="anchor")
    else:
        names = shorten_all(names, 8)
        step = next(step for step in range(1, len(names) + 1) if _fit(names[::step], PANEL_LETTERS * step / len(names)))
        axes.set_xticks(range(0, len(names), step), names[::step])
    axes.set_xlim(-0.6, len(names) - 0.4)


def _fit(names: Sequence[str], apart: float) -> bool:
    """Whether names fit side by side if their centres are this many letters apart."""
    return all(text_width(one + other) / 2 + 0.5 <= apart for one, other in pairwise(names))


def _before_and_after_legend(figure: Figure, shade: str, against: str) -> None:
    """Explain lines or dots, and what is shaded, before and after local training."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    grey = BEFORE_TRAINING["color"]
    dots = {"linestyle": "none", "marker": "o", "markersize": 3}
    looks: dict[str, dict[str, Any]] = {
        "before local training (pre_fit)": BEFORE_TRAINING if against == "rounds" else {"color": grey, **dots},
        "after local training (post_fit), in the algorithm's colour": {
            "color": INK,
            **({} if against == "rounds" else dots),
        },
    }
    handles: list[Any] = [Line2D([], [], linewidth=1.4, label=label, **look) for label, look in looks.items()]
    shaded: dict[str, Any] = {"before": grey, "after": INK}
    handles += [Patch(color=c, alpha=0.25, linewidth=0, label=f"{when}: {shade}") for when, c in shaded.items()]
    width, height = figure.get_size_inches()
    columns = 2 if width >= 6.5 else 1
    figure.set_size_inches(max(width, 4.2), height + 0.4 / columns)
    figure.legend(handles=handles, loc="outside upper left", ncols=columns, frameon=False)


def _colours(run: RunData) -> dict[str, str]:
    return {label: look["color"] for label, look in style.line_styles(run.labels).items()}


def pooled_curve(run: RunData) -> CaptionedFigure | None:
    """The learning curve of the model that saw everybody's data, against epochs."""
    label = next((label for label in run.labels if run.is_pooled(label)), "")
    found = [history for seed in run.seeds if (history := run.history(label, seed))]
    if not found:
        return None
    names = {
        metric: [name for name in (metric, f"validation_{metric}") if all(name in history for history in found)]
        for metric in ("loss", *(metric for metric in run.metrics if metric != "loss"))
    }
    names = {metric: shown for metric, shown in names.items() if shown}
    figure = style.new_figure(0.5 + 3.0 * len(names), 2.3)
    panels = figure.subplots(1, len(names), squeeze=False)[0]
    for axes, (metric, shown) in zip(panels, names.items(), strict=True):
        for name in shown:
            values = _mean_of_shortest([history[name] for history in found])
            held_out = name.startswith("validation")
            look = {"color": _colours(run)[label]} if held_out else BEFORE_TRAINING
            word = "validation" if held_out else "training"
            axes.plot(np.arange(1, len(values) + 1), values, **look, linewidth=1.4, label=word)
        style.finish_axes(axes, run.metric(metric).capital_title, run.metric(metric).percent)
        axes.set_xlabel("Epoch")
        axes.legend(frameon=False)
    over = f" Mean of {len(found)} seeds." if len(found) > 1 else ""
    caption = f"{label} is trained on everybody's data. The training loss is the running mean of an epoch.{over}"
    return CaptionedFigure("pooled_curve", "Learning curve of the pooled model", caption, figure)


def against_bytes(run: RunData, metric: str) -> CaptionedFigure | None:
    """The metric against all bytes that clients have sent and received so far."""

    def megabytes(label: str, seed: int, rounds: Ints) -> Floats:
        costs = run.costs(label, seed)
        return costs.bytes_so_far[np.searchsorted(costs.rounds, rounds)] / 1e6

    figure = _against(run, metric, megabytes, "Megabytes sent and received by all clients", "sends no weights")
    if figure is None:
        return None
    caption = f"The curve is {headline.curve_in_words(run)}; bytes are those of weights and numbers as they are sent."
    return CaptionedFigure(
        "bytes", f"{run.metric(metric).capital_title} against bytes", caption + _seeds_in_words(run), figure
    )


def against_time(run: RunData, metric: str) -> CaptionedFigure | None:
    """The metric against virtual time."""
    ends = [run.times(*cell).ended for cell in run.cells]
    longest = max((float(each[-1]) for each in ends if len(each)), default=0.0)
    unit, size = next((one for one in UNITS if longest >= 2 * one[1]), UNITS[-1])

    def passed(label: str, seed: int, rounds: Ints) -> Floats:
        times = run.times(label, seed)
        return times.at(rounds) / size if len(times.rounds) else np.zeros(len(rounds))

    figure = _against(run, metric, passed, f"Virtual {unit}", "has no clock") if longest else None
    if figure is None:
        return None
    caption = f"The curve is {headline.curve_in_words(run)}; time is that of the simulated fleet."
    return CaptionedFigure(
        "time", f"{run.metric(metric).capital_title} against time", caption + _seeds_in_words(run), figure
    )


def _against(
    run: RunData, metric: str, cost: Callable[[str, int, Ints], Floats], axis: str, without: str
) -> Figure | None:
    """Curves of the metric against what rounds have cost until then; a dotted line where they cost nothing."""
    lines: dict[str, tuple[Floats, Floats]] = {}
    silent: dict[str, float] = {}
    for label in run.labels:
        curves, costs = [], []
        for seed, (rounds, values) in headline.curves(run, label, metric).items():
            curves.append(values)
            costs.append(cost(label, seed, rounds))
        if curves:
            mean, total = _mean_of_shortest(curves), _mean_of_shortest(costs)
            if not total[-1]:
                silent[label] = float(mean[-1])
            else:
                lines[label] = (total, mean)
    if not lines:
        return None
    ends_at = {f"{label} ({without}), end": label for label in silent}
    width, height = style.legend_size([*lines, *ends_at])
    figure = style.new_figure(4.2 + width, max(2.9, height))
    axes = figure.add_subplot()
    styles = style.line_styles(run.labels)
    for label, line in lines.items():
        style.plot_line(axes, *line, **styles[label], label=label)
    for text, label in ends_at.items():
        dotted = {**styles[label], "linewidth": 0.9, "linestyle": (0, (1, 2))}
        axes.axhline(silent[label], **dotted, label=text)
    ends = [total[-1] for total, _ in lines.values()]
    if max(ends) > 4 * min(ends):
        axes.set_xscale("log", subs=(2, 5))
        for formatter in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
            formatter(lambda value, _: f"{value:g}")
    style.finish_axes(axes, "", run.metric(metric).percent, most_ticks=0)
    axes.set_xlabel(axis)
    axes.set_ylabel(shorten(f"Test {run.metric(metric).title}", LABEL))
    style.add_legend(figure)
    return figure


def heat_map(run: RunData, metric: str) -> CaptionedFigure | None:
    """Each client in each round, after local training: shows clients that are left behind."""
    grids = {label: grid for label in run.labels[:MOST_PANELS] if (grid := _mean_grid(run, label, metric))}
    if not grids or len(run.clients) < 2:
        return None
    info = run.metric(metric)
    known = np.concatenate([values[np.isfinite(values)] for *_, values in grids.values()])
    low, high = np.quantile(known, [0.02, 0.98])
    high = 1.0 if info.percent else float(high)
    below, above = (
        bool(known.min() < low),
        bool(known.max() > high),
    )  # an arrow of the bar says that there are such values
    beyond = {(True, True): "both", (True, False): "min", (False, True): "max", (False, False): "neither"}[below, above]
    figure, panels = style.panel_grid(list(grids), 1.75)
    titles = style.panel_titles(list(grids))
    measured = np.unique(np.concatenate([rounds for _, rounds, _ in grids.values()]))
    gaps = len(measured) <= measured[-1] - measured[0]
    extent: tuple[float, ...]
    for axes, (label, (clients, rounds, values)) in zip(panels, grids.items(), strict=False):
        extent = (measured[0] - 0.5, measured[-1] + 0.5, len(clients) - 0.5, -0.5)
        columns = _at_rounds(measured, rounds, values)
        image = style.draw_grid(axes, columns, low, high, info.higher_is_better, extent=extent)
        axes.set_title(titles[label], loc="left")
        style.whole_numbers(axes)
        if gaps:
            axes.set_xticks(np.unique(_nearest(measured, np.linspace(measured[0], measured[-1], 5))))
        names = _client_names(run, clients, most=10, length=10)
        _name_clients(axes, clients, names)
    _widen(figure, names, 11)
    # the bar's length follows from its width: beside a single panel, it would be too short for its numbers
    settings = {"pad": 0.01, "fraction": 0.025, "extend": beyond, "aspect": 37 if len(grids) == 1 else 20}
    bar = style.add_colour_bar(figure, image, panels, shorten(f"Test {info.title}", LABEL), **settings)
    style.show_percent(bar, info.percent)
    figure.supxlabel("Round", size=8.5, color=INK)
    panels[0].set_ylabel("Client")
    caption = "After local training, on each client's own test split; an empty cell was not measured."
    if gaps:
        caption += " A column reaches half-way to the rounds that were measured before and after it."
    if run.same_clients and len(run.seeds) > 1 and run.leaves_out_clients("post_fit"):
        caption += f" A cell is the mean over those of the {len(run.seeds)} seeds that drew the client in that round."
    elif run.same_clients:
        caption += _seeds_in_words(run)
    caption = run.about_clients(caption)
    if len(run.clients) > MOST_ROWS:
        caption += f" {MOST_ROWS} of {len(run.clients):,} clients."
    return CaptionedFigure("clients", "Every client in every round", caption, figure)


def _mean_grid(run: RunData, label: str, metric: str) -> tuple[Any, Any, Any] | None:
    """Clients, rounds, and the mean over seeds for each pair of them (NaN if it was not measured)."""
    found = list(run.client_values_by_seed(label, "post_fit", metric, run.seeds_of_clients).values())
    if not found:
        return None
    clients, rounds, values = (
        np.concatenate([getattr(one, part) for one in found]) for part in ("clients", "rounds", "values")
    )
    shown, columns = _evenly(np.unique(clients)), np.unique(rounds)
    kept = np.isin(clients, shown)
    at = np.searchsorted(shown, clients[kept]), np.searchsorted(columns, rounds[kept])
    total, count = np.zeros((len(shown), len(columns))), np.zeros((len(shown), len(columns)))
    np.add.at(total, at, values[kept])
    np.add.at(count, at, 1)
    return shown, columns, np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0)


def _at_rounds(measured: Ints, rounds: Ints, values: Any) -> Any:
    """The columns of some of the measured rounds, at their places among all rounds, in steps of half a round."""
    placed = np.full((len(values), len(measured)), np.nan)
    placed[:, np.searchsorted(measured, rounds)] = values
    if len(measured) > measured[-1] - measured[0]:
        return placed
    steps = np.arange(measured[0] - 0.25, measured[-1] + 0.5, 0.5)
    return placed[:, np.searchsorted(measured, _nearest(measured, steps))]


def _nearest(measured: Ints, places: Floats) -> Ints:
    """The measured round that is nearest to each place."""
    return measured[np.searchsorted((measured[1:] + measured[:-1]) / 2, places)]


def label_distribution(run: RunData) -> CaptionedFigure | None:
    """How many examples of each label each client has."""
    known = run.facts.get("labels")
    if not known or not known["counts"]:
        return None
    clients, classes = _evenly(np.arange(len(known["counts"]))), known["classes"]
    counts = np.array(known["counts"])[clients]
    figure = style.new_figure(min(7.2, 1.9 + 0.42 * len(classes)), float(np.clip(1.0 + 0.2 * len(clients), 2.2, 7.0)))
    axes = figure.add_subplot()
    axes.spines[:].set_visible(False)
    image = draw_shares(axes, counts, write_numbers=len(clients) <= 25, size=6.5, ink=INK)
    step = max(1, math.ceil(len(classes) / 20))
    names = shorten_all([str(name) for name in classes[::step]], 12)
    room = 7 * step * min(1, 12.6 / len(classes))  # in letters: columns are narrower if there are many
    slanted: dict[str, Any] = {"rotation": 40, "ha": "right"} if max(map(text_width, names)) > room else {}
    axes.set_xticks(range(0, len(classes), step), names, **slanted)
    named = _client_names(run, clients, most=25, length=14)
    _name_clients(axes, clients, named)
    _widen(figure, named, 15)
    axes.set_xlabel("Label")
    axes.set_ylabel("Client")
    style.add_colour_bar(figure, image, axes, "Share of examples", pad=0.02, format=_in_percent)
    caption = "Examples of each label at each client, all splits."
    if not run.same_clients:
        caption += " Every seed draws its own; these are those of the first seed."
    return CaptionedFigure("labels", "Labels of each client", caption, figure)


def _in_percent(value: float, _: int) -> str:
    return f"{100 * value:.0f} %"


def _evenly(clients: Any) -> Any:
    """As many clients as a heat map has rows for, evenly chosen."""
    return clients[np.linspace(0, len(clients) - 1, min(len(clients), MOST_ROWS)).astype(int)]


def _client_names(run: RunData, clients: Any, most: int, length: int) -> list[str]:
    """Names for the rows of a heat map, as many as fit: in two lines if there is room, else without their middle."""
    shown = clients[:: max(1, math.ceil(len(clients) / most))]
    names = [run.client_name(int(client)) for client in shown]
    if len(shown) > FEW_CLIENTS:
        return shorten_all(names, length)
    short = shorten_all(names, 2 * LINE)
    lines = ["\n".join(textwrap.wrap(name, LINE, max_lines=2, placeholder="…")) or name for name in short]
    return lines if len({*lines}) == len(names) else shorten_all(names, LINE)


def _name_clients(axes: Axes, clients: Any, names: Sequence[str]) -> None:
    axes.set_yticks(range(0, len(clients), max(1, math.ceil(len(clients) / len(names)))), names)


def _widen(figure: Figure, names: Sequence[str], usual: int) -> None:
    """Make room for names that are longer than usual."""
    longest = max(text_width(line) for name in names for line in name.split("\n"))
    width, height = figure.get_size_inches()
    figure.set_size_inches(width + 0.065 * max(0, longest - usual), height)


def _mean_of_shortest(curves: Sequence[Any]) -> Any:
    """The mean of several curves, as far as all of them reach."""
    length = min(map(len, curves))
    return np.mean([curve[:length] for curve in curves], axis=0)


def _drawn_in_words(run: RunData) -> str:
    return " " + say("caption", "drawn") if run.leaves_out_clients("post_fit") else ""


def _seeds_in_words(run: RunData) -> str:
    if len(run.seeds) < 2:
        return ""
    counts = Counter(cell.algorithm for cell in finished(run.result.runs)).values()
    return " Mean over the seeds of each." if len({*counts}) > 1 else f" Mean of {len(run.seeds)} seeds."
