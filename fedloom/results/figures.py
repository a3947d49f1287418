"""The figures of a run, as PNG and as SVG with real text. An algorithm has the same colour in all of them."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedloom.errors import FedloomError
from fedloom.results import headline, learning_curves
from fedloom.results.client_tables import average
from fedloom.results.comparisons import measures, primary
from fedloom.results.figure_style import (
    MOST_PANELS,
    STYLE,
    CaptionedFigure,
    clip,
    finish_axes,
    lay_out,
    new_figure,
    panel_grid,
    share_legend,
    short,
    show_percent,
)
from fedloom.results.learning_curves import FAINT, INK, line_style
from fedloom.results.run_data import RunData, Stats
from fedloom.results.statistics import spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_ROWS = 60  # clients in a heat map


def draw_all(view: RunData, fill: str = "min-max", metric: str | None = None) -> list[CaptionedFigure]:
    """Every figure that the run has numbers for; `fill` is min-max or std, what is shaded around means over users."""
    import matplotlib

    chosen = metric or view.main_metric
    makers: tuple[Callable[[], CaptionedFigure | None], ...] = (
        lambda: at_a_glance(view),
        lambda: comparison(view, chosen),
        lambda: global_model(view, chosen),
        lambda: sausage(view, chosen, "rounds", fill),
        lambda: sausage(view, chosen, "users", fill),
        lambda: pooled_curve(view),
        lambda: against_bytes(view, chosen),
        lambda: heat_map(view, chosen),
        lambda: label_distribution(view),
    )
    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]
        return [lay_out(drawn) for make in makers if (drawn := make()) is not None]


def write(
    view: RunData, folder: Path, fill: str = "min-max", drawn: Sequence[CaptionedFigure] | None = None
) -> list[Path]:
    """All figures as files."""
    folder.mkdir(parents=True, exist_ok=True)
    found = draw_all(view, fill) if drawn is None else drawn
    return [path for each in found for path in each.save(folder)]


def looks(view: RunData) -> dict[str, dict[str, Any]]:
    """The colour and line style of each algorithm."""
    return {label: line_style(number) for number, label in enumerate(view.labels)}


def at_a_glance(view: RunData) -> CaptionedFigure | None:
    """The result at a glance: every seed, their mean and its interval."""
    first = primary(view)
    if first is None:
        return None
    shown = [first, *(m for m in measures(view, first.metric) if m.key == "universal" and m.key != first.key)]
    labels = [label for label in view.labels if any(label in measure.values for measure in shown)]
    figure = new_figure(0.7 + 0.09 * max(map(len, labels)) + 2.9 * len(shown), 0.95 + 0.24 * len(labels))
    colours = looks(view)
    axes = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    for here, measure in zip(axes, shown, strict=True):
        for place, label in enumerate(labels):
            values = list(measure.values.get(label, {}).values())
            if not values:
                here.text(0.5, place, "no global model", color=FAINT, size=7, ha="center", va="center",
                          transform=here.get_yaxis_transform())  # fmt: skip
                continue
            colour, over = colours[label]["color"], spread(values)
            if over.count > 1:
                ends = clip([over.low, over.high], measure.percent)
                here.plot(ends, [place, place], color=colour, linewidth=5, alpha=0.25, solid_capstyle="butt")
            here.scatter(values, [place] * len(values), s=9, color=colour, alpha=0.75, zorder=3, linewidths=0)
            here.plot([over.mean], [place], marker="|", markersize=11, markeredgewidth=1.8, color=colour, zorder=4)
        here.set_title("\n".join(textwrap.wrap(measure.title, 42)), loc="left")
        here.set_ylim(len(labels) - 0.5, -0.5)
        here.grid(axis="x", color="#e4e4e4", linewidth=0.6)
        here.set_axisbelow(True)
        here.tick_params(axis="y", length=0)
        show_percent(here.xaxis, measure.percent)
    axes[0].set_yticks(range(len(labels)), labels)
    seeds = "Dots: seeds. Bars: 95 % t interval over seeds. " if len(view.seeds) > 1 else "One seed. "
    better = "higher" if first.higher_is_better else "lower"
    caption = f"{seeds}Strokes: mean. Axes do not begin at zero; {better} is better."
    return CaptionedFigure("headline", "At a glance", caption, figure)


def comparison(view: RunData, metric: str) -> CaptionedFigure | None:
    """The metric against rounds, with the confidence band over seeds when there are several."""
    clients, server = [], []
    for label, seed in view.cells:
        known = {"algorithm": label, "seed": seed, "split": "test", "metric": metric}
        for phase in ("pre_fit", "post_fit"):
            stats = view.client_values(label, seed, phase, metric).by_round()
            # two clients with the mean and deviation of all: a million of them need not be listed
            for side in (-1, 1):
                values = zip(stats.index.tolist(), (stats.mean + side * stats.std).tolist(), strict=True)
                clients += [{**known, "phase": phase, "round": round, "value": value} for round, value in values]
        rounds, found = view.server_values(label, seed, metric)
        pairs = zip(rounds.tolist(), found.tolist(), strict=True)
        server += [{**known, "round": round, "value": value} for round, value in pairs]
    order = [
        {"algorithm": label, "seed": 0, "phase": "", "value": None, "metric": "", "split": ""} for label in view.labels
    ]
    try:
        figure = learning_curves.draw([*order, *clients], server, metric)
    except FedloomError:
        return None
    caption = (
        "Mean over clients, then over seeds; bands are 95 % t intervals over seeds."
        if len(view.seeds) > 1
        else "Mean over clients; bands are ± one standard deviation over clients. One seed."
    )
    return CaptionedFigure("comparison", f"{metric.capitalize()} against rounds", caption, figure)


def global_model(view: RunData, metric: str) -> CaptionedFigure | None:
    """The server's model on training, validation and test data, against rounds."""
    curves: dict[str, dict[str, tuple[Any, Any]]] = {}
    for split in ("train", "validation", "test"):
        for label in view.labels:
            runs = [view.server_values(label, seed, metric, split) for seed in view.seeds]
            runs = [run for run in runs if len(run[0])]
            if runs:
                length = min(len(rounds) for rounds, _ in runs)
                mean = np.mean([values[:length] for _, values in runs], axis=0)
                curves.setdefault(split, {})[label] = (runs[0][0][:length], mean)
    if not curves:
        return None
    figure = new_figure(1.9 + 2.5 * len(curves), 2.5)
    axes = figure.subplots(1, len(curves), sharey=True, squeeze=False)[0]
    colours = looks(view)
    for here, (split, lines) in zip(axes, curves.items(), strict=True):
        for label, (rounds, mean) in lines.items():
            marker = "o" if len(rounds) <= 10 else ""
            here.plot(rounds, mean, **colours[label], linewidth=1.4, marker=marker, markersize=2.6, label=label)
        finish_axes(here, split.capitalize(), view.metric(metric).percent)
        here.set_xlabel("Round")
    axes[0].set_ylabel(metric.capitalize())
    named = {label: line for here in axes for line, label in zip(*here.get_legend_handles_labels(), strict=True)}
    figure.legend(named.values(), named.keys(), loc="outside right center", frameon=False)
    caption = "The global model after each round, on data of the server's or on the union of the clients' splits."
    return CaptionedFigure("global_model", f"The global model: {metric} against rounds", caption + _means(view), figure)


def sausage(view: RunData, metric: str, against: str, fill: str) -> CaptionedFigure | None:
    """Before and after local training: mean over users against rounds, or over rounds against users, with a fill."""
    panels: dict[str, dict[str, Stats]] = {}
    for label in view.labels:
        found = {}
        for phase in ("pre_fit", "post_fit"):
            series = [view.client_values(label, seed, phase, metric) for seed in view.seeds]
            if against == "users" and phase == "pre_fit":
                series = [one.after(1) for one in series]
            stats = average([s.by_round() if against == "rounds" else s.by_client() for s in series if len(s)])
            if stats is not None:
                found[phase] = stats
        if found:
            panels[label] = found
    if not panels or (against == "users" and len(view.clients) < 2):
        return None
    figure, axes = panel_grid(list(panels), 1.75)
    colours, percent = looks(view), view.metric(metric).percent
    for here, (label, found) in zip(axes, panels.items(), strict=False):
        styles = {
            "pre_fit": {"color": "#6b6b6b", "linestyle": (0, (4, 1.5))},
            "post_fit": {"color": colours[label]["color"], "linestyle": "solid"},
        }
        for phase, stats in found.items():
            low, high = (
                (stats.low, stats.high) if fill == "min-max" else (stats.mean - stats.std, stats.mean + stats.std)
            )
            at = np.arange(len(stats.index)) if against == "users" else stats.index
            low, high = clip(low, percent), clip(high, percent)
            here.fill_between(at, low, high, color=styles[phase]["color"], alpha=0.16, linewidth=0)
            marker = "o" if len(at) <= 12 else ""
            here.plot(at, stats.mean, **styles[phase], linewidth=1.4, marker=marker, markersize=2.4)
        if against == "users":
            _user_ticks(here, view, next(iter(found.values())).index)
        finish_axes(here, label, percent, whole=against == "rounds")
    axes[0].set_ylabel(f"Test {metric}")
    share_legend(figure)
    over = "users" if against == "rounds" else "rounds"
    shade = f"lowest to highest over {over}" if fill == "min-max" else f"± one standard deviation over {over}"
    caption = f"Lines: mean over {over}. Fill: {shade}" + (", averaged over seeds." if len(view.seeds) > 1 else ".")
    if against == "users":
        caption += " Without what was measured before the first round, when the model is untrained."
    if len(panels) > MOST_PANELS:
        caption += f" The first {MOST_PANELS} algorithms."
    figure.supxlabel("Round" if against == "rounds" else "User", size=8.5, color=INK)
    title = f"{metric.capitalize()} against {against}, before and after local training"
    return CaptionedFigure(f"sausage_{against}", title, caption, figure)


def pooled_curve(view: RunData) -> CaptionedFigure | None:
    """The learning curve of the model that saw everybody's data, against epochs."""
    label = next((label for label in view.labels if view.is_pooled(label)), None)
    if label is None:
        return None
    runs = [view.history(label, seed) for seed in view.seeds]
    runs = [run for run in runs if run]
    if not runs:
        return None
    names = {
        metric: [name for name in (metric, f"validation_{metric}") if all(name in run for run in runs)]
        for metric in ("loss", *(kind for kind in view.metrics if kind != "loss"))
    }
    names = {metric: found for metric, found in names.items() if found}
    figure = new_figure(0.5 + 3.0 * len(names), 2.3)
    axes = figure.subplots(1, len(names), squeeze=False)[0]
    colour = looks(view)[label]["color"]
    for here, (metric, found) in zip(axes, names.items(), strict=True):
        for name in found:
            length = min(len(run[name]) for run in runs)
            values = np.mean([run[name][:length] for run in runs], axis=0)
            held_out = name.startswith("validation")
            style = {"color": colour if held_out else "#6b6b6b", "linestyle": "solid" if held_out else (0, (4, 1.5))}
            here.plot(np.arange(1, length + 1), values, **style, linewidth=1.4,
                      label="validation" if held_out else "training")  # fmt: skip
        finish_axes(here, metric.capitalize(), view.metric(metric).percent)
        here.set_xlabel("Epoch")
        here.legend(frameon=False)
    over = f" Mean of {len(runs)} seeds." if len(runs) > 1 else ""
    caption = f"{label} is trained on everybody's data. The training loss is the running mean of an epoch.{over}"
    return CaptionedFigure("pooled_curve", "Learning curve of the pooled model", caption, figure)


def against_bytes(view: RunData, metric: str) -> CaptionedFigure | None:
    """The metric against all bytes that clients have sent and received so far."""
    lines: dict[str, tuple[Any, Any]] = {}
    silent: dict[str, float] = {}
    for label in view.labels:
        curves, sent = [], []
        for seed in view.seeds:
            rounds, values = headline.curve(view, label, seed, metric)
            traffic = view.costs(label, seed)
            if len(rounds):
                place = np.searchsorted(traffic.rounds, rounds)
                curves.append(values)
                sent.append(traffic.bytes_so_far[place])
        if not curves:
            continue
        length = min(map(len, curves))
        mean = np.mean([curve[:length] for curve in curves], axis=0)
        total = np.mean([one[:length] for one in sent], axis=0)
        if view.is_pooled(label) or not total[-1]:
            silent[label] = float(mean[-1])
        else:
            lines[label] = (total / 1e6, mean)
    if not lines:
        return None
    figure = new_figure(6.4, 2.9)
    axes = figure.add_subplot()
    colours, percent = looks(view), view.metric(metric).percent
    for label, (total, mean) in lines.items():
        marker = "o" if len(total) <= 10 else ""
        axes.plot(total, mean, **colours[label], linewidth=1.4, marker=marker, markersize=2.6, label=label)
    for label, value in silent.items():
        axes.axhline(value, color=colours[label]["color"], linewidth=0.9, linestyle=(0, (1, 2)),
                     label=f"{label} (sends no weights), end")  # fmt: skip
    ends = [total[-1] for total, _ in lines.values()]
    if max(ends) > 4 * min(ends):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    finish_axes(axes, "", percent, whole=False)
    axes.set_xlabel("Megabytes sent and received by all clients")
    axes.set_ylabel(f"Test {metric}")
    figure.legend(loc="outside right center", frameon=False)
    caption = f"The curve is {headline.curve_in_words(view)}; bytes are those of weights and numbers, uncompressed."
    return CaptionedFigure("bytes", f"{metric.capitalize()} against bytes", caption + _means(view), figure)


def heat_map(view: RunData, metric: str) -> CaptionedFigure | None:
    """Each client in each round, after local training: who is left behind."""
    grids: dict[str, Any] = {}
    for label in view.labels[:MOST_PANELS]:
        found = [view.client_values(label, seed, "post_fit", metric) for seed in view.seeds]
        found = [series for series in found if len(series)]
        if not found:
            continue
        clients = np.unique(np.concatenate([series.clients for series in found]))
        rounds = np.unique(np.concatenate([series.rounds for series in found]))
        clients = clients[np.linspace(0, len(clients) - 1, min(len(clients), MOST_ROWS)).astype(int)]
        total, count = np.zeros((len(clients), len(rounds))), np.zeros((len(clients), len(rounds)))
        for series in found:
            kept = np.isin(series.clients, clients)
            at = np.searchsorted(clients, series.clients[kept]), np.searchsorted(rounds, series.rounds[kept])
            np.add.at(total, at, series.values[kept])
            np.add.at(count, at, 1)
        grids[label] = (clients, rounds, np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0))
    if not grids or len(view.clients) < 2:
        return None
    every = np.concatenate([grid[np.isfinite(grid)] for _, _, grid in grids.values()])
    low, high = np.quantile(every, [0.02, 0.98])
    kind = view.metric(metric)
    low, high = (float(low), 1.0) if kind.percent else (float(low), float(high))
    high = high if high > low else low + 1e-9
    figure, axes = panel_grid(list(grids), 1.75)
    for here, (label, (clients, rounds, grid)) in zip(axes, grids.items(), strict=False):
        image = here.imshow(grid, cmap="cividis" if kind.higher_is_better else "cividis_r", vmin=low, vmax=high,
                            aspect="auto", interpolation="nearest",
                            extent=(rounds[0] - 0.5, rounds[-1] + 0.5, len(clients) - 0.5, -0.5))  # fmt: skip
        here.set_title(label, loc="left")
        step = max(1, math.ceil(len(clients) / 10))
        shown = range(0, len(clients), step)
        here.set_yticks(list(shown), [short(view.client_name(int(clients[row])), 10) for row in shown])
        here.spines[:].set_visible(False)
    bar = figure.colorbar(image, ax=axes, pad=0.01, fraction=0.025, extend="min" if kind.percent else "both")
    bar.set_label(f"Test {metric}", color=INK)
    show_percent(bar.ax.yaxis, kind.percent)
    figure.supxlabel("Round", size=8.5, color=INK)
    axes[0].set_ylabel("Client")
    caption = "After local training, on each client's own test split; a white cell was not measured." + _means(view)
    if len(view.clients) > MOST_ROWS:
        caption += f" {MOST_ROWS} of {len(view.clients):,} clients."
    return CaptionedFigure("clients", "Every client in every round", caption, figure)


def label_distribution(view: RunData) -> CaptionedFigure | None:
    """How many examples of each label each client holds."""
    known = view.facts.get("labels")
    if not known:
        return None
    counts, classes = np.array(known["counts"]), known["classes"]
    clients = np.linspace(0, len(counts) - 1, min(len(counts), MOST_ROWS)).astype(int)
    shares = counts[clients] / np.maximum(counts[clients].sum(1, keepdims=True), 1)
    figure = new_figure(min(7.2, 1.9 + 0.42 * len(classes)), float(np.clip(1.0 + 0.2 * len(clients), 2.2, 7.0)))
    axes = figure.add_subplot()
    top = max(float(shares.max()), min(1.0, 3 / len(classes)))
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=top, aspect="auto", interpolation="nearest")
    if len(clients) <= 25 and len(classes) <= 12:
        for row, column in zip(*np.nonzero(counts[clients]), strict=True):
            ink = "white" if shares[row, column] > 0.6 * top else INK
            axes.text(column, row, f"{counts[clients][row, column]:,}", ha="center", va="center", size=6.5, color=ink)
    step = max(1, math.ceil(len(classes) / 20))
    names = [short(str(name), 12) for name in classes[::step]]
    slanted = sum(map(len, names)) > 60
    axes.set_xticks(
        range(0, len(classes), step), names, rotation=40 if slanted else 0, ha="right" if slanted else "center"
    )
    step = max(1, math.ceil(len(clients) / 25))
    axes.set_yticks(range(0, len(clients), step), [short(view.client_name(int(c)), 14) for c in clients[::step]])
    axes.set_xlabel("Label")
    axes.set_ylabel("Client")
    axes.spines[:].set_visible(False)
    figure.colorbar(image, ax=axes, pad=0.02, format=lambda share, _: f"{share:.0%}").set_label(
        "Share of the client's examples", color=INK
    )
    several = (
        " CaptionedFigure anew for every seed; this is the first one's." if len(view.data_fingerprints) > 1 else ""
    )
    return CaptionedFigure(
        "labels", "Who holds what", f"Examples of each label at each client, all splits.{several}", figure
    )


def _user_ticks(axes: Axes, view: RunData, users: Any) -> None:
    names = [short(view.client_name(int(user)), 8) for user in users]
    step = max(1, math.ceil(sum(len(name) + 1 for name in names) / 24))
    axes.set_xticks(range(0, len(names), step), names[::step])


def _means(view: RunData) -> str:
    return f" Mean of {len(view.seeds)} seeds." if len(view.seeds) > 1 else ""
