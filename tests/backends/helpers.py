"""Models, data and algorithms that the tests of several backends compute, and what the serial backend gives."""

from functools import lru_cache
from typing import Any

from fedloom.algorithm import Algorithm
from fedloom.algorithms import ALGORITHMS, FedAvg, LocalOnly
from fedloom.backends.serial import Serial
from fedloom.data.federation import Federation
from fedloom.federation.engine import Evaluation, RoundRecord, fit
from fedloom.task import Task
from tests.conftest import (
    Cumulative,
    Dense,
    Logit,
    Noisy,
    Normed,
    Pictures,
    Recurrent,
    federation,
    two_classes,
)

MODELS: dict[str, Any] = {
    "dense": Dense,
    "normed": Normed,
    "pictures": Pictures,
    "cumulative": Cumulative,
    "lstm": Recurrent,
    "rand_like": Noisy,
    "lstm dropout": lambda: Recurrent(layers=2, dropout=0.5),
    "logit": Logit,
}
LIGHT = {"lr": 0.05, "batch_size": 32}
CASES: dict[str, Algorithm] = {
    **{name: kind(**LIGHT) for name, kind in ALGORITHMS.items()},
    "fedavg keeps adam": FedAvg(optimizer="adam", lr=0.01, batch_size=32, optimizer_state="keep", epochs=1.5),
    "fedavg stops early": FedAvg(patience=1, epochs=4, clip=0.5, **LIGHT),
    "local keeps momentum": LocalOnly(momentum=0.9, optimizer_state="keep", **LIGHT),
}
VALIDATED = ("fedavg stops early", "evaluation_weighted", "selective")  # these need validation examples
FIRST = ("fedavg", "fedsgd", "local", "pooled")
ROUNDS = 2
MEASURE = Evaluation(splits=("train", "test"), universal=True)


@lru_cache
def ragged(model: str) -> Federation:
    """Clients with 1 to 600 training examples; more than one where batch normalisation needs it."""
    smallest = (4, 6) if model in ("normed", "cumulative") else (1, 4)
    extra = federation((20,), seed=8)
    data = federation((33, *smallest, 1000, 9, 107), server={"test": (extra.x, extra.y)})
    return two_classes(data) if model == "logit" else data


@lru_cache
def task(model: str, dtype: str) -> Task:
    return Task(MODELS[model], dtype=dtype, loss="bce" if model == "logit" else "cross_entropy")


def cases(model: str) -> list[str]:
    """Every algorithm on the dense net, the first ones also on the others."""
    if model == "dense":
        # here a client has a single example, so no validation examples; CoCoA is for linear models
        return [case for case in CASES if case not in (*VALIDATED, "cocoa")]
    more = [case for case in CASES if case not in ALGORITHMS and case not in VALIDATED]
    return [*FIRST, *more, *(VALIDATED if model == "normed" else ())]


def run(model: str, case: str, dtype: str, backend: Any = None) -> list[RoundRecord]:
    data = ragged(model)
    return list(fit(data, task(model, dtype), CASES[case], ROUNDS, seed=6, evaluation=MEASURE, backend=backend))


@lru_cache
def serial(model: str, case: str, dtype: str) -> list[RoundRecord]:
    return run(model, case, dtype, Serial(ragged(model), task(model, dtype)))
