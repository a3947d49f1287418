"""What the page shows, as values that JSON can hold; the report and the page share the code that computes them."""

from __future__ import annotations

import json
import math
import re
import statistics
import struct
from collections.abc import Sequence
from typing import Any
from zlib import crc32

import numpy as np

from fedloom.data.split import SPLITS
from fedloom.errors import InputError
from fedloom.experiment.control import PAUSED
from fedloom.privacy.words import EPSILONS, IN_A_WORD
from fedloom.results import figure_style, learning_curves
from fedloom.results.badly_served import in_short
from fedloom.results.comparisons import best_first, comparisons
from fedloom.results.result import overall
from fedloom.results.run_data import RunData
from fedloom.results.run_values import Curve, Floats, Ints
from fedloom.results.sentences import say
from fedloom.results.summary import COLUMNS
from fedloom.watch.live_run import MARKS, LiveRun

Json = dict[str, Any]
PHASES = ("pre_fit", "post_fit")  # of what is measured at clients in each round
FINAL = "final"  # the final model, and until it is measured the model before local training
# In the dark, two of the report's colours do not show; Okabe and Ito's yellow, too pale for white paper, does.
IN_THE_DARK = {"#000000": "#f2f4f7", "#882255": "#F0E442"}
AXES = ("rounds", "bytes", "seconds", "virtual")
WIDE_BANDS = 3  # intervals of two seeds are so wide that those of more lines would hide everything
MOST_CELLS = 4_000_000  # of a matrix: of more, the last rounds are shown
TOOK_PART = 1  # in a matrix; each of MARKS follows


def names(runs: Sequence[RunData]) -> list[str]:
    """Return what the page calls each run: its name, or its folder if one file was run into several folders."""
    by_name, by_folder = [run.name for run in runs], [run.folder.resolve().name for run in runs]
    paths = [str(run.folder) for run in runs]
    return next((some for some in (by_name, by_folder) if len({*some}) == len(runs)), paths)


def overview(run: RunData, control: Json) -> Json:
    """Return what the top of the page shows: how far the run is, and what there is to look at."""
    rounds = run.facts.get("rounds")
    cells = [
        {
            "label": label,
            "seed": seed,
            **{key: row[key] for key in ("status", "rounds_done", "error", "started", "finished")},
        }
        for (label, seed), row in run.cells.items()
    ]
    abandoned = not all(row["complete"] for cell in run.cells for row in run.rows("rounds", *cell))
    costs = [run.costs(*cell) for cell in run.cells]
    return {
        "name": run.name,
        "folder": str(run.folder),
        "status": overall({cell["status"] for cell in cells}, abandoned),
        "rounds": rounds,
        "cells": cells,
        "labels": [
            {"label": label, "pooled": run.is_pooled(label), **_style(number)}
            for number, label in enumerate(run.labels)
        ],
        "seeds": run.seeds,
        "metrics": [
            {"name": name, "percent": metric.percent, "share": metric.share, "up": metric.higher_is_better}
            for name, metric in run.metrics.items()
        ],
        "panels": {name: learning_curves.panel_title(run, name) for name in panels(run)},
        "clients": len(run.clients),
        "started": run.started_at,
        "finished": run.finished_at if run.done else None,
        "seconds_left": seconds_left(run),
        "seconds": sum(float(one.seconds.sum()) for one in costs),
        **{key: sum(int(getattr(one, key).sum()) for one in costs) for key in ("bytes_up", "bytes_down")},
        "epsilon": epsilon(run),
        "control": {**control, "paused": run.facts.get(PAUSED)},
        "network": bool(run.facts.get("network")),
    }


def _style(number: int) -> Json:
    style = figure_style.line_style(number)
    dashes = [] if style["linestyle"] == "solid" else [1.6 * part for part in style["linestyle"][1]]
    return {"colour": style["color"], "dark": IN_THE_DARK.get(style["color"], style["color"]), "dashes": dashes}


def panels(run: RunData) -> list[str]:
    """Return the panels for which something was measured; what the shared model does comes first."""
    wanted = ["pre_fit", "post_fit"] if run.evaluation.get("splits", ("test",)) else []
    return ["server", *wanted] if run.has_server_test else wanted


def seconds_left(run: RunData) -> float | None:
    """Estimate how long the rest takes: the rounds that are left, as slow as the label's last ten, side by side."""
    rounds = run.facts.get("rounds")
    statuses = [row["status"] for row in run.cells.values()]
    if rounds is None or not {"running", "waiting"} & {*statuses} or "running" not in statuses:
        return None
    recent = {cell: [row["seconds"] for row in run.rows("rounds", *cell)[-10:]] for cell in run.cells}
    of_label: dict[str, list[float]] = {}
    for (label, _), some in recent.items():
        of_label.setdefault(label, []).extend(some)
    everything = [one for some in recent.values() for one in some]
    if not everything:
        return None
    left = 0.0
    for (label, _), row in run.cells.items():
        if row["status"] in ("running", "waiting"):
            left += (rounds - row["rounds_done"]) * statistics.median(of_label[label] or everything)
    return left / max(statuses.count("running"), 1)


def epsilon(run: RunData) -> list[Json]:
    """Return the ε that each cell has spent, what it is about, and the budget if there is one."""
    privacy = run.description.get("privacy") or {}
    found = []
    for label, seed in run.cells:
        rows = run.rows("server_metrics", label, seed)
        spent = {row["metric"]: row["value"] for row in rows if row["split"] == "notes"}  # the last round's
        for kind in (kind for kind in EPSILONS if spent.get(kind) is not None):
            table = privacy.get("example_dp" if kind == "example_epsilon" else "dp") or {}
            about = {"word": IN_A_WORD[kind], "about": EPSILONS[kind], "budget": table.get("epsilon")}
            found.append({"label": label, "seed": seed, "spent": spent[kind], **about})
    return found


def curves(
    run: RunData,
    metric: str,
    panel: str,
    axis: str = "rounds",
    each_seed: bool = False,
    known: str = "",
) -> Json:
    """Return a metric against an axis: a line with its band per algorithm, and one per seed if they are wanted.

    `universal` is the title of the test of clients' models on all tests, and each line's number; empty without one.
    So is `final` of the final models, which no curve shows: they come after the last average. `order` has the labels of
    the table of last values, and `about` says what order that is.

    `known` has the marks of the lines that the page has, with commas between them, each followed by those of its seeds
    after semicolons: the page gets only what follows.
    """
    _known(panel, learning_curves.TITLES, "panel")
    _known(axis, AXES, "axis")
    by_seed = {
        (label, seed): learning_curves.panel_values(run, label, seed, panel, metric, "test").by_round()
        for label, seed in run.cells
    }
    by_seed = {cell: stats for cell, stats in by_seed.items() if len(stats.index)}
    marks, seeds = known.split(","), len(run.seeds)
    lines, ends = [], []
    for number, label in enumerate(dict.fromkeys(label for label, _ in by_seed)):
        mine = {seed: stats for (one, seed), stats in by_seed.items() if one == label}
        # a seed that has just begun must not take the rounds away that others have finished
        done = {seed: stats for seed, stats in mine.items() if run.cells[label, seed]["status"] == "done"} or mine
        band = learning_curves.band(list(done.values()), metric, seeds)
        apart = [seed for seed in mine if each_seed or seed not in done]
        places = {seed: _places(run, label, seed, axis) for seed in mine}
        sides = {side: getattr(band, side) for side in ("mean", "low", "high")}
        have, *of_seeds = (marks[number] if number < len(marks) else "").split(";")
        lines.append(
            {
                "label": label,
                **_points(_mean_places(axis, [places[seed] for seed in done], band.rounds), sides, have),
                "count": len(done),
                "universal": _universal(run, label, metric),
                "final": None if panel == "server" else _at_the_end(run, label, f"test_{metric}"),
                "seeds": [
                    _points(_mean_places(axis, [places[seed]], mine[seed].index), {"mean": mine[seed].mean}, mark)
                    for seed, mark in zip(apart, (*of_seeds, *[""] * len(apart)), strict=False)
                ],
            }
        )
        ends.append((label, int(band.rounds[-1]), len(done), float(band.mean[-1])))
    order, about = _ranking(run, metric, panel, ends)
    known_seeds = max((line["count"] for line in lines), default=0)
    wide = len(lines) > WIDE_BANDS and any(line["count"] == 2 for line in lines)
    crowded = wide or len(lines) > learning_curves.MOST_BANDS
    words = learning_curves.caption(seeds, {panel}, crowded, known_seeds)
    if "Bands: " in words:
        words += " " + say("caption", "cut")
    if any(line["seeds"] for line in lines) and not each_seed:
        words += " Thin lines: seeds that are not done."
    tested = any(line["universal"] is not None for line in lines)
    return {
        "lines": lines,
        "caption": words,
        "crowded": crowded,
        "metric": metric,
        "panel": panel,
        "order": order,
        "about": about,
        "final": COLUMNS["test"] if any(line["final"] is not None for line in lines) else "",
        "universal": COLUMNS["universal"] + run.drawn("universal") if tested else "",
    }


def _ranking(run: RunData, metric: str, panel: str, ends: list[tuple[str, int, int, float]]) -> tuple[list[str], str]:
    """Return the order of the table of last values, and what it is; `ends`: label, last round, seeds and mean.

    A finished run has the order of its report. Numbers of other rounds or over fewer seeds are no ranking.
    """
    labels = [label for label, *_ in ends]
    if run.done and (found := comparisons(run, metric)):
        first = best_first(run, found[0])
        pooled = ", and what has all data in one place last" if any(map(run.is_pooled, first)) else ""
        about = f"The best algorithm first{pooled}, by what the report compares: {found[0].title}."
        if {*labels} - {*first}:
            about += " Algorithms without this number stand last."
        if found[0].key != f"{panel}_test":
            about += " Columns “round” to “band” are about the last round of these curves."
        return sorted(labels, key=lambda label: first.index(label) if label in first else len(first)), about
    final = " The report compares the final models, which are measured at the end." if panel != "server" else ""
    if len({(rounds, seeds) for _, rounds, seeds, _ in ends}) > 1:
        differ = "they are not at the same round, or not all have the same seeds."
        return labels, f"The last round of each algorithm, in the order of the file: {differ}{final}"
    sign = -1 if run.metric(metric).higher_is_better else 1
    known = sorted((math.isnan(mean), sign * mean, place) for place, (*_, mean) in enumerate(ends))
    return [
        labels[place] for *_, place in known
    ], f"The best algorithm first, by the last round of these curves.{final}"


def _universal(run: RunData, label: str, metric: str) -> float | None:
    """Return the clients' models on all tests, the mean over finished seeds: it is measured at the end of a cell."""
    return _at_the_end(run, label, f"universal_{metric}") if run.evaluation.get("universal") else None


def _at_the_end(run: RunData, label: str, name: str) -> float | None:
    """Return a final number of an algorithm, the mean over finished seeds."""
    done = [cell for cell, row in run.cells.items() if cell[0] == label and row["status"] == "done"]
    known = [value for cell in done if (value := run.summary(*cell).get(name)) is not None]
    return statistics.fmean(known) if known else None


def _points(x: dict[str, Floats], sides: dict[str, Floats], known: str = "") -> Json:
    """Return the points of a line, without those that the page has.

    `mark` says how many points there are, with their checksum. A page that sends it back gets only the points that
    follow, or all of them if the checksum differs: a run adds few points to lines that may be long.
    """
    table = np.stack([*x.values(), *sides.values()], axis=1)
    count = int(known.partition(".")[0]) if re.fullmatch(r"[0-9]{1,9}\.[0-9]+", known) else 0
    kept = count if _mark(table[:count]) == known else 0
    new = {axis: _rounded(column[kept:]) for axis, column in x.items()}
    new["rounds"] = x["rounds"][kept:].astype(int).tolist()
    return {
        "x": new,
        **{side: _rounded(column[kept:]) for side, column in sides.items()},
        "kept": kept,
        "mark": _mark(table),
    }


def _mark(table: Floats) -> str:
    return f"{len(table)}.{crc32(table.tobytes())}"


def _places(run: RunData, label: str, seed: int, axis: str) -> Curve | None:
    """Return where the rounds of a cell are on an axis; None if nothing is known about it."""
    if axis == "rounds":
        return None
    costs, times = run.costs(label, seed), run.times(label, seed)
    if not len(costs.rounds):
        return None
    if axis == "virtual":
        measured = len(times.rounds) > 0 and np.array_equal(times.rounds, costs.rounds)
        return (times.rounds, times.ended) if measured else None
    return costs.rounds, np.cumsum(costs.seconds) if axis == "seconds" else costs.bytes_so_far.astype(np.float64)


def _mean_places(axis: str, places: Sequence[Curve | None], rounds: Ints) -> dict[str, Floats]:
    """Return where rounds are on an axis, as means over seeds; the axis is left out if a seed lacks it."""
    found = {"rounds": rounds.astype(np.float64)}
    known = [one for one in places if one is not None]
    if axis != "rounds" and len(known) == len(places):
        found[axis] = np.mean([np.interp(rounds, *one) for one in known], axis=0)
    return found


def clients(live: LiveRun, label: str, seed: int, metric: str, phase: str) -> Json:
    """Return the table of clients, column by column: who they are, how often they took part, how they fare."""
    run, cell = live.cell(*_cell(live, label, seed))
    count = len(run.clients)
    took = cell.participations
    who = took[:, 1].astype(np.int64)
    here = who < count  # the pooled baseline trains a client that does not exist
    who, took = who[here], took[here]
    last = run.client_values(label, seed, _known(phase, (FINAL, *PHASES), "phase"), metric)
    about = f"{metric}: the final model." if phase == FINAL and len(last) else ""
    if phase == FINAL and not len(last):
        last = run.client_values(label, seed, PHASES[0], metric)
        about = f"{metric}: before local training. The final model is measured at the end." if len(last) else ""
    value, measured = np.full(count, np.nan), np.zeros(count)
    value[last.clients], measured[last.clients] = last.values, last.rounds  # later rounds replace earlier ones
    seen = np.zeros(count)
    seen[who] = took[:, 0]  # here too
    held = seed in run.seeds_of_clients  # the sizes of clients that another seed drew are not known
    missed = [np.bincount(table[:, 1].astype(np.int64), minlength=count)[:count] for table in cell.marked.values()]
    part: dict[str, Any] = {
        "took_part": np.bincount(who, minlength=count).tolist(),
        "last_round": seen.astype(int).tolist(),
        "not_counted": np.sum(missed, axis=0).tolist(),
        "bytes_up": np.bincount(who, took[:, 2], count).astype(np.int64).tolist(),
        "bytes_down": np.bincount(who, took[:, 3], count).astype(np.int64).tolist(),
    }
    if run.is_pooled(label):  # zeros would say that nothing leaves, and every example does
        part = dict.fromkeys(part, [None] * count)
    return {
        "names": run.client_names,
        "about": about,
        "columns": {
            **{split: [row[split] if held else None for row in run.clients] for split in SPLITS},
            **part,
            "value": _rounded(value),
            "measured": measured.astype(int).tolist(),
        },
    }


def matrix(live: LiveRun, label: str, seed: int, metric: str, phase: str, after: int = 0) -> bytes:
    """Return rounds × clients after a round: six 32-bit numbers, then a value and a state for each pair.

    The numbers are the first round, how many rounds and clients there are, and zeros. Values are 32-bit floats, NaN
    where a client was not measured. A state is a byte: 0, or 1 if the client took part, or 2 and more by `MARKS`.
    """
    run, cell = live.cell(*_cell(live, label, seed))
    count = len(run.clients)
    values = run.client_values(label, seed, _known(phase, PHASES, "phase"), metric)
    last = max(int(run.cells[label, seed]["rounds_done"]), cell.upto)
    first = max(after, last - MOST_CELLS // max(count, 1), 0) + 1
    rounds = max(last - first + 1, 0)
    states, shown = np.zeros((rounds, count), np.uint8), np.full((rounds, count), np.nan, np.float32)

    def place(at: Any, who: Any) -> tuple[Any, Any, Any]:
        at, who = at.astype(np.int64) - first, who.astype(np.int64)
        here = (at >= 0) & (at < rounds) & (who < count)
        return at[here], who[here], here

    at, who, _ = place(cell.participations[:, 0], cell.participations[:, 1])
    states[at, who] = TOOK_PART
    for number, name in enumerate(MARKS, TOOK_PART + 1):
        at, who, _ = place(cell.marked[name][:, 0], cell.marked[name][:, 1])
        states[at, who] = number
    at, who, here = place(values.rounds, values.clients)
    shown[at, who] = values.values[here]
    return struct.pack("<6I", first, rounds, count, 0, 0, 0) + shown.tobytes() + states.tobytes()


def distribution(run: RunData, metric: str, phase: str, seed: int, round: int | None = None) -> Json:
    """Return each algorithm's values at its clients, in the last measured round up to a given one."""
    found = []
    for label in run.labels:
        values = run.client_values(label, seed, _known(phase, PHASES, "phase"), metric)
        if round is not None:
            values = values.keep(values.rounds <= round)
        last = values.last_round()
        if len(last):
            shown = {"round": int(last.rounds[0]), "clients": last.clients.tolist(), "values": _rounded(last.values)}
            found.append({"label": label, **shown})
    return {"lines": found}


def settings(run: RunData) -> Json:
    """Return what was run: the experiment file, or what a Python program gave, and where it ran.

    `harm` is what the top of the report says about clients that are served badly, once the run is done.
    """
    file = run.folder / "experiment.toml"
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    machine = run.facts.get("machine") or {}
    return {
        "experiment": text or json.dumps(run.description, indent=2, ensure_ascii=False),
        "machine": {key: str(value) for key, value in machine.items()},
        "data": run.data_marks,
        "harm": [*in_short(run)] if run.done else [],
    }


def _cell(live: LiveRun, label: str, seed: int) -> tuple[str, int]:
    if (label, seed) not in live.data().cells:
        raise InputError(f"There is no cell {label} with seed {seed} in {live.folder}.")
    return label, seed


def _known(value: str, known: Any, what: str) -> str:
    if value not in known:
        raise InputError(f"There is no {what} '{value}'. Known: {', '.join(known)}.")
    return value


def _rounded(values: Floats) -> list[float | None]:
    """Six digits are more than a screen shows. JSON has no NaN."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]
