"""What a sweep tells you to do next: measure the best setting on test data, and look beyond the edge of a range."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedloom.files import toml_text
from fedloom.results.sentences import say
from fedloom.tuning.search_space import name, short

if TYPE_CHECKING:
    from fedloom.tuning.sweep import SweepResult, Trial

# what clients are promised, as keys of [privacy] and as whole tables; other keys there, such as `clip`, may be tuned
PROMISED = {"epsilon", "delta", "noise_multiplier", "noise", "colluders", "dp", "example_dp", "privacy"}


def promises(sweep: SweepResult) -> list[str]:
    """Return the keys of the sweep that say how well clients are protected, such as ε."""
    return [key for key in sweep.keys if key.split(".")[0] == "privacy" and key.split(".")[-1] in PROMISED]


def advice(sweep: SweepResult, file: Path, changes: Sequence[str]) -> Iterator[str]:
    """Say for each algorithm which setting is best, with the command that measures it, and if it is at an edge.

    Settings that protect clients differently have no best one: the weakest protection nearly always comes first.
    """
    if promised := promises(sweep):
        yield say("note", "sweep_of_promises", keys=", ".join(promised))
        return
    labels = dict.fromkeys(trial.label for trial in sweep.trials)
    known = [*labels, *sweep.unchanged]
    for best in (one for label in labels if (one := sweep.best(label)) is not None):
        chosen = [f"{key}={toml_text(value)}" for key, value in best.setting.items()]
        own = [change for change in [*changes, *chosen] if not of_another(change, best.label, known)]
        repeated = [word for change in own for word in ("--set", change)]
        only = ["--only", best.label] if len(known) > 1 else []
        again = ["fedloom", "run", str(file), *only, *repeated, "--out", str(sweep.folder / f"best-{best.label}")]
        names = [name(one.setting) for one in sweep.ties(best)]
        if len(names) == 1:
            yield f"Best on validation data: {names[0]} ({best.label}). Measure it on test data, once:"
        else:
            tie = f"{len(names)} settings tie on validation data: {'; '.join(names)} ({best.label})"
            yield f"{tie}. Measure one on test data, once:"
        yield f"  {shlex.join(again)}"
        if len(names) == 1:
            yield from at_edge(sweep, best)


def of_another(key: str, label: str, labels: Collection[str]) -> bool:
    """Whether a key, also with its value, is in the table of another one of these algorithms.

    >>> of_another("algorithm.scaffold.weights=uniform", "fedavg", ["fedavg", "scaffold"])
    True
    """
    return any(key.startswith((f"algorithm.{one}.", f"algorithm.{one}=")) for one in labels if one != label)


def at_edge(sweep: SweepResult, best: Trial) -> Iterator[str]:
    """Say for which numbers the best setting has the smallest or largest that was tried: others may be better."""
    for key, value in best.setting.items():
        tried = [trial.setting[key] for trial in sweep.trials if trial.label == best.label and key in trial.setting]
        numbers = all(isinstance(one, (int, float)) and not isinstance(one, bool) for one in tried)
        if not numbers or len({*tried}) < 2:
            continue
        for word, edge, beyond in (("smallest", min(tried), "smaller"), ("largest", max(tried), "larger")):
            if value == edge:
                yield f"{key} = {short(value)} is the {word} that was tried: {beyond} ones may be better."
