"""What the audits of a run found, as tables and figures. The numbers come from the run's `audit.json`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from fedloom.results import figure_style as style
from fedloom.results.figure_style import FAINT, INK, CaptionedFigure
from fedloom.results.sentences import say
from fedloom.results.table import Table, Value

Findings = Mapping[str, Any]  # by the name of the audit
PANELS = {
    "original": "original",
    "update": "from the update",
    "secure aggregation": "from the mean of {cohort}",
    "differential privacy": "with noise, z = {noise_multiplier:g}",
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
    columns = ("what the attacker sees", "labels recovered", "95 % low", "95 % high", "similarity of pictures")
    views = {view: title.format(**found) for view, title in PANELS.items() if view in found["labels"]}
    rows: list[tuple[Value, ...]] = [
        (title, *found["labels"][view].values(), found["similarity"][view]) for view, title in views.items()
    ]
    rows.append(("nothing: another example", None, None, None, found["similarity"]["chance"]))
    kinds = ("text", "percent", "percent", "percent", "short")
    note = say("note", "audit_reconstruction") + _not_applied(found)
    return Table("audit_reconstruction", "What one update gives away", columns, tuple(rows), kinds, note)


def _not_applied(found: dict[str, Any]) -> str:
    """Say which protections of the experiment the attack did without."""
    names = ", ".join(found.get("not_applied", ()))
    return " " + say("note", "audit_not_applied", protections=names) if names else ""


def reconstruction(audit: Findings) -> CaptionedFigure | None:
    """Pictures of examples, and what an attacker makes of their updates."""
    found = audit.get("reconstruction", {})
    if "pictures" not in found:
        return None
    victims = len(found["pictures"]["original"])
    figure = style.new_figure(1.45 * len(PANELS) + 0.3, 1.35 * victims + 0.4)
    grid = figure.subplots(victims, len(PANELS), squeeze=False)
    for column, (view, title) in enumerate(PANELS.items()):
        grid[0][column].set_title(title.format(**found), loc="center", size=8)
        for axes, picture in zip(grid[:, column], found["pictures"][view], strict=True):
            axes.imshow(picture, cmap="gray_r", vmin=0, vmax=1, interpolation="nearest")
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set(visible=True, color=FAINT, linewidth=0.5)
    caption = say("caption", "reconstruction", **{key: found[key] for key in ("cohort", "noise_multiplier")})
    caption += _not_applied(found)
    return CaptionedFigure("reconstruction", "Examples that an attacker reconstructs", caption, figure)


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
