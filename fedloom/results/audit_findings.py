"""What the audits of a run found, as tables and figures. The numbers come from the run's `audit.json`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from fedloom.results import figure_style as style
from fedloom.results.figure_style import FAINT, INK, CaptionedFigure
from fedloom.results.sentences import say
from fedloom.results.table import Table, Value

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_COLUMNS = 15  # whose values are drawn
Findings = Mapping[str, Any]  # by the name of the audit
PANELS = {
    "original": "original",
    "update": "from the update",
    "secure aggregation": "from the mean of {cohort}",
    "differential privacy": "with noise, z = {noise_multiplier:.3g}",
}


def tables(audit: Findings) -> Iterator[Table]:
    """What each audit found, in numbers."""
    made = {"epsilon": _epsilon, "membership": _membership, "reconstruction": _reconstruction}
    for name, make in made.items():
        found = audit.get(name, {})
        if found and "left_out" not in found:
            yield make(found)


def _epsilon(found: dict[str, Any]) -> Table:
    columns = ("algorithm", "claimed ε", "lower bound", "estimate", "δ", "neighbours", "right guesses", "the claim is")
    rows: list[tuple[Value, ...]] = []
    for label, one in found.items():
        bound = one["bound"]
        guesses, verdict = f"{bound['correct']} of {bound['guesses']}", "refuted" if one["refuted"] else "not refuted"
        numbers = (one["claimed"], bound["epsilon"], one["estimate"], one["delta"])
        rows.append((label, *numbers, one["adjacency"], guesses, verdict))
    kinds = ("text", "short", "short", "short", "number", "text", "shown", "text")
    note = say("note", "audit_epsilon")
    return Table("audit_epsilon", "The claimed ε against an attacker", columns, tuple(rows), kinds, note)


def _membership(found: dict[str, Any]) -> Table:
    columns = ("algorithm", "attack by", "AUC", "95 % low", "95 % high", "members found", "95 % low", "95 % high")
    rows = tuple(
        (label, attack, *one["auc"].values(), *one["found"].values())
        for label, attacks in found.items()
        for attack, one in attacks.items()
    )
    kinds = ("text", "text", *["short"] * 3, *["percent"] * 3)
    note = say("note", "audit_membership")
    return Table("audit_membership", "Membership inference against the final model", columns, rows, kinds, note)


def _reconstruction(found: dict[str, Any]) -> Table:
    what = "values" if found.get("columns") else "pictures"  # findings of earlier versions have pictures alone
    columns = ("what the attacker sees", "labels recovered", "95 % low", "95 % high", f"similarity of {what}")
    views = {view: title.format(**found) for view, title in PANELS.items() if view in found["labels"]}
    rows: list[tuple[Value, ...]] = [
        (title, *found["labels"][view].values(), found["similarity"][view]) for view, title in views.items()
    ]
    rows.append(("nothing: guessing", found.get("guessing"), None, None, found["similarity"]["chance"]))
    kinds = ("text", "percent", "percent", "percent", "short")
    note = say("note", "audit_reconstruction", what=what) + _not_applied(found)
    return Table("audit_reconstruction", "What one update gives away", columns, tuple(rows), kinds, note)


def _not_applied(found: dict[str, Any]) -> str:
    """Say which protections of the experiment the attack did without."""
    names = ", ".join(found.get("not_applied", ()))
    return " " + say("note", "audit_not_applied", protections=names) if names else ""


def reconstruction(audit: Findings) -> CaptionedFigure | None:
    """Pictures or values of examples, and what an attacker makes of their updates."""
    found = audit.get("reconstruction", {})
    if "pictures" not in found:
        return None
    columns = found.get("columns", [])
    about = {key: found[key] for key in ("cohort", "noise_multiplier")}
    caption = say("caption", "reconstruction", part="panel" if columns else "row", **about)
    if columns:
        figure = _values(found, columns[:MOST_COLUMNS])
        caption += " " + say("caption", "reconstructed_values")
        if len(columns) > MOST_COLUMNS:
            caption += " " + say("caption", "first_columns", shown=MOST_COLUMNS, columns=len(columns))
    else:
        figure = _pictures(found)
    caption += _not_applied(found)
    return CaptionedFigure("reconstruction", "Examples that an attacker reconstructs", caption, figure)


def _pictures(found: dict[str, Any]) -> Figure:
    """One row of pictures per victim."""
    victims = len(found["pictures"]["original"])
    figure = style.new_figure(1.45 * len(PANELS) + 0.3, 1.35 * victims + 0.4)
    grid = figure.subplots(victims, len(PANELS), squeeze=False)
    for column, (view, title) in enumerate(PANELS.items()):
        grid[0][column].set_title(title.format(**found), loc="center", size=8)
        for axes, picture in zip(grid[:, column], found["pictures"][view], strict=True):
            axes.imshow(picture, cmap="gray_r", vmin=0, vmax=1, interpolation="nearest")
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set(visible=True, color=FAINT, linewidth=0.5)
    return figure


def _values(found: dict[str, Any], columns: list[str]) -> Figure:
    """One panel per victim: a bar for the value of each column, and a mark for what each view shows of it."""
    victims, places = len(found["values"]["original"]), np.arange(len(columns))
    figure = style.new_figure(8.2, 0.3 * len(columns) + 1.3)
    panels = figure.subplots(1, victims, sharex=True, sharey=True, squeeze=False)[0]
    for number, axes in enumerate(panels):
        values = {view: np.array(found["values"][view][number][: len(columns)]) for view in PANELS}
        axes.barh(places, values["original"], 0.7, color="#c8c8c8", label=PANELS["original"])
        for (view, title), colour, marker in zip([*PANELS.items()][1:], style.COLOURS, "osD", strict=False):
            label = title.format(**found)
            axes.plot(values[view], places, marker, color=colour, markersize=4.5, alpha=0.9, label=label)
        axes.axvline(0, color=FAINT, linewidth=0.5)
        axes.set_title(f"client {number + 1}", loc="left")
        axes.set_xlabel("value")
    panels[0].set_yticks(places, columns)
    panels[0].invert_yaxis()  # columns are read from the top
    handles, labels = panels[0].get_legend_handles_labels()  # the bars are last
    figure.legend([handles[-1], *handles[:-1]], [labels[-1], *labels[:-1]], loc="outside upper left", ncols=len(PANELS))
    return figure


def poisoning(audit: Findings) -> CaptionedFigure | None:
    """The accuracy under each attack with each rule, one panel per partition."""
    found = audit.get("poisoning", {})
    if "accuracy" not in found:
        return None
    figure = style.new_figure(8.2, 3.6)
    panels = figure.subplots(1, len(found["accuracy"]), sharey=True, squeeze=False)[0]
    for panel, (axes, (partition, rules)) in enumerate(zip(panels, found["accuracy"].items(), strict=True)):
        attacks = list(next(iter(rules.values())))
        values = np.array([[rules[rule][attack] for attack in attacks] for rule in rules])
        image = style.draw_grid(axes, values, 0.0, 1.0, True)
        for (row, column), value in np.ndenumerate(values):
            axes.text(
                column,
                row,
                f"{100 * value:.0f}",
                ha="center",
                va="center",
                size=7,
                color="white" if value < 0.5 else INK,
                gid=f"cell-{panel}-{row}-{column}",  # in the dark, a report keeps its colour
            )
        axes.set_title(partition, loc="left")
        axes.set_xticks(range(len(attacks)), attacks, rotation=40, ha="right")
        axes.set_yticks(range(len(rules)), list(rules))
        axes.tick_params(length=0)
    bar = style.add_colour_bar(figure, image, list(panels), "Test accuracy", pad=0.01, fraction=0.03)
    style.show_percent(bar, True)
    caption = say("caption", "poisoning", **{key: found[key] for key in ("clients", "attackers", "rounds")})
    return CaptionedFigure("poisoning", "Attackers against robust rules", caption, figure)
