"""What a model needs, found by trying it on a few examples before the first round.

Every faster way to compute (cutting a batch, several clients in one pass, side by side, replayed) is for models and
losses for which it gives what plain torch gives. What is found here decides which of them are used.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from fedloom import keys
from fedloom.data.federation import Federation
from fedloom.errors import FedloomError, InputError, TrainingError
from fedloom.task import Task
from fedloom.training import evaluation, generators
from fedloom.training.clients import Setup
from fedloom.training.lanes import Lanes
from fedloom.training.masking import Masked
from fedloom.training.schedule import Training
from fedloom.training.single import Desk, Tensors, client_step, gradient_of, has_hooks, layout
from fedloom.tree import Tree, clone

SMALL_MODEL = 256 * 1024  # bytes: above this, stacked weights leave the cache and vmapped steps gain nothing
LARGE_MODEL = 64_000_000  # bytes: above this, recording takes much memory and gains little
LANES = 10  # fewer lanes do not pay for vmap's own cost
ROWS, MANY_ROWS = 8, 256  # examples in a trial
LABELS = 4096  # examples that losses are tried on: one of every label, if there are no more


@dataclass(frozen=True, eq=False)
class Probe:
    """Facts about a model and its data that decide how clients are computed."""

    masked: bool
    normalises_features: bool
    draws_globally: bool
    drops_evaluating: bool
    bytes: int
    task: Task
    federation: Federation

    @cached_property
    def trial(self) -> _Trial:
        """The model in double precision, where differences are not hidden by rounding, if it can be had."""
        if self.bytes <= LARGE_MODEL and self.task.dtype != "float64":
            try:
                wide = replace(self.task, dtype="float64")
                trial = _Trial(
                    wide,
                    self.masked,
                    self.normalises_features,
                    self.drops_evaluating,
                    *_some(self.federation, wide, ROWS),
                )
                trial.outputs(trial.x)
                return trial
            except Exception:  # such as a model that makes single precision numbers itself
                pass
        return self.own_trial

    @cached_property
    def own_trial(self) -> _Trial:
        """The model as it is."""
        return _Trial(
            self.task,
            self.masked,
            self.normalises_features,
            self.drops_evaluating,
            *_some(self.federation, self.task, ROWS),
        )

    @cached_property
    def loss_is_mean(self) -> bool:
        """Whether the loss of a batch is the mean of its examples' losses."""
        if isinstance(self.task.loss, str):
            return True
        labels = min(LABELS, max(ROWS + 1, len(self.federation.y)))
        try:
            return self.trial.loss_is_mean(*_some(self.federation, self.trial.task, labels))
        except Exception:  # such as a loss that knows single precision only
            own = self.own_trial
            return _or_false(lambda: own.loss_is_mean(*_some(self.federation, self.task, labels)))

    @cached_property
    def rows_apart(self) -> bool:
        """Whether, in evaluation, what the model says of an example does not depend on the others."""
        return self.trial.rows_apart()

    @cached_property
    def cuts_batches(self) -> bool:
        """Whether a training batch that is computed in parts gives the same as in one pass."""
        return self.loss_is_mean and self.trial.cuts_batches()

    @cached_property
    def cannot_group(self) -> str:
        """Why clients cannot be trained side by side; empty if they can. Tried when asked: vmap loads for seconds."""
        if self.draws_globally:
            return "the model draws from a global generator"
        if not self.loss_is_mean:
            return (
                "the loss of a batch is not the mean of its examples' losses, so that partial batches cannot be padded"
            )
        # in double precision nothing is hidden by rounding; but other kernels may be used then
        return self.trial.cannot_group() or (self.trial.task is not self.task and self.own_trial.cannot_group()) or ""

    @cached_property
    def cannot_replay(self) -> str:
        """Why training steps cannot be recorded and replayed; empty if they can."""
        if self.bytes > LARGE_MODEL:
            return f"the model has more than {LARGE_MODEL // 1_000_000} MB"
        return self.own_trial.recorded()[1]

    def kernels(self) -> int | None:
        """How many kernels a replayed step of plain SGD on one client launches; None if it cannot be replayed."""
        return self.own_trial.recorded()[0]

    def group(self, cohort: int) -> int:
        """The group size that `auto` means: a rule on the model's size and the cohort, never on timings."""
        group = LANES if self.bytes <= SMALL_MODEL and cohort >= 2 * LANES else 1
        return group if group == 1 or not self.cannot_group else 1

    def setup(self, group: int, device: str = "cpu", replay: bool = True, **settings: Any) -> Setup:
        return Setup(
            device=device,
            replay=replay and device == "cpu" and self.bytes <= LARGE_MODEL,
            group=group if group == 1 or not self.cannot_group else 1,
            masked=self.masked,
            drops_evaluating=self.drops_evaluating,
            normalises_features=self.normalises_features,
            loss_is_mean=self.loss_is_mean,
            cuts_batches=self.cuts_batches,
            rows_apart=self.rows_apart,
            **settings,
        )


def probe(federation: Federation, task: Task) -> Probe:
    """Run the model on two examples; whatever does not fit is reported here, before anything is trained."""
    _check_memory(task)
    x, y = _prepared(federation, task, torch.arange(min(2, len(federation.y))).repeat(2)[:2])
    task.module.train()
    initial = task.initial()
    mode = Masked(torch.zeros(2, dtype=torch.int64))
    with torch.enable_grad(), generators.lent(), task.python_state.fresh():
        before = generators.positions()
        try:
            held = clone({**task.transient, **initial})
            for name in task.trainable:
                held[name].requires_grad_()
            with task.places.holding(held), mode:
                output = task.module(x.clone())
        except FedloomError:
            raise
        except Exception as error:
            raise InputError(
                f"The model does not take the data: an example has the shape {tuple(x.shape[1:])} and is of {x.dtype}, "
                f"and the model says {type(error).__name__}: {error}"
            ) from error
        if set(task.module.state_dict()) - set(task.places.persistent):
            raise InputError(
                "The model makes parameters or saved buffers when it is first used, and what is exchanged must be "
                "known before training. Make them where it is built, or use it once on an example there."
            )
        draws = before != generators.positions()
        _check_output(federation, task, output, y)
        refuses_one = 1 in mode.norms and _refuses_one(task, initial, x[:1])
        evaluating = Masked(torch.zeros(2, dtype=torch.int64))
        try:
            with torch.no_grad(), task.places.holding(clone({**task.transient, **initial})), evaluating:
                task.module.eval()(x.clone())
        except Exception as error:
            raise InputError(
                f"The model fails in evaluation mode, where gradients are off: {type(error).__name__}: {error}"
            ) from error
    masked = mode.dropouts > 0 or bool(mode.norms)
    size = sum(leaf.numel() * leaf.element_size() for leaf in initial.values())
    return Probe(masked, refuses_one, draws, evaluating.dropouts > 0, size, task, federation)


def _check_memory(task: Task) -> None:
    """Evaluation and training compute on copies: what is a part of a parameter by another name would not follow."""
    exchanged = {name: leaf for name, leaf in task.places.own.items() if name not in task.transient and leaf.numel()}
    held = {leaf.untyped_storage().data_ptr(): name for name, leaf in exchanged.items()}
    others = [*task.python_state.tensors(), *((n, task.places.buffers[n]) for n in task.transient)]
    for name, leaf in others:
        owner = held.get(leaf.untyped_storage().data_ptr()) if leaf.layout == torch.strided and leaf.numel() else None
        if owner is not None:
            raise InputError(
                f"The model keeps a part of '{owner}' also as '{name}', in the same memory. Every client computes on "
                f"copies, so that '{name}' would not follow: take it from '{owner}' inside forward."
            )


def _refuses_one(task: Task, weights: Tree, x: Tensor) -> bool:
    """Whether a lone example is refused, as torch's batch normalisation does."""
    try:
        held = clone({**task.transient, **weights})
        with torch.no_grad(), task.places.holding(held), Masked(torch.zeros(2, dtype=torch.int64)):
            task.module(x)
    except ValueError:
        return True
    return False


def _prepared(federation: Federation, task: Task, rows: Tensor) -> tuple[Tensor, Tensor]:
    return evaluation.prepare(federation.x[rows], federation.y[rows], federation.scale, task)


def _some(federation: Federation, task: Task, count: int) -> tuple[Tensor, Tensor]:
    """Some examples that differ: one with each label as far as they go, others drawn by a key."""
    labels = federation.y[:200_000].reshape(min(len(federation.y), 200_000), -1)
    _, first = np.unique(labels.numpy(), return_index=True)
    telling = torch.from_numpy(np.unique(first // labels.shape[1]))
    # every other one is drawn, so that many labels do not leave only the first of each
    order = torch.from_numpy(keys.permutation(keys.key(0, "labels"), len(telling)))
    drawn = torch.from_numpy(keys.hashes(keys.key(0, "examples"), count) * len(federation.y) >> 32)
    labelled = telling[order][: count if count > ROWS else count // 2]
    return _prepared(federation, task, torch.cat([labelled, drawn])[: max(count, len(labelled))])


@dataclass(frozen=True)
class _Trial:
    """One model on a few examples, computed in several ways."""

    task: Task
    masked: bool
    normalises_features: bool
    drops_evaluating: bool
    x: Tensor
    y: Tensor

    @property
    def key(self) -> Tensor:
        return torch.zeros(2, dtype=torch.int64)

    @property
    def close(self) -> float:
        return 1e-9 if self.task.dtype == "float64" else 1e-4

    def same(self, one: Any, other: Any) -> bool:
        leaves = zip(tree_leaves(one), tree_leaves(other), strict=True)
        return all(
            torch.equal(a, b) or torch.allclose(a, b, rtol=self.close, atol=self.close, equal_nan=True)
            if isinstance(a, Tensor)
            else a == b
            for a, b in leaves
        )

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """Real examples, and drawn ones where that is possible: real ones may be equal or empty, and show nothing."""
        drawn = keys.generator(0).normal(size=tuple(self.x.shape))
        made = [(torch.from_numpy(drawn).to(self.x.dtype), self.y)] if self.x.is_floating_point() else []
        return [(self.x, self.y), *made]

    def outputs(self, x: Tensor) -> Any:
        with torch.no_grad(), generators.lent(), self.task.python_state.fresh():
            generators.seed(0)
            # a model may change what it is given, and give back a part of itself
            given = evaluation.outputs(self.task, self.task.initial(), x.clone(), self.drops_evaluating)
            return tree_map_only(Tensor, Tensor.clone, given)

    def loss_is_mean(self, x: Tensor, y: Tensor) -> bool:
        """Whether batches of several sizes have the mean of their examples' losses, in value and gradient."""
        noise = keys.generator(1)
        some = tree_map_only(Tensor, itemgetter(torch.arange(len(y)) % ROWS), self.outputs(x[:ROWS]))
        said = tree_map_only(Tensor, lambda leaf: _shaken(leaf, noise), some)  # enough for a loss, and quickly made
        sizes = {len(y): len(y), 64: len(y), 7: 7 * ROWS, 3: 3 * ROWS, 2: 2 * ROWS}  # of a batch, and of all tried
        for size, count in sizes.items():
            rows = torch.from_numpy(keys.permutation(keys.key(size, "loss"), len(y)))[:count]
            if not all(self.is_mean(said, y, part) for part in torch.split(rows, size)):
                return False
        return True

    def is_mean(self, said: Any, y: Tensor, rows: Tensor) -> bool:
        """Whether some rows as a batch have the mean of their own losses, and one of them the loss it has alone."""
        given = tree_map_only(Tensor, _traced, tree_map_only(Tensor, itemgetter(rows), said))
        leaves = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor) and leaf.requires_grad]
        with torch.enable_grad(), generators.lent(), self.task.python_state.fresh():
            whole, each = self.task.batch_loss(given, y[rows]), self.task.losses(given, y[rows])
            both = [
                torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
                for loss in (whole, each.mean())
            ]
            alone = self.task.losses(tree_map_only(Tensor, itemgetter(slice(0, 1)), given), y[rows][:1])
        same = self.same((whole, both[0], each[:1]), (each.mean(), both[1], alone))
        return same and bool(torch.isfinite(whole))

    def rows_apart(self) -> bool:
        try:
            for x, _ in self.batches():
                many = self.outputs(x[torch.arange(MANY_ROWS) % ROWS])
                if not self.same(tree_map_only(Tensor, itemgetter(slice(0, 1)), many), self.outputs(x[:1])):
                    return False
                whole = self.outputs(x)
                if any(isinstance(leaf, Tensor) and len(leaf) != len(x) for leaf in tree_leaves(whole)):
                    return False
                for own in (slice(0, 3), slice(3, ROWS), slice(5, 6)):
                    if not self.same(tree_map_only(Tensor, itemgetter(own), whole), self.outputs(x[own])):
                        return False
            return True
        except Exception:
            return False

    def tensors(self) -> Tensors:
        """The initial weights, for a step of plain gradient descent."""
        weights = clone({**self.task.transient, **self.task.initial()})
        named = self.task.places.parameters
        parameters = {name: weights[name].requires_grad_(leaf.requires_grad) for name, leaf in named.items()}
        buffers = {name: weights[name] for name in self.task.places.buffers}
        return Tensors(parameters, buffers, {}, {}, {}, {}, torch.zeros((), dtype=torch.float64))

    def stepped(self, parts: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """Parameters and buffers after one step on a batch in these parts."""
        at = self.tensors()
        self.task.module.train()

        def all_parts() -> list[tuple[Tensor, Tensor, Tensor]]:
            return [(x.clone(), y.clone(), self.key + number) for number, (x, y) in enumerate(parts)]

        with torch.no_grad(), generators.lent(), self.task.python_state.fresh():
            generators.seed(0)
            client_step(self.task, Training(lr=1.0), None, at, all_parts, sum(len(y) for _, y in parts))
        return at.changing()

    def cuts_batches(self) -> bool:
        try:
            return all(
                self.same(self.stepped([(x, y)]), self.stepped([(x[:5], y[:5]), (x[5:], y[5:])]))
                for x, y in self.batches()
            )
        except Exception:
            return False

    def cannot_group(self) -> str:
        """Why clients cannot be side by side: two of them are tried, one with a partial batch."""
        task = self.task
        if has_hooks(task.places.parameters.values()):
            return "the model has hooks on its parameters"
        if shared := task.places.sharing():
            return f"{' and '.join(shared[:2])} have memory in common"
        if _unused := self.unused():
            return f"not every batch uses {', '.join(_unused)}"
        try:
            with warnings.catch_warnings(record=True) as said, torch.no_grad(), task.python_state.fresh():
                warnings.simplefilter("always")
                self.side_by_side()
                if task.python_state.changed():
                    return "the model or the loss keeps something in Python from one call to the next"
        except TrainingError:
            return "side by side, clients would not be trained as they are alone"
        except Exception as error:
            return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
        slow = [str(warning.message) for warning in said if "performance drop" in str(warning.message)]
        return f"vmap would only loop over them: {slow[0].splitlines()[0]}" if slow else ""

    def unused(self) -> list[str]:
        """Parameters that have no gradient on a batch."""
        at = self.tensors()
        leaves = {name: at.parameters[name] for name in self.task.trainable}
        self.task.module.train()
        try:
            held = {**at.parameters, **at.buffers}
            with generators.lent(), self.task.python_state.fresh(), self.task.places.holding(held), torch.enable_grad():
                found = gradient_of(
                    self.task.module, self.task, lambda: [(self.x.clone(), self.y, self.key)], ROWS, leaves
                )[1]
            return [name for name, gradient in found.items() if gradient is None]
        except Exception:
            return []  # the trial will say what is wrong

    def side_by_side(self) -> None:
        least = 2 if self.normalises_features else 1
        self.pair_of_lanes(ROWS, (least, 5))
        self.pair_of_lanes(MANY_ROWS, (least,))  # whatever depends on the number of rows shows here

    def pair_of_lanes(self, size: int, counts: Sequence[int]) -> None:
        """Two clients, one with whole batches and one with partial ones of these sizes: each as if it were alone."""
        many = torch.arange(size) % ROWS
        start = {name: torch.stack([leaf] * 2) for name, leaf in self.task.initial().items()}
        inputs = {"batch": {"x": torch.stack([self.x[many]] * 2), "y": torch.stack([self.y[many]] * 2)}}
        setup = Setup(group=2, masked=self.masked)
        lanes = Lanes(self.task, Training(lr=0.1), None, setup, layout({"model": start}), (), (), layout(inputs))
        shaken = keys.generator(2)
        for name, leaf in lanes.weights.items():
            leaf.copy_(start[name])
            if name in self.task.trainable:
                leaf.copy_(_shaken(leaf, shaken, 0.1))
        for name, leaf in self.task.transient.items():
            lanes.at.buffers[name].copy_(leaf)
        self.task.module.train()
        for x, y in self.batches():
            order = torch.from_numpy(keys.permutation(0, size)) % ROWS
            for partial in counts:
                for lane, (count, rows) in enumerate(((size, many), (partial, order))):
                    padded = torch.cat([rows[:count], rows[:1].expand(size - count)])
                    lanes.x[lane], lanes.y[lane] = x[padded], y[padded]
                    lanes.counts[lane] = count
                    lanes.keys[lane] = lane + 1
                lanes.compare(range(2), self.close)
                lanes.step_all(lanes.at, lanes.x, lanes.y, lanes.counts, lanes.keys)

    def recorded(self) -> tuple[int | None, str]:
        desk = Desk(self.task, Training(batch_size=ROWS), None, (), ())
        self.task.module.train()
        key = [self.key] if self.masked else []
        weights = {**self.task.transient, **self.task.initial()}
        with torch.no_grad():
            for name, leaf in (*self.task.places.parameters.items(), *self.task.places.buffers.items()):
                leaf.copy_(weights[name])
            others = [self.x.roll(1, 0), self.y.roll(1, 0), *(word + 1 for word in key)]
            tape, _ = desk.tape_for([self.x, self.y, *key], lambda: others)
        return (None, desk.cannot_record) if tape is None else (len(tape), "")


def _traced(leaf: Tensor) -> Tensor:
    """An output that a loss can be differentiated by."""
    made = leaf.detach().clone()
    return made.requires_grad_() if made.is_floating_point() or made.is_complex() else made


def _or_false(attempt: Callable[[], bool]) -> bool:
    try:
        return attempt()
    except Exception:
        return False


def _shaken(leaf: Tensor, noise: np.random.Generator, scale: float = 1.0) -> Tensor:
    """A floating tensor with noise added, so that different ones are different."""
    if not leaf.is_floating_point():
        return leaf.detach()
    return leaf.detach() + torch.from_numpy(noise.normal(size=tuple(leaf.shape))).to(leaf.dtype) * scale


def _check_output(federation: Federation, task: Task, output: Any, y: Tensor) -> None:
    classes = len(federation.classes)
    if isinstance(task.loss, str) and not isinstance(output, Tensor):
        raise InputError(
            f'The model gives a {type(output).__name__}, and loss = "{task.loss}" takes a tensor with one output per '
            "example. Give the task a loss function of your own that takes what the model gives."
        )
    if isinstance(task.loss, str) and (output.dim() == 0 or output.shape[0] != len(y)):
        raise InputError(f"The model must give one output per example. For 2 examples it gave {tuple(output.shape)}.")
    if task.loss == "cross_entropy":
        if not classes:
            raise InputError('The labels are numbers, not classes: use loss = "mse" instead of "cross_entropy".')
        if output.dim() < 2 or output.shape[-1] < classes:
            raise InputError(
                f"The model gives {output.shape[-1] if output.dim() > 1 else 1} outputs per example, but the labels "
                f"have {classes} classes. Its last layer needs {classes} outputs."
            )
    if task.loss == "bce" and classes > 2:
        raise InputError(f'loss = "bce" is for two classes, but the labels have {classes}. Use "cross_entropy".')
    if task.loss in ("bce", "mse", "mae") and output.numel() != y.numel():
        raise InputError(
            f'With loss = "{task.loss}" the model must give one number per label. For labels of shape '
            f"{tuple(y.shape)} it gave {tuple(output.shape)}."
        )
    for metric in task.measures:
        if metric.name == "auroc" and classes != 2:
            raise InputError(f"The metric auroc is for two classes, but the labels have {classes}.")
    shape = tree_map_only(Tensor, lambda leaf: tuple(leaf.shape), output)
    traced = tree_map_only(Tensor, _traced, output)
    try:
        with torch.enable_grad():
            loss = task.batch_loss(traced, y)
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"The loss does not take the model's output of shape {shape} with labels of shape {tuple(y.shape)}: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not loss.requires_grad:
        raise InputError("The loss does not depend on what the model gives, so that nothing can be learnt from it.")
    for metric in task.measures:
        try:
            found = len(y)
            if metric.values is not None:
                found = len(metric.values(output, y))
            elif metric.scores is not None:
                found = len(metric.scores(output))
        except Exception as error:
            raise InputError(
                f"The metric {metric.name} does not fit the model's output of shape {shape}: {error}"
            ) from error
        if found != len(y):
            raise InputError(f"The metric {metric.name} must give one number per example. For 2 it gave {found}.")
