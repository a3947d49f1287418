"""What an agent says: about its data, about an error, about what has left. Shapes, sizes and names, never values."""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from fedloom import machine
from fedloom.data.federation import Federation
from fedloom.errors import FedloomError, InputError
from fedloom.network.agent.policy import Refusal, Site
from fedloom.network.protocol.messages import Ask, ClientFacts, Hello, Outgoing
from fedloom.training.clients import Setup


def check_form(offer: Mapping[str, Any]) -> None:
    """Raise `Refusal` unless a plan has the form that it must have; some of it becomes names of files here."""
    hexes = [str(offer.get("run")), *map(str, (offer.get("initial") or {}).values())]
    tables = [offer.get(name) for name in ("experiment", "sources", "versions", "initial")]
    tables += [(offer.get("experiment") or {}).get(name) for name in ("algorithm", "task")]
    if not all(isinstance(table, Mapping) for table in tables) or not all(
        re.fullmatch("[0-9a-f]{16,64}", h) for h in hexes
    ):
        raise Refusal("the coordinator's plan does not have the form of one")


def describe(site: Site, federation: Federation, setup: Setup, mark: str) -> Hello:
    """What an agent tells about its data: shapes, names of classes, sizes of splits."""
    hosts = site.table.hosts
    numbers = range(federation.clients) if hosts is None else hosts
    if hosts is not None and any(not 0 <= number < federation.clients for number in hosts):
        raise InputError(f"[site] hosts names clients that the data does not have: it has {federation.clients}.")
    sizes = {split: federation.sizes(split) for split in ("train", "validation", "test")}
    alone = hosts is None and federation.clients == 1
    clients = tuple(
        ClientFacts(
            name=site.name
            if alone
            else federation.name(number)
            if hosts is not None
            else f"{site.name}/{federation.name(number)}",
            number=number if hosts is not None else None,
            **{split: int(counts[number]) for split, counts in sizes.items()},
        )
        for number in numbers
    )
    facts = machine.facts()
    return Hello(
        versions={name: str(facts[name]) for name in ("fedloom", "torch", "python", "system", "cpu_capability")},
        features=tuple(federation.x.shape[1:]),
        dtype=str(federation.x.dtype).removeprefix("torch."),
        classes=federation.classes,
        clients=clients,
        data_mark=mark,
        setup=asdict(setup),
    )


def short_traceback(error: Exception) -> str:
    """An error for other people's eyes: fedloom's own messages, else its kind and where it happened, without values."""
    root: BaseException = error
    while root.__cause__ is not None:
        root = root.__cause__
    if isinstance(root, FedloomError):
        return str(error)
    if isinstance(root, OSError):
        return f"{type(root).__name__}: {root.strerror}"
    frames = traceback.extract_tb(root.__traceback__)[-6:]
    where = "\n".join(f"  {Path(frame.filename).name}:{frame.lineno} in {frame.name}" for frame in frames)
    return f"{type(root).__name__} (its message stays at the site)\n{where}"


def about(ask: Ask) -> dict[str, Any]:
    """An ask in a few words, for the audit log."""
    return {
        "algorithm": ask.label,
        "seed": ask.seed,
        "round": ask.round,
        "asked": ask.kind if ask.kind != "train" else f"{ask.verb} {ask.method}",
    }


def summary(tensors: Mapping[str, torch.Tensor], outgoing: Outgoing) -> dict[str, Any]:
    """What an answer holds, in words: numbers of values, never values."""
    groups: dict[str, int] = {}
    for path, leaf in tensors.items():
        _, kind, name = path.split("/", 2)
        what = f"{kind} {name.split('/')[0]}"
        groups[what] = groups.get(what, 0) + leaf.numel()
    metrics = sorted({name for r in outgoing.results for found in r.measured.values() for name in found.sums})
    found: dict[str, Any] = {"values": groups}
    if metrics:
        found["metrics"] = metrics
    if any(result.sha256 for result in outgoing.results):
        found["fingerprints"] = len(outgoing.results)
    return found


def bare(name: str, known: Mapping[str, bool]) -> str:
    """The metric that a number in the history of epochs is about."""
    return next((metric for metric in known if name == metric or name.endswith(f"_{metric}")), name)


def short(value: Any) -> str:
    """A value that fits into a message."""
    text = json.dumps(value)
    return text if len(text) <= 100 else text[:97] + "…"
