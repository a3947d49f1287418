"""What a model needs, found by trying it on two examples before the first round."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from fedloom import evaluation, keys, lanes, local
from fedloom.clients import Setup
from fedloom.course import Training
from fedloom.data.federation import Federation
from fedloom.desk import Desk
from fedloom.errors import FedloomError, InputError
from fedloom.masking import Masked
from fedloom.task import Task
from fedloom.tree import clone

SMALL_MODEL = 256 * 1024  # bytes: above this, stacked weights leave the cache and vmapped steps gain nothing
LARGE_MODEL = 64_000_000  # bytes: above this, recording takes much memory and gains little
EAGER_GROUP = 10  # fewer lanes do not pay for vmap's own cost
COMPILED_GROUP = 5


@dataclass(frozen=True, eq=False)
class Probe:
    """Facts about a model and its data that decide how clients are computed."""

    masked: bool
    normalises_features: bool
    draws_globally: bool
    bytes: int
    task: Task
    examples: tuple[Tensor, Tensor]

    @cached_property
    def cannot_group(self) -> str:
        """Why clients cannot be trained side by side; empty if they can. Tried when asked: vmap loads for seconds."""
        if self.draws_globally:
            return "the model draws from torch's global generator"
        if not _ignores_padding(self.task, *self.examples):
            return "an example's output depends on the others in its batch, so that partial batches cannot be padded"
        return _vmap_error(self.task, *self.examples, self.masked)

    def group(self, cohort: int, compiled: bool = False) -> int:
        """The group size that `auto` means: a rule on the model's size and the cohort, never on timings."""
        if compiled:
            group = min(COMPILED_GROUP, cohort)
        else:
            group = EAGER_GROUP if self.bytes <= SMALL_MODEL and cohort >= 2 * EAGER_GROUP else 1
        return group if group == 1 or not self.cannot_group else 1

    def kernels(self) -> int | None:
        """How many kernels a replayed step of plain SGD on one client launches; None if it cannot be replayed."""
        x, y = self.examples
        desk = Desk(self.task, Training(batch_size=len(x)), None, (), ())
        key = [torch.zeros(2, dtype=torch.int64)] if self.masked else []
        local.load(self.task.module.train(), self.task.initial())
        with torch.no_grad():
            tape, _ = desk.tape_for(x, y, *key)
        return None if tape is None else len(tape)

    def setup(self, group: int, device: str = "cpu", **settings: Any) -> Setup:
        return Setup(
            device=device,
            replay=device == "cpu" and not self.draws_globally and self.bytes <= LARGE_MODEL,
            group=group if group == 1 or not self.cannot_group else 1,
            draws_globally=self.draws_globally,
            masked=self.masked,
            normalises_features=self.normalises_features,
            **settings,
        )


def probe(federation: Federation, task: Task) -> Probe:
    """Run the model on two examples; whatever does not fit is reported here, before anything is trained."""
    x, y = _two(federation, task)
    module = task.module.train()
    local.load(module, task.initial())
    mode = Masked(torch.zeros(2, dtype=torch.int64))
    before = torch.random.get_rng_state()
    try:
        with torch.no_grad(), mode:
            output = module(x)
    except FedloomError:
        raise
    except Exception as error:
        raise InputError(
            f"The model does not take the data: an example has the shape {tuple(x.shape[1:])}, and the model says "
            f"{type(error).__name__}: {error}"
        ) from error
    draws_globally = not torch.equal(before, torch.random.get_rng_state())
    torch.random.set_rng_state(before)
    _check_output(federation, task, output, y)
    masked = mode.dropouts > 0 or bool(mode.norms)
    size = sum(leaf.numel() * leaf.element_size() for leaf in task.initial().values())
    return Probe(masked, 1 in mode.norms, draws_globally, size, task, (x, y))


def _two(federation: Federation, task: Task) -> tuple[Tensor, Tensor]:
    """Two examples, as the model takes them."""
    rows = torch.arange(min(2, len(federation.y))).repeat(2)[:2]
    return evaluation.prepare(federation.x[rows], federation.y[rows], federation.scale, task)


def _check_output(federation: Federation, task: Task, output: Any, y: Tensor) -> None:
    if not isinstance(output, Tensor) or output.dim() == 0 or output.shape[0] != len(y):
        shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise InputError(f"The model must give one output per example. For 2 examples it gave {shape}.")
    classes = len(federation.classes)
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
    try:
        losses = task.losses(output, y)
    except Exception as error:
        raise InputError(
            f"The loss does not take the model's output of shape {tuple(output.shape)} with labels of shape "
            f"{tuple(y.shape)}: {type(error).__name__}: {error}"
        ) from error
    for metric in task.measures:
        try:
            if metric.values is not None:
                metric.values(output, y)
            elif metric.scores is not None:
                metric.scores(output)
        except Exception as error:
            raise InputError(
                f"The metric {metric.name} does not fit the model's output of shape {tuple(output.shape)}: {error}"
            ) from error
    if losses.shape != (len(y),):
        raise InputError(
            f"The loss must give one value per example, or their mean. For 2 examples it gave {tuple(losses.shape)}."
        )


@torch.no_grad()
def _ignores_padding(task: Task, x: Tensor, y: Tensor) -> bool:
    """Whether two examples give the same with a masked third one behind them, in output and buffers."""
    if x.is_floating_point():  # real examples may happen to be equal or empty, and then would show nothing
        x = torch.from_numpy(keys.generator(0).normal(size=(3, *x.shape[1:]))).to(x.dtype)
    else:
        x = torch.cat([x, x[:1]])
    found = []
    for rows, mask in ((x[:2], [1.0, 1.0]), (x, [1.0, 1.0, 0.0])):
        weights = {**clone(task.transient), **task.initial()}
        try:
            with Masked(torch.zeros(2, dtype=torch.int64), torch.tensor(mask, dtype=task.torch_dtype)):
                output = functional_call(task.module.train(), weights, (rows,))
        except Exception:
            return False  # such as batch normalisation over rows that are not examples
        buffers = [leaf for name, leaf in weights.items() if name not in task.trainable and leaf.is_floating_point()]
        found.append([output[:2], *buffers])
    close = (torch.allclose(one, other, rtol=1e-4, atol=1e-5) for one, other in zip(*found, strict=True))
    return all(close)


def _vmap_error(task: Task, x: Tensor, y: Tensor, masked: bool) -> str:
    """Why a step cannot be vmapped over clients, or an empty string."""
    weights = {name: torch.stack([leaf, leaf]) for name, leaf in task.initial().items()}
    parameters = {name: weights[name] for name in task.trainable}
    others = {name: leaf for name, leaf in weights.items() if name not in parameters}
    two = torch.zeros((2, 2), dtype=torch.int64)
    step = lanes.lane_step(task, None, None, masked)
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            step(
                parameters,
                others,
                torch.stack([x, x]),
                torch.stack([y, y]),
                two.to(task.torch_dtype) + 1,
                two,
                {},
                {},
                {},
            )
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
    slow = [str(warning.message) for warning in said if "performance drop" in str(warning.message)]
    return f"vmap would only loop over them: {slow[0].splitlines()[0]}" if slow else ""
