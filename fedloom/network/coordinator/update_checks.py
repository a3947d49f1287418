"""Judges every answer before it can change the model. A rejected client is left out of the round, with a reason."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from fedloom.aggregation.outliers import outliers, with_lengths
from fedloom.compression.method import Damaged
from fedloom.federation.sampling import Sampling
from fedloom.federation.work import ClientWork, Place, Report
from fedloom.machine import computing
from fedloom.metrics import NON_NEGATIVE, Range
from fedloom.network.coordinator.roster import Roster
from fedloom.network.protocol.expected_update import (
    ExpectedUpdate,
    Shape,
    expected_update,
    harmless,
    synthetic_place,
    tried,
)
from fedloom.network.protocol.messages import Assignment, ClientAnswer
from fedloom.network.protocol.rejection import Rejected
from fedloom.task import Task
from fedloom.training.clients import Clients
from fedloom.training.evaluation import Measured, evaluate
from fedloom.tree import Groups, is_whole

Sides = tuple[int, ...]
ROUNDING = 1e-6  # how far a mean may be outside its range


@dataclass(frozen=True)
class Limits:
    """The largest change and weight of an update."""

    norm_bound: float | None = None
    weight_cap: float = 1e9


@dataclass
class Judge:
    """Decides whether answers count, by what a run asks for and what it knows about its clients."""

    roster: Roster
    task: Task
    sampling: Sampling  # with the limits of updates
    same_sizes: bool  # whether every seed splits the data in the same way
    initial_own: Groups = field(default_factory=dict)  # a client's own state before it first takes part
    expected: dict[tuple[str, str, int], ExpectedUpdate] = field(default_factory=dict)  # by kind of work

    def expected_update(self, work: ClientWork) -> ExpectedUpdate:
        """Return what an honest answer looks like. Without it nothing is checked, so an error ends the run."""
        key = (work.method, ",".join(work.shared), len(work.ids) if work.graph is not None else 0)
        if key not in self.expected:

            def attempt(place: Place, safe: bool) -> ExpectedUpdate:
                return expected_update(harmless(work, self.task) if safe else work, self.initial_own, place)

            what, roster = f"'{work.method}'", self.roster
            self.expected[key] = tried(attempt, what, work.algorithm, self.task, roster.data_format, roster.setup)
        return self.expected[key]

    def check_trained(
        self, work: ClientWork, expected: ExpectedUpdate, assignment: Assignment, answer: ClientAnswer
    ) -> None:
        """Raise `Rejected` unless this answer to a training call counts."""
        largest = work.algorithm.largest_weight(self._examples(answer.client))
        limits = Limits(self.sampling.norm_bound, min(self.sampling.weight_cap, largest))
        ticket = (assignment.round, assignment.attempt, assignment.call) if work.own else None
        check_update(self.decompressed(work, expected, answer), expected, work.shared, limits, ticket)
        self.check_evaluated(assignment, answer)
        check_history(answer.history, math.ceil(work.algorithm.train.epochs), self._ranges())

    def decompressed(self, work: ClientWork, expected: ExpectedUpdate, answer: ClientAnswer) -> ClientAnswer:
        """Return an answer with whole leaves. Raise `Rejected` if its parts cannot be those of an honest answer."""
        if work.compress is None:
            if answer.parts:
                raise Rejected("compressed", "the answer is compressed, and the run announced no compression for it")
            return answer
        link, update = work.uplink(work.compress, self.task), answer.update
        try:
            groups = link.receive(
                answer.client, update.groups, answer.parts, expected.groups, expected.positions, work.shared
            )
        except Damaged as error:
            raise Rejected("compressed", str(error)) from None
        return replace(answer, update=replace(update, groups=groups), parts={})

    def _examples(self, client: int) -> int:
        """Return how many training examples a client may have."""
        found = int(self.roster.held["train"][client]) if self.same_sizes else self._everything()
        return min(found, self.sampling.max_examples or found)

    def _everything(self) -> int:
        """Return the number of examples of all clients: no client has more, whatever the seed."""
        return int(sum(sizes.sum() for sizes in self.roster.held.values()))

    def _ranges(self) -> dict[str, Range]:
        """Return the smallest and the largest possible value of the loss and of every metric."""
        loss = NON_NEGATIVE if isinstance(self.task.loss, str) else (-math.inf, math.inf)
        return {"loss": loss, **{metric.name: metric.range for metric in self.task.measures}}

    def lengths(self, work: ClientWork, expected: ExpectedUpdate, answers: Sequence[ClientAnswer]) -> list[Report]:
        """Return how long the changes of answers are."""
        return [self._length(work, expected, self.decompressed(work, expected, answer)) for answer in answers]

    def _length(self, work: ClientWork, expected: ExpectedUpdate, answer: ClientAnswer) -> Report:
        update, examples = replace(answer.update, positions=expected.positions), [self._examples(answer.client)]
        return with_lengths([Report(answer.client)], update, work.shared, self.task, examples)[0]

    def outliers(self, work: ClientWork, reports: Sequence[Report]) -> list[int]:
        """Return the clients whose changes are too long for a sum, as a simulation with this factor does."""
        factor = self.sampling.longest(remote=True)
        if factor is None or work.keep != "sum" or work.guard is not None:  # a rule on others changes the sensitivity
            return []
        lengths, examples = [one.lengths for one in reports], [one.examples for one in reports]
        return [reports[position].client for position in outliers(lengths, examples, factor)]

    def check_evaluated(self, assignment: Assignment, answer: ClientAnswer) -> None:
        """Raise `Rejected` unless what this answer measures counts."""
        splits = assignment.splits
        sizes: dict[str, int] = {split: int(self.roster.held[split][answer.client]) for split in splits}
        if not self.same_sizes:
            sizes = {split: min(found.count, self._everything()) for split, found in answer.measured.items()}
        ranges = self._ranges()
        means = {"loss": ranges["loss"], **{m.name: ranges[m.name] for m in self.task.measures if m.values}}
        summaries = {m.name: ranges[m.name] for m in self.task.measures if m.summary is not None}
        scores = self._rows if any(found.scores for found in answer.measured.values()) else {}
        # a call that trains nothing has nothing to measure
        required = splits if assignment.kind == "evaluate" or answer.measured else ()
        labels = self.roster.data_format.labels
        check_measured(answer.measured, required, sizes, means, summaries, scores, len(self.roster.classes), labels)

    @cached_property
    def _rows(self) -> dict[str, Sides]:
        """The shape of what each metric keeps of an example, found by trying it on made-up examples."""
        place = synthetic_place(self.roster.data_format, replace(self.task), self.roster.setup)
        data = Clients(place.federation, (0,), setup=place.setup)
        with computing():
            scores = evaluate(place.task, place.task.initial(), data, 0, "train").scores
        return {name: tuple(rows.shape[1:]) for name, rows in scores.items()}


def check_update(
    answer: ClientAnswer,
    expected: ExpectedUpdate,
    shared: Groups,
    limits: Limits,
    ticket: tuple[int, int, int] | None = None,
) -> None:
    """Raise `Rejected` unless this answer may be summed with the others; `ticket` is the version of its state."""
    update = answer.update
    _same_names("group", update.groups, expected.groups)
    for group, leaves in expected.groups.items():
        _same_names("leaf", update.groups[group], leaves)
        for name, shape in leaves.items():
            _same_shape(f"{group}/{name}", update.groups[group][name], shape)
    _same_names("public number", update.public, expected.public)
    for name, shape in expected.public.items():
        _same_shape(name, update.public[name], shape)
    bases: Groups = {group: shared[base] for group, base in expected.positions.items()}
    for group, sent_leaves in update.groups.items():
        for name, leaf in sent_leaves.items():
            if not _finite(leaf):
                before = bases.get(group, {}).get(name, shared.get(group, {}).get(name))
                # a buffer, such as a mask, may hold infinities if the coordinator sent it with some
                if before is None or _finite(before) or bool(leaf.isnan().any()):
                    raise Rejected("not-finite", f"{group}/{name} has values that are not finite numbers")
    for name, value in update.public.items():
        # NaN means that a number is undefined: a score of one class, or of a peer that sent the client nothing
        if not _finite(value) and bool(value.isinf().any()):
            raise Rejected("not-finite", f"the public number '{name}' is not finite")
    _check_weights(update.weight if isinstance(update.weight, dict) else {}, limits)
    if limits.norm_bound is not None:
        _check_norm(update.groups, bases, limits.norm_bound)
    if answer.ticket != ticket:
        raise Rejected("ticket", f"the client's state should have the version {ticket}, and has {answer.ticket}")


def _finite(leaf: Tensor) -> bool:
    """Return whether no value is NaN or infinite: a finite sum shows it at a tenth of the cost."""
    return is_whole(leaf) or bool(leaf.sum().isfinite()) or bool(leaf.isfinite().all())


def _same_names(what: str, found: Mapping[str, object], expected: Mapping[str, object]) -> None:
    missing, extra = expected.keys() - found.keys(), found.keys() - expected.keys()
    if missing or extra:
        words = [f"missing: {', '.join(sorted(missing)[:5])}"] if missing else []
        words += [f"unknown: {', '.join(name[:40] for name in sorted(extra)[:5])}"] if extra else []
        raise Rejected("keys", f"the update has the wrong {what}s: {'; '.join(words)}")


def _same_shape(name: str, leaf: Tensor, expected: Shape) -> None:
    shape, kind = expected
    if tuple(leaf.shape) != (1, *shape):
        raise Rejected("shape", f"{name} must have the shape {shape}, and has {tuple(leaf.shape[1:])}")
    if leaf.dtype != kind:
        raise Rejected("dtype", f"{name} must be {kind}, and is {leaf.dtype}")


def _check_weights(weights: Mapping[str, Tensor], limits: Limits) -> None:
    values = []
    for group, weight in weights.items():
        if tuple(weight.shape) != (1,):
            raise Rejected("weight", f"the weight of {group} must be one number")
        value = float(weight)
        if not 0 <= value <= limits.weight_cap:  # NaN fails this too
            raise Rejected("weight", f"the weight of {group} must be from 0 to {limits.weight_cap:g}, and is {value:g}")
        values.append(value)
    if values and max(values) == 0:  # a client may have no say in one group, but not in all
        raise Rejected("weight", "the weight must be more than 0")


def _check_norm(groups: Groups, bases: Groups, bound: float) -> None:
    """Bound the norm of each group's change: a position minus its base, or the change that was sent."""
    for group, leaves in groups.items():
        square = 0.0
        for name, leaf in leaves.items():
            if not is_whole(leaf):
                base = bases.get(group, {}).get(name)
                change = leaf if base is None else leaf - base
                square += float(change.abs().to(torch.float64).square().sum())
        if not square**0.5 <= bound:
            raise Rejected(
                "norm", f"the change of {group} has the norm {square**0.5:.4g}, and at most {bound:g} is allowed"
            )


def check_measured(
    measured: Mapping[str, Measured],
    splits: tuple[str, ...],
    sizes: Mapping[str, int],
    means: Mapping[str, Range],
    summaries: Mapping[str, Range] = {},
    scores: Mapping[str, Sides] = {},
    classes: int = 0,
    label: Sides = (),
) -> None:
    """Raise `Rejected` unless these measure what was asked for, on as many examples as the client has.

    `means` and `summaries` have the range of each metric that is a mean or not, `scores` the shape of what the latter
    keep of an example, `classes` the number of classes (0: a regression), and `label` the shape of a label.
    Where a site withholds something, a mean is NaN, or a summary and its scores are missing.
    """
    missing = [split for split in splits if sizes.get(split) and split not in measured]
    if missing:
        raise Rejected("metrics", f"the answer lacks the split '{missing[0]}'")
    for where, found in measured.items():
        if where not in splits:
            raise Rejected("metrics", f"the coordinator did not ask for the split '{where[:40]}'")
        if found.count != sizes[where]:
            raise Rejected("metrics", f"the client has {sizes[where]} {where} examples, and measured {found.count}")
        if found.sums.keys() - {*means} or (found.summaries.keys() | found.scores.keys()) - {*summaries}:
            raise Rejected("metrics", "the answer has metrics that the coordinator did not ask for")
        if found.count and found.sums.keys() != {*means}:
            raise Rejected("metrics", "the answer lacks some of the metrics")
        if (found.targets is not None) != bool(found.scores):
            raise Rejected("metrics", "the answer has scores without labels, or labels without scores")
        for name, total in found.sums.items():
            _check_value(f"the {where} {name}", total / max(found.count, 1), means[name])
        for name, value in found.summaries.items():
            _check_value(f"the {where} {name}", value, summaries[name])
        if found.targets is not None:
            for name, rows in found.scores.items():
                _check_rows(f"the scores of {name}", rows, (found.count, *scores[name]))
            _check_rows("the labels", found.targets, (found.count, *label))
            whole = found.targets.to(torch.float64)
            if classes and bool(((whole < 0) | (whole >= classes) | (whole != whole.round())).any()):
                raise Rejected("metrics", f"labels must be whole numbers from 0 to {classes - 1}")


def check_history(history: Sequence[Mapping[str, float]], epochs: int, ranges: Mapping[str, Range]) -> None:
    """Raise `Rejected` unless these are the losses and metrics of at most as many epochs as were asked for."""
    if len(history) > epochs:
        raise Rejected("metrics", f"the client trains for {epochs} epochs, and reports {len(history)}")
    known = {"loss": ranges["loss"], **{f"validation_{name}": range for name, range in ranges.items()}}
    for values in history:
        for name, value in values.items():
            if name not in known:
                raise Rejected("metrics", f"the history of epochs has an unknown metric '{name[:40]}'")
            _check_value(f"the {name} of an epoch", value, known[name])


def _check_value(what: str, value: float, range: Range) -> None:
    """Check a number against its range, up to rounding. NaN means that it is undefined, or that a site withholds it."""
    low, high = range
    if math.isinf(value) or value < low - ROUNDING or value > high + ROUNDING:
        allowed = "finite" if math.isinf(value) else f"from {low:g} to {high:g}"
        raise Rejected("metrics", f"{what} must be {allowed}, and is {value:g}")


def _check_rows(what: str, row: Tensor, shape: Sides) -> None:
    """Check that there are finite numbers for every example."""
    if tuple(row.shape) != shape:
        numbers = "one number" if len(shape) == 1 else f"{math.prod(shape[1:])} numbers"
        raise Rejected("metrics", f"{what} must be {numbers} for each of {shape[0]} examples")
    if row.dtype in (torch.bfloat16, torch.complex64, torch.complex128) or not _finite(row):
        raise Rejected("metrics", f"{what} must be finite real numbers, and some are not")
