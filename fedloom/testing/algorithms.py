"""The checks that every algorithm must pass: fedloom's and yours.

`check_algorithm(MyAlgorithm)` trains three small clients on small nets. If the algorithm breaks a promise, it raises an
AssertionError that says which one.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import numpy as np
import torch
from annotated_types import Ge, GroupedMetadata, Gt, Le, Lt
from torch import Tensor, nn

from fedloom import tree
from fedloom.algorithm import Algorithm
from fedloom.backends.protocol import Backend
from fedloom.backends.serial import Serial
from fedloom.backends.vector import Vector, Workers
from fedloom.data.federation import Federation
from fedloom.errors import FedloomError, InputError
from fedloom.experiment import checkpoint
from fedloom.federation.engine import RoundRecord, Snapshot, fit
from fedloom.federation.evaluation import EvaluationWork
from fedloom.federation.sampling import Sampling
from fedloom.federation.work import ClientWork, Place, Work
from fedloom.task import Task
from fedloom.testing.backends import InProcess
from fedloom.training.clients import Setup
from fedloom.training.local import Groups
from fedloom.training.probe import probe
from fedloom.training.schedule import Training

__all__ = ["check_algorithm"]

ROUNDS = 3
FEATURES, CLASSES = 16, 3
SIZES = (9, 23, 14)  # three unequal clients
_SMALL = {"lr": 0.05, "batch_size": 4}
TIGHT = 1e-7  # how far grouped clients may be from single ones in float64, relative to the largest weight


def check_algorithm(
    algorithm: type[Algorithm] | Algorithm, *, settings: dict[str, Any] | None = None, workers: int = 0
) -> None:
    """Check the promises that an algorithm makes; an AssertionError says which one is broken.

    - The serial backend and clients computed together give the same bits, wherever a cohort is cut. Clients trained
      side by side agree with them closely. With `workers`, this is also checked on that many processes.
    - The algorithm does not change its inputs in place: the server's state, what is shared, and what clients keep.
    - A run that continues from a checkpoint equals one that was never stopped, also if a client was absent.
    - It runs on a dense net, a CNN with batch normalisation and two LSTMs: one with layer normalisation inside, and
      torch's own, whose clients are never side by side. With `needs = "linear"` it runs on linear models instead.
    - It refuses wrong parameters with a message that names them. Right ones stay the same when written as JSON.
    - Its docstring begins with one plain sentence.

    `settings` are fields to test it with. By default, training uses small batches.

    >>> from fedloom.algorithms import FedAvg
    >>> check_algorithm(FedAvg, settings={"epochs": 2.0})
    """
    checked = _with_settings(algorithm, settings or {})
    _check_docstring(type(checked))
    _check_parameters(checked, settings or {})
    crew = Workers(workers) if workers else None
    seen: set[str] = set()
    try:
        for name, build, loss in _LINEAR if getattr(checked, "needs", "") == "linear" else _NETS:
            metrics = ["accuracy"] if loss == "cross_entropy" else []
            task = Task(build, loss=loss, metrics=metrics, dtype="float64")
            seen |= _Trial(checked, name, _federation(loss), task).check(crew)
    finally:
        if crew is not None:
            crew.close()
    assert not (checked.linear and seen), (
        f"{type(checked).__name__}: the server sees each client's answer to {' and '.join(sorted(seen))}, so it must "
        "say linear = False, or use reduce without a rule."
    )


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


def _check_docstring(kind: type[Algorithm]) -> None:
    lines = (vars(kind).get("__doc__") or "").strip().splitlines()
    assert lines, f"{kind.__name__} has no docstring: say in one plain sentence what it does."
    first = lines[0].strip()
    who = f"{kind.__name__}'s docstring"
    assert first[0].isupper() or not first[0].isalpha(), f"{who} begins without a capital letter: {first!r}"
    assert first.endswith((".", "!")), f"{who} must have a whole sentence as its first line: {first!r}"
    assert len(first.split()) >= 4, f"{who} says too little in its first line: {first!r}"
    assert not set(first) & set("`<>{}|"), f"{who} must begin with plain words: {first!r}"


def _check_parameters(algorithm: Algorithm, settings: dict[str, Any]) -> None:
    """Check that wrong values are refused with a clear message, and that right ones stay the same as JSON."""
    kind = type(algorithm)
    given = {**{name: getattr(algorithm, name) for name in kind.model_fields}, **settings}
    for name, field in kind.model_fields.items():
        if name == "train":
            continue
        for bad in _bad_values(field.annotation, tuple(field.metadata)):
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


_OUTSIDE: dict[type, int] = {Ge: -1, Gt: 0, Le: 1, Lt: 0}  # from a bound to the nearest value that it forbids


def _bad_values(annotation: Any, metadata: tuple[Any, ...]) -> Iterator[Any]:
    """Yield values just outside the bounds of a numeric field, and a choice that does not exist."""
    kinds = list(_kinds(annotation, metadata))
    names = [choice for kind, _ in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
    if names and all(get_origin(kind) is Literal or kind is type(None) for kind, _ in kinds):
        yield "no such choice"
    for kind, bounds in kinds:
        if kind not in (int, float):
            continue
        for bound in bounds:  # its only field has the name of its class: Ge(ge=0)
            yield kind(getattr(bound, type(bound).__name__.lower()) + _OUTSIDE[type(bound)])
        if bounds and str not in [other for other, _ in kinds]:
            yield "a word"


def _kinds(annotation: Any, metadata: tuple[Any, ...]) -> Iterator[tuple[Any, list[Any]]]:
    """Yield the kinds of value that a field takes, each with its bounds."""
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        yield from _kinds(inner, (*metadata, *more))
    elif get_origin(annotation) in (Union, UnionType):
        for option in get_args(annotation):
            yield from _kinds(option, metadata)
    else:
        flat = [part for given in metadata for part in (given if isinstance(given, GroupedMetadata) else [given])]
        yield annotation, [part for part in flat if isinstance(part, Ge | Gt | Le | Lt)]


# --- its rounds


@dataclass(frozen=True)
class _Trial:
    """One algorithm on one net."""

    algorithm: Algorithm
    net: str
    federation: Federation
    task: Task

    @property
    def who(self) -> str:
        return f"{type(self.algorithm).__name__} on {self.net}"

    def check(self, crew: Workers | None) -> set[str]:
        """Check everything; return the methods whose answers the server sees one by one."""
        found = probe(self.federation, self.task)
        alone = found.setup(group=1)
        with self._drawing_only_from_keys():
            watching = _Watching(Serial(self.federation, self.task, alone), self.who)
            reference = self._run(watching)
        self._check_structure(reference)
        self._check_bits(reference, "all clients computed together", self._together(alone))
        self._check_bits(reference, "the cohort cut after its first client", self._together(alone, cuts=(1,)))
        self._check_bits(reference, "the cohort cut after its second client", self._together(alone, cuts=(2,)))
        self._check_resumed(reference)
        grouped = found.setup(group=2)
        if grouped.group > 1:
            beside = self._run(self._together(grouped))
            self._check_close(reference, beside, 2)
            self._check_bits(beside, "pairs of clients side by side, cut", self._together(grouped, cuts=(1,)))
            self._check_close(reference, self._run(self._together(found.setup(group=3))), 3)
        if crew is not None:
            self._check_bits(reference, f"{len(crew)} processes", Vector(self.federation, self.task, alone, crew))
            if grouped.group > 1:
                workers = Vector(self.federation, self.task, grouped, crew)
                self._check_bits(beside, f"{len(crew)} processes with pairs of clients side by side", workers)
        return watching.seen

    def _together(self, setup: Setup, cuts: tuple[int, ...] = ()) -> InProcess:
        return InProcess(Place(self.federation, self.task, setup), cuts)

    def _run(self, backend: Backend, resume: Snapshot | None = None) -> list[RoundRecord]:
        """Run all rounds, or those after a snapshot, and check that no state changes after it was handed out."""
        try:
            before = self.task.initial()
            begin = resume or Snapshot(0, self.algorithm.init(self.task, before))
            handed = [(f"the state after round {begin.round}", begin.state, _bits(begin.state))]
            handed += [(f"what client {c} kept", own, _bits(own)) for c, own in begin.own.items()]
            records = []
            options: dict[str, Any] = {"seed": 1, "sampling": _Absent(), "backend": backend, "resume": begin}
            for record in fit(self.federation, self.task, self.algorithm, ROUNDS, **options):
                records.append(record)
                handed.append((f"the state after round {record.round}", record.state, _bits(record.state)))
                for client, own in record.own.items():
                    handed.append((f"what client {client} kept after round {record.round}", own, _bits(own)))
        except AssertionError:
            raise
        except Exception as error:
            what = str(error) if isinstance(error, FedloomError) else f"{type(error).__name__}: {error}"
            raise AssertionError(f"{self.who} does not run: {what}") from error
        for what, groups, bits in handed:
            assert _bits(groups) == bits, f"{self.who}: {what} was changed in place later."
        return records

    @contextmanager
    def _drawing_only_from_keys(self) -> Iterator[None]:
        """Check that nothing draws from the global generators."""
        before, numpy_before = torch.random.get_rng_state(), repr(np.random.get_state())
        yield
        same = torch.equal(before, torch.random.get_rng_state()) and numpy_before == repr(np.random.get_state())
        assert same, f"{self.who} draws from a global generator. Use cohort.key and data.key, which can be repeated."

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

    def _check_bits(self, reference: list[RoundRecord], how: str, backend: Backend) -> None:
        """Check that another backend gives the same bits."""
        for one, other in zip(reference, self._run(backend), strict=True):
            self._same(one, other, f"with {how}")

    def _same(self, one: RoundRecord, other: RoundRecord, how: str) -> None:
        a, b = _facts(one), _facts(other)
        wrong = [name for name in a if a[name] != b[name]]
        assert not wrong, f"{self.who}: {how}, round {one.round} differs in {', '.join(wrong)}."

    def _check_close(self, reference: list[RoundRecord], others: list[RoundRecord], group: int) -> None:
        """Check that clients trained side by side get nearly the same numbers as clients trained alone."""
        for one, other in zip(reference, others, strict=True):
            pairs = [("the server's state", one.state, other.state)]
            pairs += [(f"what client {client} keeps", own, other.own[client]) for client, own in one.own.items()]
            for what, left, right in pairs:
                far = _distance(left, right)
                assert far <= TIGHT, (
                    f"{self.who}: with {group} clients side by side, {what} is {far:.1e} off after round {one.round}. "
                    "A client's result must not depend on the others in its group."
                )

    def _check_resumed(self, reference: list[RoundRecord]) -> None:
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
                saved = loaded.snapshot
                assert _bits(saved.state) == _bits(record.state), f"{self.who}: the state changes when it is saved."
                assert {c: _bits(kept) for c, kept in saved.own.items()} == {c: _bits(own[c]) for c in sorted(own)}, (
                    f"{self.who}: what clients keep changes when it is saved."
                )
                serial = Serial(self.federation, self.task, probe(self.federation, self.task).setup(group=1))
                for one, other in zip(reference[record.round :], self._run(serial, saved), strict=True):
                    self._same(one, other, f"continuing after round {record.round}")


class _Absent(Sampling):
    """All clients take part, except the second client in round 2."""

    def draw(self, population: int, round: int, seed: int) -> tuple[int, ...]:
        return tuple(client for client in range(population) if (round, client) != (2, 1))


class _Watching(Backend):
    """Watches a backend: whether methods change their inputs in place, and what the server sees."""

    def __init__(self, backend: Serial, who: str) -> None:
        self.backend, self.who = backend, who
        self.checked: set[str] = set()  # methods whose declarations were checked
        self.seen: set[str] = set()  # methods whose answers the server sees one by one

    def run(self, work: Work) -> Any:
        given = _given(work)
        before = {what: _bits(groups) for what, groups in given.items()}
        outcome = self.backend.run(work)
        method = f"'{work.method}'" if isinstance(work, ClientWork) else "'model'"
        for what, groups in given.items():
            assert _bits(groups) == before[what], f"{self.who}: {method} changes {what} in place: return a new tree."
        if isinstance(work, ClientWork):
            if work.keep == "stack":
                self.seen.add(method)
            if method not in self.checked:
                self.checked.add(method)
                self._check_positions(work, method)
        return outcome

    def _check_positions(self, work: ClientWork, method: str) -> None:
        """Check that every position starts from a group that was shared, leaf by leaf."""
        answer = replace(work.part(0, 1), keep="stack").perform(self.backend.place)
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

    def close(self) -> None:
        self.backend.close()


def _given(work: Work) -> dict[str, Groups]:
    """Return the inputs of some work, by name."""
    if isinstance(work, ClientWork):
        return {"shared": work.shared, "own": work.own, "each": work.each or {}, "peers": work.peers or {}}
    return {"shared": work.shared, "own": work.own} if isinstance(work, EvaluationWork) else {}


def _bits(groups: Groups) -> dict[str, str]:
    return {group: tree.sha256(leaves) for group, leaves in groups.items()}


def _shapes(groups: Groups) -> dict[str, dict[str, str]]:
    return {g: {n: f"{leaf.dtype} {tuple(leaf.shape)}" for n, leaf in sorted(t.items())} for g, t in groups.items()}


def _facts(record: RoundRecord) -> dict[str, Any]:
    """Return everything in a record except times. Equal facts mean equal bits."""
    return {
        "the server's state": _bits(record.state),
        "what clients keep": {client: _bits(own) for client, own in record.own.items()},
        "the cohort": record.cohort,
        "clients' evaluations": record.clients,
        "the server's evaluation": record.server,
        "the reports": record.reports,
    }


def _distance(a: Groups, b: Groups) -> float:
    """Return the largest difference between two sets of trees, relative to each leaf's largest value (at least 1)."""
    far = 0.0
    for group, leaves in a.items():
        for name, leaf in leaves.items():
            if leaf.numel():
                one, other = leaf.to(torch.float64), b[group][name].to(torch.float64)
                far = max(far, float((one - other).abs().max() / one.abs().max().clamp(min=1.0)))
    return far


# --- small nets and data


def _federation(loss: str) -> Federation:
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


def _dense() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 6), nn.ReLU(), nn.Linear(6, CLASSES))


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


def _line() -> nn.Module:
    return nn.Linear(FEATURES, 1)


_NETS: Sequence[tuple[str, Callable[[], nn.Module], str]] = (
    ("a dense net", _dense, "cross_entropy"),
    ("a CNN with batch normalisation", _pictures, "cross_entropy"),
    ("an LSTM with layer normalisation", _Recurrent, "cross_entropy"),
    ("torch's LSTM", _Library, "cross_entropy"),
)
_LINEAR: Sequence[tuple[str, Callable[[], nn.Module], str]] = (
    ("a linear regression", _line, "mse"),
    ("a logistic regression", _line, "bce"),
)
