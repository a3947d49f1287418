"""The checks that every algorithm must pass: fedloom's and yours.

`check_algorithm(MyAlgorithm)` trains three small clients on small nets. If the algorithm breaks a promise, it raises an
AssertionError that says which one.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.aggregation.positions import declare, undeclared
from fedloom.algorithm import Algorithm
from fedloom.backends.protocol import Backend
from fedloom.backends.serial import Serial
from fedloom.backends.vector import Workers
from fedloom.data.federation import Federation
from fedloom.errors import FedloomError, InputError
from fedloom.experiment import checkpoint
from fedloom.federation.blame import initial_state
from fedloom.federation.engine import RoundRecord, Snapshot, fit
from fedloom.federation.evaluation import EvaluationWork
from fedloom.federation.sampling import Allowed, Sampling
from fedloom.federation.work import ClientWork, Outcome, Work
from fedloom.models.mlp import MLP
from fedloom.task import Task
from fedloom.testing.ways import ONE, bits, difference, leaf_distance, spread
from fedloom.training import generators
from fedloom.training.probe import Probe, probe
from fedloom.training.settings import Training
from fedloom.tree import Groups
from fedloom.unread_fields import without_effect
from fedloom.user_code import has_own_class, misspelt

__all__ = ["check_algorithm"]

ROUNDS = 3
FEATURES, CLASSES = 16, 3
SIZES = (9, 23, 14)  # three unequal clients
_SMALL = {"lr": 0.05, "batch_size": 4}
TIGHT = 1e-7  # how far grouped clients may be from single ones in float64, relative to the largest weight


def check_algorithm(
    algorithm: type[Algorithm] | Algorithm,
    *,
    settings: dict[str, Any] | None = None,
    task: Task | None = None,
    federation: Federation | None = None,
    workers: int = 0,
    progress: Callable[[str], object] = lambda text: None,
) -> None:
    """Check the promises that an algorithm makes; an AssertionError says which one is broken.

    - The serial backend and clients computed together give the same bits, wherever a cohort is cut. Clients trained
      side by side agree with them closely. With `workers`, this is also checked on that many processes.
    - The algorithm does not change its inputs in place: the server's state, what is shared, what clients keep, and
      what `correct` sees of a step.
    - A run that continues from a checkpoint equals one that was never stopped, even if a client was absent.
    - It runs on a dense net, a CNN with batch normalisation and two LSTMs: one with layer normalisation inside, and
      torch's own, whose clients are never side by side. With `needs = "linear"` it runs on linear models instead.
    - It refuses wrong parameters with a message that names them. Right ones stay the same when written as JSON.
    - It has no method that nothing calls, with nearly the name of one that fedloom calls.
    - Every field has an effect: a method that runs reads it. Clients that send weights declare them as `positions`. For
      algorithms outside of fedloom, these are only warnings. The docstring of one of fedloom's is a sentence.

    With `task` and `federation`, it runs on these and not on the small nets: in the precision of the task, and checked
    in double precision. Take few clients, with few examples.

    `settings` are fields to test it with. By default, training uses small batches. `progress` is called with a line of
    text before each net.

    >>> from fedloom.algorithms import FedAvg
    >>> check_algorithm(FedAvg, settings={"epochs": 2.0})
    """
    checked = _with_settings(algorithm, settings or {})
    # the pages of fedloom's own algorithms are made from their docstrings; yours may say what you like
    about_docstring = () if has_own_class(checked) else _problems_of_docstring(type(checked))
    _complain(type(checked), [*about_docstring, *without_effect(type(checked)).values()])
    _check_parameters(checked, settings or {})
    for said in misspelt(type(checked)):
        raise AssertionError(said)
    seen, doubts = set[str](), set[str]()
    with closing(Workers(workers)) if workers else nullcontext() as crew:
        for trial in _trials(checked, task, federation):
            progress(f"{type(checked).__name__}: checking on {trial.net} …")
            watching = trial.check([crew] if crew else [])
            seen |= watching.seen
            doubts |= watching.doubts
    _complain(type(checked), sorted(doubts))
    assert not (checked.linear and seen), (
        f"{type(checked).__name__}: the server sees each client's answer to {' and '.join(sorted(seen))}, so it must "
        "say linear = False, or use reduce without a rule."
    )


def _trials(algorithm: Algorithm, task: Task | None, federation: Federation | None) -> Iterator[_Trial]:
    """Yield what to check the algorithm on: your own task and data, or else the small nets."""
    if (task is None) != (federation is None):
        raise InputError("check_algorithm takes 'task' and 'federation' together, or neither. Got one of them.")
    if task is None or federation is None:
        for name in _LINEAR if getattr(algorithm, "needs", "") == "linear" else _NETS:
            yield _Trial(algorithm, name, _facts(name))
        return
    if task.dtype != "float64":  # only double precision tells a wrong result from rounding
        _Trial(algorithm, "your task", probe(federation, replace(task))).runs()
    yield _Trial(algorithm, "your task in float64", probe(federation, replace(task, dtype="float64")))


def _with_settings(algorithm: type[Algorithm] | Algorithm, settings: dict[str, Any]) -> Algorithm:
    """Return the algorithm to test, with small batches unless its own defaults differ from those of Training."""
    if isinstance(algorithm, Algorithm):
        changed: Algorithm = algorithm.replace(**settings)
        return changed
    if not (isinstance(algorithm, type) and issubclass(algorithm, Algorithm)):
        raise TypeError(f"check_algorithm takes an Algorithm or a class of them. Got {algorithm!r} instead.")
    found, plain = algorithm(**settings), Training()
    if "train" in settings:
        return found
    small = {name: value for name, value in _SMALL.items() if getattr(found.train, name) == getattr(plain, name)}
    return algorithm(**{**small, **settings})


# --- its description and parameters


def _complain(kind: type[Algorithm], problems: Iterable[str]) -> None:
    """Raise if fedloom's own algorithm has problems that change no result; of another one, only warn."""
    said = "\n".join(problems)
    assert not said or kind.__module__.split(".")[0] != "fedloom", said
    if said:
        warnings.warn(said, stacklevel=3)  # where check_algorithm is called


def _problems_of_docstring(kind: type[Algorithm]) -> Iterator[str]:
    lines = (vars(kind).get("__doc__") or "").strip().splitlines()
    if not lines:
        yield f"{kind.__name__} has no docstring: say in one plain sentence what it does."
        return
    first = lines[0].strip()
    who = f"{kind.__name__}'s docstring"
    if first[0].isalpha() and not first[0].isupper():
        yield f"{who} begins without a capital letter: {first!r}"
    if not first.endswith((".", "!")):
        yield f"{who} must have a whole sentence as its first line: {first!r}"
    if len(first.split()) < 4:
        yield f"{who} says too little in its first line: {first!r}"
    marks = sorted(set(first) & set("`<>{}|"))
    if marks:
        yield f"{who} has {' '.join(marks)} in its first line, which must be plain words: {first!r}. Move them down"


def _check_parameters(algorithm: Algorithm, settings: dict[str, Any]) -> None:
    """Check that wrong values are refused with a clear message, and that right ones stay the same as JSON."""
    kind = type(algorithm)
    given = {**{name: getattr(algorithm, name) for name in kind.model_fields}, **settings}
    for name, schema in kind.model_json_schema()["properties"].items():
        for bad in _bad_values(schema) if name != "train" else ():
            said = _refusal(kind, {**given, name: bad})
            assert said is not None, f"{kind.__name__} takes {name} = {bad!r}, which its field does not allow."
            assert name in said, f"{kind.__name__}(… {name} = {bad!r} …) does not say which parameter is wrong: {said}"
            assert repr(bad) in said, f"{kind.__name__}(… {name} = {bad!r} …) does not say what it was given: {said}"
    said = _refusal(kind, {**given, "no_such_parameter": 1})
    assert said is not None, f"{kind.__name__} takes parameters that it does not have."
    assert "no_such_parameter" in said, f"{kind.__name__} does not say which parameter is unknown: {said}"
    fields = json.loads(algorithm.model_dump_json())
    assert kind(**fields) == algorithm, (
        f"{kind.__name__} changes when its fields are written as JSON and read again: {fields}"
    )
    try:
        hash(algorithm)
    except TypeError as error:
        raise AssertionError(f"{kind.__name__} cannot be hashed ({error}): use tuples instead of lists.") from error


def _refusal(kind: type[Algorithm], fields: dict[str, Any]) -> str | None:
    """Return the message with which an algorithm refuses wrong fields; None if it takes them."""
    try:
        kind(**fields)
    except InputError as error:
        return str(error)
    except Exception as error:
        raise AssertionError(
            f"{kind.__name__} must refuse wrong parameters with an InputError, not with {type(error).__name__}: {error}"
        ) from error
    return None


_OUTSIDE = {"minimum": -1, "exclusiveMinimum": 0, "maximum": 1, "exclusiveMaximum": 0}  # the nearest forbidden values


def _bad_values(schema: dict[str, Any]) -> Iterator[Any]:
    """Yield values just outside the bounds of a numeric field, and a choice that does not exist."""
    options = [option for option in schema.get("anyOf", [schema]) if option.get("type") != "null"]
    kinds = [option.get("type") for option in options if "enum" not in option and "const" not in option]
    if not kinds:
        yield "no such choice"
    for option in options:
        outside = [option[bound] + step for bound, step in _OUTSIDE.items() if bound in option]
        yield from (float(value) if option["type"] == "number" else value for value in outside)
        if outside and "string" not in kinds:
            yield "a word"


# --- its rounds


@dataclass(frozen=True)
class _Trial:
    """One algorithm on one net."""

    algorithm: Algorithm
    net: str
    facts: Probe

    @property
    def federation(self) -> Federation:
        return self.facts.federation

    @property
    def task(self) -> Task:
        return self.facts.task

    @property
    def who(self) -> str:
        return f"{type(self.algorithm).__name__} on {self.net}"

    def check(self, crews: Sequence[Workers]) -> _Watching:
        """Check everything; return what watched it."""
        watching = _Watching(Serial(self.federation, replace(self.task), self.facts.setup(group=1)), self.who)
        before = generators.positions()
        runs = {ONE: self._run(watching)}
        assert generators.positions() == before, (
            f"{self.who} draws from a global generator. Use cohort.key and data.key, which can be repeated."
        )
        self._check_structure(runs[ONE])
        self._check_resumed(runs[ONE], watching.backend)
        for way in spread(self.facts, crews):
            runs[way.name] = self._run(way.backend())
            if way.like:
                self._check_bits(runs[way.like], runs[way.name], f"with {way.name}")
            else:
                self._check_close(runs[ONE], runs[way.name], way.name)
        return watching

    def runs(self) -> None:
        """Check that all rounds run, one client after another, and keep the leaves."""
        self._check_structure(self._run(Serial(self.federation, replace(self.task), self.facts.setup(group=1))))

    def _run(self, backend: Backend, resume: Snapshot | None = None) -> list[RoundRecord]:
        """Run all rounds, or those after a snapshot, and check that no state changes after it was handed out."""
        records: list[RoundRecord] = []
        try:
            begin = resume or Snapshot(0, initial_state(self.algorithm, self.task, self.task.initial()))
            handed = [(what, groups, bits(groups)) for what, groups in _held(begin).items()]
            options: dict[str, Any] = {"seed": 1, "sampling": _Absent(), "backend": backend, "resume": begin}
            for record in fit(self.federation, self.task, self.algorithm, ROUNDS, **options):
                records.append(record)
                handed += [(what, groups, bits(groups)) for what, groups in _held(record).items()]
        except AssertionError:
            raise
        except Exception as error:
            what = str(error) if isinstance(error, FedloomError) else f"{type(error).__name__}: {error}"
            raise AssertionError(f"{self.who} does not run: {what}") from error
        for what, groups, before in handed:
            assert bits(groups) == before, f"{self.who}: {what} was changed in place later."
        return records

    def _check_structure(self, records: list[RoundRecord]) -> None:
        """Check that leaves keep their names, shapes and dtypes; only the server may add new ones in a round."""
        initial = self.task.initial()
        server = _shapes(self.algorithm.init(self.task, initial))
        client = _shapes(self.algorithm.init_own(self.task, initial))
        for record in records:
            state = _shapes(record.state)
            known = {group: {name: state.get(group, {}).get(name) for name in server[group]} for group in server}
            assert known == server, (
                f"{self.who}: the leaves of the server's state must stay as init gives them. They were {server} and "
                f"became {known} in round {record.round}."
            )
            for own in record.own.values():
                assert _shapes(own) == client, (
                    f"{self.who}: what a client keeps must always have the leaves that init_own gives it. They were "
                    f"{client} and became {_shapes(own)} in round {record.round}."
                )

    def _check_bits(self, expected: Sequence[RoundRecord], found: Sequence[RoundRecord], how: str) -> None:
        """Check that the same rounds, computed in another way, have the same bits."""
        differing = difference(expected, found)
        assert not differing, f"{self.who}: {how}, {differing}."

    def _check_close(self, expected: Sequence[RoundRecord], found: Sequence[RoundRecord], how: str) -> None:
        """Check that clients trained side by side get nearly the same numbers as clients trained alone."""
        for one, other in zip(expected, found, strict=True):
            for what, groups in _held(one).items():
                theirs = _held(other)[what]
                distances = (leaf_distance(leaf, theirs[g][n]) for g, t in groups.items() for n, leaf in t.items())
                far = max(distances, default=0.0)
                assert far <= TIGHT, (
                    f"{self.who}: with {how}, {what} is {far:.1e} off. A client's result must not depend on the others "
                    "in its group."
                )

    def _check_resumed(self, reference: Sequence[RoundRecord], serial: Backend) -> None:
        """Check that the rest of a run after a checkpoint of round 1 or 2 is the same, bit for bit."""
        own: dict[int, Groups] = {}
        with tempfile.TemporaryDirectory() as folder:
            for record in reference[:-1]:
                own.update(record.own)
                try:
                    checkpoint.save(folder, record.round, record.state, record.own)
                    loaded = checkpoint.load(folder)
                except FedloomError as error:
                    raise AssertionError(f"{self.who}: its state cannot be saved: {error}") from error
                assert loaded is not None
                saved = _held(loaded.snapshot)
                for what, groups in _held(Snapshot(record.round, record.state, own)).items():
                    assert bits(saved.get(what, {})) == bits(groups), f"{self.who}: {what} changes when it is saved."
                rest = self._run(serial, loaded.snapshot)
                self._check_bits(reference[record.round :], rest, f"continuing after round {record.round}")


def _held(record: Snapshot | RoundRecord) -> dict[str, Groups]:
    """Return what the server and the clients hold after a round, by name."""
    after = f"after round {record.round}"
    clients = {f"what client {client} kept {after}": own for client, own in record.own.items()}
    return {f"the server's state {after}": record.state, **clients}


class _Absent(Sampling):
    """All clients take part, except the second client in round 2."""

    def draw(self, population: int, round: int, seed: int, allowed: Allowed | None = None) -> tuple[int, ...]:
        return tuple(client for client in range(population) if (round, client) != (2, 1))


class _Watching(Backend):
    """Watches a backend: whether methods change their inputs in place, and what the server sees."""

    def __init__(self, backend: Serial, who: str) -> None:
        self.backend, self.who = backend, who
        self.checked: set[str] = set()  # methods whose declarations were checked
        self.seen: set[str] = set()  # methods whose answers the server sees one by one
        self.doubts: set[str] = set()  # what is not wrong in itself

    def run(self, work: Work) -> Any:
        given = _given(work)
        before = {what: bits(groups) for what, groups in given.items()}
        outcome = self.backend.run(work)
        method = f"'{work.method}'" if isinstance(work, ClientWork) else "'model'"
        for what, groups in given.items():
            assert bits(groups) == before[what], f"{self.who}: {method} changes {what} in place: return a new tree."
        if isinstance(work, ClientWork):
            if work.keep == "stack":
                self.seen.add(method)
            if method not in self.checked:
                self.checked.add(method)
                answer = replace(work.part(0, 1), keep="stack").perform(self.backend.place)
                self._check_weights(work, method, answer)
                self._check_positions(work, method, answer)
        return outcome

    def _check_weights(self, work: ClientWork, method: str, answer: Outcome) -> None:
        """Check that no weight is above the algorithm's bound, because a coordinator would refuse it."""
        examples = int(self.backend.place.federation.counts(work.ids[:1], "train")[0])
        bound = work.algorithm.largest_weight(examples)
        for group, weight in answer.weights.items():
            assert weight.max() <= bound, (
                f"{self.who}: {method} gives '{group}' the weight {float(weight.max()):g} with {examples} training "
                f"examples, and largest_weight allows {bound:g}: override it."
            )

    def _check_positions(self, work: ClientWork, method: str, answer: Outcome) -> None:
        """Check that every position starts from a group that was shared, leaf by leaf."""
        for group, base in (answer.positions or {}).items():
            assert group in answer.stack, f"{self.who}: {method} declares '{group}' a position, but does not send it."
            assert base in work.shared, (
                f"{self.who}: {method} declares that '{group}' starts from '{base}', which is not in what was shared: "
                f"{', '.join(work.shared)}."
            )
            shapes = {name: leaf.shape for name, leaf in work.shared[base].items()}
            for name, leaf in answer.stack[group].items():
                assert shapes.get(name) == leaf.shape[1:], (
                    f"{self.who}: {method} declares that '{group}' starts from '{base}', but '{base}' does not have "
                    f"the leaf '{name}' in that shape."
                )
        for group, base in undeclared(answer.stack, answer.positions or {}, work.shared).items():
            who = f"{type(work.algorithm).__name__}, {method}"
            self.doubts.add(f"{who}: {declare(group, base)} Robust rules, norm bounds and compression need this.")


def _given(work: Work) -> dict[str, Groups]:
    """Return the inputs of some work, by name."""
    if isinstance(work, ClientWork):
        return {"shared": work.shared, "own": work.own, "each": work.each or {}, "peers": work.peers or {}}
    return {"shared": work.shared, "own": work.own} if isinstance(work, EvaluationWork) else {}


def _shapes(groups: Groups) -> dict[str, dict[str, str]]:
    return {g: {n: f"{leaf.dtype} {tuple(leaf.shape)}" for n, leaf in sorted(t.items())} for g, t in groups.items()}


# --- small nets and data


def _federation(loss: Any) -> Federation:
    draws = np.random.default_rng(0)
    count = sum(SIZES) + 6
    classes = CLASSES if loss == "cross_entropy" else 2
    y = draws.integers(0, classes, count)
    x = torch.from_numpy(draws.normal(size=(count, FEATURES)) + 0.5 * y[:, None])
    x[: SIZES[0], 3] = 0.0  # a feature that the first client does not have
    labels = torch.from_numpy(y)
    if loss == "mse":
        labels = x[:, 0] - 0.5 * x[:, 1] + 0.1 * labels
    names = () if loss == "mse" else tuple("abc"[:classes])
    held = {"test": (x[sum(SIZES) :], labels[sum(SIZES) :])}
    return Federation(x[: sum(SIZES)], labels[: sum(SIZES)], np.cumsum([0, *SIZES]), classes=names, server=held)


def _pictures() -> nn.Module:
    normalised = (nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU())
    return nn.Sequential(*normalised, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(3 * 4, CLASSES))


class _Recurrent(nn.Module):
    """An LSTM over four steps with layer normalisation inside. It has its own cell, so it can be vmapped."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(4 + 5, 4 * 5)
        self.norm = nn.LayerNorm(5)
        self.out = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = memory = x.new_zeros(x.shape[0], 5)
        for now in x.reshape(-1, 4, 4).unbind(1):
            enter, forget, leave, candidate = self.cell(torch.cat([now, hidden], 1)).chunk(4, 1)
            memory = torch.sigmoid(forget) * memory + torch.sigmoid(enter) * torch.tanh(candidate)
            hidden = torch.sigmoid(leave) * torch.tanh(self.norm(memory))
        scores: Tensor = self.out(hidden)
        return scores


class _Library(nn.Module):
    """Torch's own LSTM, which cannot be vmapped: clients are always computed one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 5, batch_first=True)
        self.out = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.out(self.lstm(x.reshape(-1, 4, 4))[0][:, -1])
        return scores


def _task(model: Any, loss: str = "cross_entropy", **args: Any) -> Task:
    metrics = ["accuracy"] if loss == "cross_entropy" else []
    return Task(model, loss=loss, metrics=metrics, args=args, dtype="float64")


_NETS = {
    "a dense net": _task(MLP, features=FEATURES, hidden=(6,), classes=CLASSES),
    "a CNN with batch normalisation": _task(_pictures),
    "an LSTM with layer normalisation": _task(_Recurrent),
    "torch's LSTM": _task(_Library),
}
_LINEAR = {
    "a linear regression": _task(nn.Linear, "mse", in_features=FEATURES, out_features=1),
    "a logistic regression": _task(nn.Linear, "bce", in_features=FEATURES, out_features=1),
}


@cache
def _facts(net: str) -> Probe:
    """Return what is found out about a net before training. It is the same for all algorithms, and takes seconds."""
    task = {**_NETS, **_LINEAR}[net]
    return probe(_federation(task.loss), replace(task))
