"""The models of a run as pictures of their weights, and what each client holds: for pointing at in front of a class."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedloom.errors import FedloomError, InputError
from fedloom.experiment import checkpoint
from fedloom.results.learning_curves import TITLES
from fedloom.results.run_data import RunData
from fedloom.results.run_values import ClientValues
from fedloom.tree import Tree

MOST = 64  # rows and columns of a picture, and clients
Json = dict[str, Any]


def models(run: RunData, label: str, seed: int, metric: str, phase: str) -> Json:
    """Return the models of a cell's last checkpoint, and for each client what it holds and how it fares."""
    if (label, seed) not in run.cells:  # a label is part of a path
        raise InputError(f"The run has no algorithm '{label}' with seed {seed}.")
    round, found = _last_checkpoint(run, label, seed)
    mean = _mean(list(found.values())) if len(found) > 1 else None
    values, measured, final = _measured(run, label, seed, metric, phase)
    fares = dict(zip(values.clients.tolist(), values.values.tolist(), strict=True))
    held = run.facts.get("labels") or {}
    counts = held.get("counts") or []
    clients = [
        {
            "name": name,
            "holds": counts[number] if seed == run.seeds[0] and number < len(counts) else None,
            "value": fares.get(number),
            "picture": _picture(found[number]) if number in found else None,
            "distance": _distance(found[number], mean) if number in found and mean is not None else None,
        }
        for number, name in enumerate(run.client_names[:MOST])
    ]
    shared = {name: _picture(tree) for name, tree in found.items() if isinstance(name, str)}
    classes = [str(one) for one in held.get("classes") or ()]
    return {
        **{"round": round, "shared": shared, "clients": clients, "all": len(run.clients), "classes": classes},
        **{"measured": measured, "final": final},
    }


def _measured(run: RunData, label: str, seed: int, metric: str, phase: str) -> tuple[ClientValues, str, bool]:
    """Return the last values of clients, a sentence about the model that they are of, and whether it is the final one.

    While a run goes on, a number is of a model of the last measured round, and the weights are those after the average.
    """
    final = run.client_values(label, seed, "final", metric).last_round()
    if len(final):
        return final, f"Each client's {metric} is that of the final model on the client's own test.", True
    phase = "pre_fit" if phase == "final" else phase  # it is not measured yet
    last = run.client_values(label, seed, phase, metric).last_round()
    if not len(last):
        return last, "", False
    when = f"{TITLES[phase].lower()} of round {int(last.rounds.max())}"
    return last, f"Each client's {metric} was measured {when}: it is not of the weights that are drawn here.", False


def _last_checkpoint(run: RunData, label: str, seed: int) -> tuple[int | None, dict[Any, Tree]]:
    """Return the round and the models by client; that of the server is called `everybody's model`."""
    try:
        loaded = checkpoint.load(checkpoint.of_cell(run.folder, label, seed))
    except FedloomError:  # a newer one is replacing it
        loaded = None
    if loaded is None:
        return None, {}
    snapshot = loaded.snapshot
    found: dict[Any, Tree] = {client: own["model"] for client, own in snapshot.own.items() if "model" in own}
    if "model" in snapshot.state:
        found["everybody's model"] = snapshot.state["model"]
    return snapshot.round, found


def _mean(trees: list[Tree]) -> dict[str, Tensor]:
    common = [name for name in trees[0] if all(name in tree for tree in trees)]  # older ones have frozen leaves too
    return {name: sum(tree[name].double() for tree in trees) / len(trees) for name in common}  # type: ignore[misc]


def _distance(tree: Tree, mean: Tree) -> float:
    """Return how far a model is from the mean of all, as a share of the mean's length."""
    apart = sum(float((tree[name].double() - mean[name]).square().sum()) for name in mean)
    length = sum(float(leaf.square().sum()) for leaf in mean.values())
    return math.sqrt(apart / length) if length > 0 else 0.0


def _picture(tree: Tree) -> Json | None:
    """Return the first matrix of a model as tiles of numbers between −1 and 1: a square for each row, if that fits.

    The weights that lead from an 8 × 8 image to a hidden unit are 8 × 8 numbers again.
    """
    matrix = next((leaf for leaf in tree.values() if leaf.dim() >= 2 and leaf.is_floating_point()), None)
    if matrix is None:
        return None
    rows = matrix.detach().float().flatten(1).numpy()
    side = math.isqrt(rows.shape[1])
    if side * side == rows.shape[1] and 3 <= side <= 32:
        tiles = rows[:MOST].reshape(-1, side, side)
    else:
        tiles = rows[:MOST, :MOST][None]
    largest = float(np.abs(tiles).max()) or 1.0
    return {"shape": list(tiles.shape), "values": _bytes(tiles / largest)}


def _bytes(values: NDArray[np.floating[Any]]) -> list[int]:
    return [int(one) for one in np.rint(127 * np.clip(values, -1, 1)).ravel()]
