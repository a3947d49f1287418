"""Made-up runs of three sizes, in which every figure has something to show."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np

from fedloom.clock.clock import ClientTime, RoundTime, Status
from fedloom.experiment.description import identity
from fedloom.experiment.store import Store
from fedloom.federation.engine import RoundRecord
from fedloom.federation.work import Report
from fedloom.results.audit_findings import PANELS
from fedloom.results.run_data import ABOUT, AUDIT, RunData
from fedloom.training.evaluation import Measured
from tests.conftest import federation
from tests.experiment.round_records import TASK

# name → algorithms, clients, seeds and rounds
SIZES = {"small": (2, 2, 1, 2), "medium": (7, 10, 3, 12), "large": (60, 60, 2, 3)}


def algorithm_labels(size: str) -> list[str]:
    """The pooled baseline comes first; the largest run has labels of 40 letters."""
    count = SIZES[size][0]
    if size == "large":
        return ["pooled", *(f"{f'fedavg-with-a-rather-long-label-{number}':x<40}" for number in range(1, count))]
    return ["pooled", "fedavg", "fedprox", "scaffold", "フェドアベレージ", "local", "q-fedavg"][:count]


def client_names(size: str) -> list[str]:
    names = ["Zürich", "北京协和医院", "東京大学病院", "서울대병원"]
    many = [f"{f'hospital-with-a-long-name-in-district-{number}':.<40}" for number in range(60)]
    return [*names, *many][: SIZES[size][1]]


def write_run(folder: Path, size: str, *, clock: bool = False) -> RunData:
    """Write a run of this size, with a virtual clock or without one, and read it."""
    _, clients, seeds, rounds = SIZES[size]
    names = client_names(size)
    description = {"evaluate": {"target": {"accuracy": 0.7}}, "metrics": ["accuracy"], "cohort": {}}
    with Store(folder) as store:
        store.set_clients(federation([20 + 3 * (number % 7) for number in range(clients)], names=tuple(names)))
        store.set_fact("description", description)
        counts = [[(7 * client + 3 * label) % 19 for label in range(5)] for client in range(clients)]
        store.set_fact(
            "labels", {"classes": ["healthy", "肺炎", "a label with a long name", "d", "e"], "counts": counts}
        )
        for seed in range(1, seeds + 1):
            store.set_fact(f"data of seed {seed}", "the same")
            for number, label in enumerate(algorithm_labels(size)):
                cell = store.cell(label, seed)
                for round in range(1, rounds + 1):
                    record = _record(number, clients, seed, round, rounds)
                    time = _time(number, clients, seed, round) if clock and number else None
                    store.save(cell, replace(record, time=time), TASK)
                store.set_status(cell, "done", weights_sha256="0" * 64)
    (folder / AUDIT).write_text(json.dumps({**_audit(), ABOUT: {"identity": identity(description)}}))
    return RunData.read(folder)


def _measured(algorithm: int, client: int, seed: int, step: float) -> Measured:
    """A learning curve that differs a little between algorithms, clients and seeds."""
    best = 0.9 - 0.05 * (algorithm % 7) - 0.1 * (0.5 + 0.5 * math.sin(client)) - 0.002 * algorithm
    accuracy = best - (best - 0.1) * math.exp(-step / 4) + 0.01 * math.sin(seed + client + step)
    return Measured(100, {"loss": 100 * (1.5 - accuracy), "accuracy": 100 * accuracy})


def _record(algorithm: int, clients: int, seed: int, round: int, rounds: int) -> RoundRecord:
    pooled = algorithm == 0

    def at_clients(step: float) -> dict[int, dict[str, Measured]]:
        return {client: {"test": _measured(algorithm, client, seed, step)} for client in range(clients)}

    trained = {clients: {"test": _measured(algorithm, 0, seed, round)}} if pooled else at_clients(round)
    phases = {"pre_fit": at_clients(round - 1), "post_fit": trained}
    if round == rounds:
        phases["final"] = at_clients(round)
        for client in range(clients):
            phases["final"][client]["universal"] = _measured(algorithm, client, seed, round - 0.5)
    everybody = (clients,) if pooled else tuple(range(clients))
    sent = 0 if pooled else 1000 * (1 + algorithm % 5)
    epochs = ({"loss": 1.5 / round, "validation_loss": 1.6 / round, "validation_accuracy": 0.9 - 0.8 / (round + 1)},)
    notes = {"fitness": 0.1 * round + 0.01 * seed, "validation": 0.9 - 0.5 / round, "diversity": 1 / round}
    return RoundRecord(
        round=round,
        state={},
        cohort=everybody,
        reports=tuple(Report(client, sent, sent, history=epochs if pooled else ()) for client in everybody),
        clients=phases,  # type: ignore[arg-type]
        server={split: _measured(algorithm, place, seed, round) for place, split in enumerate(("train", "test"))},
        own={},
        seconds=0.25,
        notes={} if pooled else notes,
    )


def _time(algorithm: int, clients: int, seed: int, round: int) -> RoundTime:
    """Rounds that differ between algorithms, in which some clients are late or lost."""
    long = 40.0 + 25 * (algorithm % 5)
    began = (round - 1) * long
    statuses: tuple[Status, ...] = ("counted", "counted", "counted", "late", "surplus", "vanished", "left")
    asked = []
    for client in range(clients):
        status = statuses[client % len(statuses)]
        share = 1.0 if status == "late" else 0.2 + 0.7 * (0.5 + 0.5 * math.sin(3 * client + seed + round))
        asked.append(ClientTime(client, status, began, began + share * long, 0.8 * share * long, round))
    return RoundTime(began, began + long, clients, tuple(asked))


def _audit() -> dict[str, object]:
    x, y = np.meshgrid(np.linspace(0, 1, 8), np.linspace(0, 1, 8))
    pictures = {view: [((x + shift * y) % 1).tolist()] * 2 for shift, view in enumerate(PANELS)}
    reconstruction = {"pictures": pictures, "cohort": 10, "noise_multiplier": 0.5, "labels": {}, "similarity": {}}
    poisoning = {"clients": 20, "attackers": 4, "rounds": 10, "accuracy": _poisoned()}
    return {"reconstruction": reconstruction, "poisoning": poisoning}


def _poisoned() -> dict[str, dict[str, dict[str, float]]]:
    rules = {"mean": 0.1, "mean without outliers": 0.6, "median": 0.8, "krum": 0.7}
    attacks = {"none": 0.1, "sign flip": 0.0, "noise": 0.05, "a little is enough": -0.1}
    table = {rule: {attack: value + more for attack, more in attacks.items()} for rule, value in rules.items()}
    return {"iid": table, "dirichlet 0.3": table}
