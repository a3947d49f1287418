"""Facts about a model and its data, found before the first round by running it on a few examples.

Every faster way to compute (a batch in parts, several clients in one pass, side by side, replayed steps) is used only
for models and losses for which it gives what plain torch gives. These facts decide which ways are used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fedloom import keys
from fedloom.data import class_names
from fedloom.data.class_names import are_dates
from fedloom.data.federation import Federation
from fedloom.errors import FedloomError, InputError
from fedloom.metrics import METRICS, NUMBER_LOSSES, Metric, class_number, of_numbers, top, whole_output
from fedloom.score_metrics import confidences, decisions, has_labels, ranking
from fedloom.task import Task
from fedloom.training import generators
from fedloom.training.clients import Setup
from fedloom.training.evaluation import NO_KEY
from fedloom.training.masking import Masked
from fedloom.training.model_cautions import model_cautions, without_gradient
from fedloom.training.trials import ROWS, Trial, differentiable, prepared, some_examples
from fedloom.tree import Tree, clone, same_bits, size
from fedloom.user_code import is_code, said

LARGE_MODEL = 64_000_000  # bytes: recording the steps of a larger model takes a lot of memory and gains little
REGRESSION = 'For a regression, set task = "regression" in [data], or in Python give floating-point labels.'
_KEEPS = (
    "keeps something outside of itself, such as a global variable or a generator of its own. So {numbers} depend on "
    "the order in which clients compute, and on the number of workers. Keep it in the model, and draw from the global "
    "generators of torch, numpy or Python, which are seeded."
)
OUTSIDE = {  # what gives other numbers when it is computed again → the caution
    "training": "The same training step gives other numbers when it is computed again: the model or the loss "
    + _KEEPS.format(numbers="results"),
    "evaluation": "The same examples are measured differently when the model is evaluated again: training is the same, "
    "but in evaluation mode, the model " + _KEEPS.format(numbers="measured numbers"),
}
MIXES = (
    "In evaluation, what the model gives for an example depends on the other examples of its batch, so that numbers "
    "depend on which examples are evaluated together. A mean or a softmax over dimension 0 does that: take it over the "
    "features of each example (dim=1 or -1)."
)
LABELS = 4096  # the most examples to try a loss on: one of every label


@dataclass(frozen=True, eq=False)
class Probe:
    """Facts about a model and its data that decide how clients are computed."""

    task: Task
    federation: Federation
    layers: Setup  # what its dropout and batch normalisation need
    draws_globally: bool
    bytes: int
    caution: str = ""  # what a reader should know about this model with this loss

    @cached_property
    def trial(self) -> Trial:
        """A trial in double precision, where rounding hides no differences, if the model runs in it."""
        if self.bytes <= LARGE_MODEL and self.task.dtype != "float64":
            with suppress(Exception):  # such as those of a model that makes single-precision numbers itself
                trial = self._trial(replace(self.task, dtype="float64"))
                trial.outputs(trial.x)
                return trial
        return self.own_trial

    @cached_property
    def own_trial(self) -> Trial:
        """A trial in the task's own precision."""
        return self._trial(self.task)

    def _trial(self, task: Task) -> Trial:
        return Trial(task, self.layers, *some_examples(self.federation, task, ROWS))

    @cached_property
    def loss_is_mean(self) -> bool:
        """Whether the loss of a batch is the mean of its examples' losses."""
        if isinstance(self.task.loss, str):
            return True
        labels = min(LABELS, max(ROWS + 1, len(self.federation.y)))
        for trial in (self.trial, self.own_trial):  # a loss may need single precision
            with suppress(Exception):
                return trial.loss_is_mean(*some_examples(self.federation, trial.task, labels))
        return False

    @cached_property
    def rows_apart(self) -> bool:
        """Whether, in evaluation, the output for an example does not depend on the others."""
        return self.trial.rows_apart()

    @cached_property
    def cuts_batches(self) -> bool:
        """Whether computing a training batch in parts gives the same as one pass."""
        return self.loss_is_mean and self.trial.cuts_batches()

    @cached_property
    def cannot_group(self) -> str:
        """Why clients cannot be trained side by side; empty if they can. Loading vmap takes seconds."""
        if self.draws_globally:
            return "the model draws from a global generator"
        if not self.loss_is_mean:
            return (
                "the loss of a batch is not the mean of its examples' losses, so that partial batches cannot be padded"
            )
        # rounding hides nothing in double precision, but torch may use other kernels there
        return self.trial.cannot_group() or (self.trial.task is not self.task and self.own_trial.cannot_group()) or ""

    @cached_property
    def cannot_replay(self) -> str:
        """Why training steps cannot be recorded and replayed; empty if they can."""
        if self.bytes > LARGE_MODEL:
            return f"the model has more than {LARGE_MODEL // 1_000_000} MB"
        return self.own_trial.recorded()[1]

    def setup(self, group: int, device: str = "cpu", replay: bool = True, **settings: Any) -> Setup:
        return replace(
            self.layers,
            device=device,
            replay=replay and device == "cpu" and self.bytes <= LARGE_MODEL,
            group=group if group == 1 or not self.cannot_group else 1,
            loss_is_mean=self.loss_is_mean,
            cuts_batches=self.cuts_batches,
            rows_apart=self.rows_apart,
            target=self.federation.preprocessing.target,
            **settings,
        )


def probe(federation: Federation, task: Task) -> Probe:
    """Run the model on two examples. Raise if the model, the data, the loss and the metrics do not fit each other."""
    task.see(federation)
    _check_memory(task)
    x, y = prepared(federation, task, torch.arange(min(2, len(federation.y))).repeat(2)[:2])
    task.module.train()
    initial = task.initial()
    mode = Masked(NO_KEY)
    with torch.enable_grad(), generators.lent(), task.python_state.fresh():
        before = generators.positions()
        try:
            held = clone({**task.given, **initial})
            for name in task.trainable:
                held[name].requires_grad_()
            with task.tensors.replaced(held), mode:
                output = task.module(x.clone())
            _check_frozen(task, held)
        except FedloomError:
            raise
        except Exception as error:
            name = f" {task.model}" if isinstance(task.model, str) else ""
            raise InputError(
                f"The model{name} does not take the data: an example has the shape {tuple(x.shape[1:])} and is of "
                f"{x.dtype}, and the model says {said(error)}{_about_features(federation, task, x)}"
            ) from error
        if set(task.module.state_dict()) - set(task.tensors.persistent):
            raise InputError(
                "The model makes parameters or saved buffers when it is first used, and what is exchanged must be "
                "known before training. Make them where it is built, or use it once on an example there."
            )
        draws = before != generators.positions()
        _check_output(federation, task, output, y)
        _check_pairs(federation, task, output, y)
        refuses_one = 1 in mode.norms and _refuses_one(task, initial, x[:1])
        evaluating = Masked(NO_KEY)
        try:
            with torch.no_grad(), task.tensors.replaced(clone({**task.given, **initial})), evaluating:
                task.module.eval()(x.clone())
        except Exception as error:
            raise InputError(f"The model fails in evaluation mode, where gradients are off: {said(error)}") from error
    masked = mode.dropouts > 0 or bool(mode.norms)
    layers = Setup(masked=masked, drops_evaluating=evaluating.dropouts > 0, normalises_features=refuses_one)
    found = Probe(task, federation, layers, draws, size(task.whole(initial)))
    cautions = [*model_cautions(federation, task, output)]
    if found.bytes <= LARGE_MODEL and (varies := found.own_trial.varies()):
        cautions.append(OUTSIDE[varies])
    if found.bytes <= LARGE_MODEL and found.own_trial.mixes():
        cautions.append(MIXES)
    if found.bytes <= LARGE_MODEL and (idle := without_gradient(found.own_trial.unused())):
        cautions.append(idle)
    return replace(found, caution=" ".join(cautions))


def _check_frozen(task: Task, used: Tree) -> None:
    """Raise if a pass through the model changed a frozen parameter: nobody would see the change."""
    for name, leaf in task.frozen.items():
        if not same_bits(leaf, used[name]):
            raise InputError(
                f"The model changes '{name}' while it is used, and this parameter has requires_grad = False. Frozen "
                "parameters are not exchanged: register it as a buffer, or assign it where the model is built."
            )


def _check_memory(task: Task) -> None:
    """Raise if an attribute shares memory with a parameter: clients compute on copies, which it would not follow."""
    saved = {name: leaf for name, leaf in task.tensors.own.items() if name in task.form and leaf.numel()}
    held = {leaf.untyped_storage().data_ptr(): name for name, leaf in saved.items()}
    unsaved = [(name, leaf) for name, leaf in task.tensors.buffers.items() if name not in task.form]
    others = [*task.python_state.tensors(), *unsaved]
    for name, leaf in others:
        owner = held.get(leaf.untyped_storage().data_ptr()) if leaf.layout == torch.strided and leaf.numel() else None
        if owner is not None:
            raise InputError(
                f"The model keeps a part of '{owner}' also as '{name}', in the same memory. Every client computes on "
                f"copies, so that '{name}' would not follow: take it from '{owner}' inside forward."
            )


def _refuses_one(task: Task, weights: Tree, x: Tensor) -> bool:
    """Whether the model raises on a single example, as torch's batch normalisation does."""
    try:
        held = clone({**task.given, **weights})
        with torch.no_grad(), task.tensors.replaced(held), Masked(NO_KEY):
            task.module(x)
    except ValueError:
        return True
    return False


def _about_features(federation: Federation, task: Task, x: Tensor) -> str:
    """Say what to do about a number of features that is not the data's."""
    given, count = task.args.get("features"), x[0].numel()
    if given not in (None, count):
        return f". The data has {count} features, and [task] args has features = {given}: leave it out, or correct it."
    if not isinstance(task.model, str) or is_code(task.model) or x.dim() != 2:
        return ""
    if task.loss != "cross_entropy" or len(federation.classes) in (0, 2):  # mlp has two outputs by default
        return '. Set model = "mlp" in [task]: it takes any number of features.'
    advice = _about_classes(federation, task, 'model = "mlp"')
    return f". The model mlp takes any number of features.{advice}"


def _about_classes(federation: Federation, task: Task, *also: str) -> str:
    """Say how to give a model its outputs, with what is `also` to set, and what the classes may be instead."""
    names, count, doubts = federation.classes, len(federation.classes), class_names.doubts(federation)
    if are_dates(names):
        return doubts
    whose = f"If they really are {count} classes, the model's" if doubts else "The model's"
    outputs = f"args = {{ classes = {count} }}"
    setting = "\n  ".join([": set in [task]", *also, outputs]) if also else f": set {outputs} in [task]."
    return (
        f" The classes are {', '.join(names[:8])}{', …' if count > 8 else ''}.{doubts} "
        f"{whose} last layer needs {count} outputs{setting if isinstance(task.model, str) else '.'}"
    )


def _about_labels(y: Tensor) -> str:
    """Say what to do about labels that are no class numbers, one for each example."""
    if y.dim() == 2 and y.shape[1] > 1 and bool(((y == 0) | (y == 1)).all() and (y.sum(1) == 1).all()):
        return "The labels are one-hot rows: use labels.argmax(1), which are the numbers of the classes."
    if y.dim() == 2 and y.shape[1] == 1:
        return "The labels are a column: use labels[:, 0]."
    if not y.is_floating_point():
        return ""  # such as one class for each word of a text
    mse = 'use loss = "mse" instead of "cross_entropy".'
    if y.dim() == 1 and bool((y == y.round()).all() and (y >= 0).all()):
        return (
            "The labels are whole numbers, but stored as floating-point numbers, which mean a regression. For classes, "
            'convert them with labels.astype(int), or for a table set task = "classification" in [data]. For numbers '
            f"to predict, {mse}"
        )
    return f"The labels are numbers, not classes: {mse}"


def _has_all_classes(federation: Federation) -> bool:
    """Whether a table names every class of its label. In arrays, the last ones may be missing here.

    A model of pictures may be made for more kinds of them, and a table with one class has its own caution.
    """
    names = federation.classes
    named = bool(federation.preprocessing.label) or names != tuple(map(str, range(len(names))))
    return named and len(names) > 1 and federation.x.dim() == 2 and federation.x.is_floating_point()


def _check_output(federation: Federation, task: Task, output: Any, y: Tensor) -> None:
    classes = len(federation.classes)
    if output is None:
        raise InputError("The model's forward returns nothing: end it with `return` and what the last layer gives.")
    if isinstance(output, Tensor) and not (output.is_floating_point() or output.is_complex()):
        raise InputError(
            f"The model's forward returns whole numbers ({output.dtype}), such as the classes that argmax picks. The "
            "loss needs scores, as whole numbers have no gradient: return what the last layer gives, without argmax."
        )
    if isinstance(task.loss, str) and not isinstance(output, Tensor):
        raise InputError(
            f'The model returns a {type(output).__name__}, but loss = "{task.loss}" takes a tensor with one output per '
            "example. Give the task your own loss function, which takes what the model returns."
        )
    if isinstance(task.loss, str) and (output.dim() == 0 or output.shape[0] != len(y)):
        raise InputError(f"The model must give one output per example. For 2 examples it gave {tuple(output.shape)}.")
    if task.loss == "cross_entropy":
        if wrong := _about_labels(federation.y) if not classes or output.dim() == y.dim() == 2 else "":
            raise InputError(wrong)
        if output.dim() < 2 or output.shape[-1] < classes:
            few = f"The model gives {output.shape[-1] if output.dim() > 1 else 1} outputs per example, but the labels"
            first, numbered = int(federation.y.min()), federation.classes == tuple(map(str, range(classes)))
            if first and numbered:
                raise InputError(
                    f"{few} are {first} to {classes - 1}. Class numbers begin at 0: unless classes are missing here, "
                    f"subtract {first} from the labels. Then the last layer needs {classes - first} outputs."
                )
            raise InputError(f"{few} have {classes} classes.{_about_classes(federation, task)}")
        if output.shape[-1] > classes and _has_all_classes(federation):
            raise InputError(
                f"The model gives {output.shape[-1]} outputs per example, but the labels have {classes} classes: the "
                f"other outputs would take a share of the probability.{_about_classes(federation, task)}"
            )
    if classes and task.loss in NUMBER_LOSSES:
        raise InputError(
            f'loss = "{task.loss}" is for numbers, but the labels are {classes} classes. Use loss = "cross_entropy", '
            f"or {REGRESSION[0].lower()}{REGRESSION[1:]}"
        )
    one_number = isinstance(output, Tensor) and y.dim() == 1 and output.numel() == len(y)
    if classes > 2 and one_number and not isinstance(task.loss, str):
        raise InputError(
            f"The model gives one number per example, but the labels are {classes} classes, so that your loss would "
            f"compare it with the number of a class. {REGRESSION} For classes, the last layer needs {classes} outputs."
        )
    if task.loss == "bce" and not classes and bool(((federation.y < 0) | (federation.y > 1)).any()):
        raise InputError(
            'loss = "bce" is for labels of 0 and 1, and some labels are other numbers. Use "mse" for numbers.'
        )
    if task.loss == "bce" and classes > 2:
        raise InputError(f'loss = "bce" is for two classes, but the labels have {classes}. Use "cross_entropy".')
    if task.loss in ("bce", "mse", "mae") and output.numel() != y.numel():
        numbers = y[0].numel()
        advice = f" Set args = {{ classes = {numbers} }} in [task]." if isinstance(task.model, str) else ""
        raise InputError(
            f'With loss = "{task.loss}" the model must give one number per label. For labels of shape '
            f"{tuple(y.shape)} it gave {tuple(output.shape)}.{advice}"
        )
    several = isinstance(output, Tensor) and output.dim() > y.dim()
    fractions = y.dim() == 1 and y.is_floating_point() and bool((federation.y != federation.y.round()).any())
    several_labels = isinstance(output, Tensor) and has_labels(output, y)
    numbers_only = task.loss in NUMBER_LOSSES or (fractions and not isinstance(task.loss, str))
    for metric in task.measures:
        if classes and several and of_numbers(metric):
            raise InputError(
                f"The metric {metric.name} is for numbers, but the labels are {classes} classes. {REGRESSION}"
            )
        number, known = class_number(metric), classes if y.dim() == 1 else y.shape[-1]
        if number is not None and number >= known > 0:
            raise InputError(
                f"The metric {metric.name} is about class {number}, and there are classes 0 to {known - 1}"
                f"{': ' + ', '.join(federation.classes[:12]) if y.dim() == 1 else ''}."
            )
        if several_labels and (top(metric) or metric is METRICS["perplexity"]):
            raise InputError(
                f"The metric {metric.name} is for examples of one class each, and here every example has "
                f"{y.shape[-1]} labels. For several labels, there are f1, auroc, balanced_accuracy and others."
            )
        if task.loss == "bce" and several_labels and of_numbers(metric):
            raise InputError(
                f'The metric {metric.name} is for numbers, but with loss = "bce" the labels are 0 or 1 and outputs are '
                "logits. For such labels, there are f1, auroc, balanced_accuracy, calibration_error and others."
            )
        if several and top(metric) >= output.shape[-1]:
            raise InputError(
                f"The metric {metric.name} is always 100 % for a model with {output.shape[-1]} outputs. Use a smaller "
                "number."
            )
        of_classes = metric.scores in (ranking, decisions, confidences) and y.dim() == 1
        of_classes = of_classes or (numbers_only and (metric is METRICS["accuracy"] or top(metric) > 0))
        if not classes and of_classes:
            raise InputError(
                f"The metric {metric.name} is for classes, but the labels are numbers. For numbers, there are "
                "mae, mse, rmse and r2."
            )
    shape = tree_map_only(Tensor, lambda leaf: tuple(leaf.shape), output)
    traced = tree_map_only(Tensor, differentiable, output)
    try:
        with torch.enable_grad():
            loss = task.batch_loss(traced, y)
    except InputError:
        raise
    except Exception as error:
        hint = ""
        if "out of bounds" in str(error) and several and output.shape[-1] < classes:
            few = f"The model gives {output.shape[-1]} outputs per example, but the labels have {classes} classes."
            hint = f"\n{few}{_about_classes(federation, task)}"
        raise InputError(
            f"The loss does not take the model's output of shape {shape} with labels of shape {tuple(y.shape)}: "
            f"{said(error)}{hint}"
        ) from error
    if not loss.requires_grad:
        raise InputError("The loss does not depend on what the model gives, so that nothing can be learnt from it.")
    for metric in task.measures:
        if metric.scores is whole_output and not isinstance(output, Tensor):
            raise InputError(
                f"The metric {metric.name} is called with one array of outputs, and the model returns a "
                f"{type(output).__name__}. Say which part of it is meant, in a metric with another name: "
                f'`Metric("name", scores=lambda output, labels: output[0], summary={metric.name})` '
                "(from fedloom.metrics import Metric)."
            )
        try:
            found = len(y)
            if metric.values is not None:
                found = len(metric.values(output, y))
            elif metric.scores is not None:
                found = len(metric.scores(output, y))
        except Exception as error:
            raise InputError(
                f"The metric {metric.name} does not fit the model's output of shape {shape}; the task may have other "
                f"metrics, or [] for its loss alone: {said(error)}"
            ) from error
        if found != len(y):
            raise InputError(f"The metric {metric.name} must give one number per example. For 2 it gave {found}.")


def _check_pairs(federation: Federation, task: Task, output: Any, y: Tensor) -> None:
    """Raise if your loss or metric takes every output with every label, because their shapes broadcast.

    The difference of outputs of shape (n, 1) and labels of shape (n,) has the shape (n, n), and torch computes its mean
    without a word. Such a loss does not change if the labels are exchanged among the examples.
    """
    if not isinstance(output, Tensor) or output.shape == y.shape or output.numel() != y.numel():
        return
    labels = some_examples(federation, task, ROWS)[1]
    shape, noise = (len(labels), *output.shape[1:]), keys.generator(3)
    # with labels as outputs, it matters most which belong together, but a loss may take only probabilities
    drawn = (torch.from_numpy(draw(size=shape)) for draw in (noise.uniform, noise.normal))
    tried = [some.to(output.dtype) for some in (labels.reshape(shape), *drawn)]
    values: dict[str, Callable[[Tensor, Tensor], float]]
    values = {f"metric {metric.name}": partial(_metric_value, metric) for metric in task.measures}
    if not isinstance(task.loss, str):
        values["loss"] = lambda outputs, labels: float(task.batch_loss(outputs, labels))
    for what, value in values.items():
        if _takes_all_pairs(value, tried, labels):
            raise InputError(
                f"The {what} takes every output with every label: for {len(y)} examples, the outputs have the shape "
                f"{tuple(output.shape)} and the labels {tuple(y.shape)}, which broadcast to all pairs. Begin it with "
                "`output = output.reshape(target.shape)`, or let the model return outputs of the labels' shape."
            )


def _metric_value(metric: Metric, outputs: Tensor, labels: Tensor) -> float:
    if metric.values is not None:
        return float(metric.values(outputs, labels).double().mean())
    if metric.scores is None or metric.summary is None:
        return math.nan  # nothing is measured
    return metric.summary(metric.scores(outputs, labels).numpy(), labels.numpy())


def _takes_all_pairs(value: Callable[[Tensor, Tensor], float], tried: Sequence[Tensor], labels: Tensor) -> bool:
    """Whether a value never depends on which output belongs to which label, but does if both have the same shape."""

    def depends(outputs: Tensor, labels: Tensor) -> bool | None:
        with suppress(Exception):
            one, other = value(outputs, labels), value(outputs, labels.roll(1, 0))
            if math.isfinite(one) and math.isfinite(other):
                return abs(one - other) > 1e-4 * max(abs(one), abs(other))
        return None

    found = {depends(outputs, labels) for outputs in tried}
    if True in found or False not in found:
        return False
    same_shape = [(outputs.reshape(labels.shape), labels) for outputs in tried]
    same_shape += [(outputs, labels.reshape(outputs.shape)) for outputs in tried]
    return any(depends(*both) for both in same_shape)
