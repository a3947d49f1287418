"""What is learnt: a model, a loss and metrics. A task holds no weights but frozen ones; the others travel as trees."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedloom import keys, metrics
from fedloom.data.federation import Federation
from fedloom.errors import FRESH, InputError, about_path
from fedloom.metrics import Metric
from fedloom.training import generators
from fedloom.training.generators import GENERATOR
from fedloom.training.hidden_layers import about_hidden_layers
from fedloom.training.keras_module import KerasModule, is_keras
from fedloom.training.modules import ModuleTensors
from fedloom.training.python_state import PythonState
from fedloom.tree import Groups, Tree, same_bits, select, sha256
from fedloom.user_code import NO_SUPER, said

# _NormBase is the base of all batch and instance normalisation
NORMALIZATION = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True, eq=False)
class Task:
    """A model, a loss and metrics.

    `model` is a module class (built with `args`), a function that returns a module, a module (whose weights are then
    the initial ones), or the name of a shipped model. `loss` is a name or a function of outputs and labels.

    >>> task = Task(nn.Linear, args={"in_features": 4, "out_features": 2})
    >>> {name: tuple(leaf.shape) for name, leaf in task.initial().items()}
    {'weight': (2, 4), 'bias': (2,)}
    """

    model: str | type[nn.Module] | nn.Module | Callable[..., nn.Module]
    loss: str | Callable[[Tensor, Tensor], Tensor] = "cross_entropy"
    metrics: Sequence[str | Metric | Callable[..., float]] | None = None  # default: accuracy; for numbers, mae
    args: Mapping[str, Any] = field(default_factory=dict)
    init: str = "torch"  # torch | glorot | a safetensors file
    dtype: str = "float32"
    seed: int = 0
    # gives lazy layers their sizes
    example: Tensor | NDArray[Any] | Callable[[], Tensor] | None = field(default=None, repr=False)
    measures: tuple[Metric, ...] = field(init=False, repr=False)  # the metrics, resolved

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise InputError(f"The 'dtype' of a task must be {' or '.join(DTYPES)}. Got {self.dtype!r} instead.")
        keys.check_seed(self.seed, "The 'seed' of a task")
        if isinstance(self.loss, str):
            metrics.loss(self.loss)
        elif isinstance(self.loss, type):
            made = f"{self.loss.__name__}()"
            raise InputError(
                f"The loss is a class. Write {made}, with brackets; for an experiment file, write `loss = {made}` in a "
                'file of yours, and name it as "file.py:loss".'
            )
        elif not callable(self.loss):
            raise InputError(
                f"The 'loss' of a task must be a name, such as \"mse\", or a function of outputs and labels. Got "
                f"{self.loss!r} instead."
            )
        if isinstance(self.metrics, str):
            raise InputError(f"The 'metrics' of a task must be a list, such as [\"{self.metrics}\"].")
        if not isinstance(self.metrics, (list, tuple, type(None))):
            raise InputError(
                f"The 'metrics' of a task must be a list, such as [\"mae\"]. Got {self.metrics!r} instead."
            )
        if not isinstance(self.args, Mapping):
            raise InputError(
                f"The 'args' of a task must be a dict, such as {{\"classes\": 3}}. Got {self.args!r} instead."
            )
        if not isinstance(self.init, (str, Path)):
            raise InputError(
                f"The 'init' of a task must be torch, glorot or a safetensors file. Got {self.init!r} instead."
            )
        if isinstance(self.loss, nn.Module) and any(leaf.requires_grad for leaf in self.loss.parameters()):
            names = ", ".join(name for name, leaf in self.loss.named_parameters() if leaf.requires_grad)
            raise InputError(
                f"The loss has parameters ({names}), but only the model's are trained. Make them part of "
                "the model, and let the model return what the loss needs of them."
            )
        self._measure(metrics.usual(self.loss) if self.metrics is None else self.metrics)

    def _measure(self, named: Sequence[str | Metric | Callable[..., float]] | None) -> None:
        """Resolve the metrics. None are those for classes, until the task sees labels that are numbers."""
        chosen = ("accuracy",) if named is None else named
        measures = tuple(metrics.metric(one) if isinstance(one, str) else metrics.own_metric(one) for one in chosen)
        names = [measure.name for measure in measures]
        if twice := next((name for name in names if names.count(name) > 1), ""):
            raise InputError(
                f"Two metrics are called {twice}, and results have one column for each name. Leave one out, or write "
                "functions with names of their own."
            )
        object.__setattr__(self, "metrics", named)
        object.__setattr__(self, "measures", measures)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def batch_loss(self, output: Any, target: Tensor) -> Tensor:
        """Return the loss of a batch: the value of the loss function, or the mean if it returns several numbers."""
        value: Tensor = self.loss_function(output, target)
        if not isinstance(value, Tensor):
            raise InputError(f"The loss must return a tensor. It returned {type(value).__name__}.")
        return value if value.dim() == 0 else value.mean()

    def losses(self, output: Any, target: Tensor) -> Tensor:
        """Return one loss per example. Their mean is the batch's loss only if `Setup.loss_is_mean` is true."""
        return metrics.per_example(self.loss_function, output, target)

    @property
    def loss_function(self) -> Callable[[Any, Tensor], Tensor]:
        """The loss in the task's precision. While a client uses it, this is a copy (see `python_state.py`)."""
        found: Callable[[Any, Tensor], Tensor] = self.held_loss["loss"]
        return found

    @cached_property
    def held_loss(self) -> dict[str, Any]:
        """A dict that holds the loss function, so that a copy can replace it."""
        if isinstance(self.loss, str):
            return {"loss": metrics.loss(self.loss)}
        if isinstance(self.loss, nn.Module):
            return {"loss": widened(copy.deepcopy(self.loss), self.torch_dtype)}
        return {"loss": self.loss}

    @cached_property
    def module(self) -> nn.Module:
        """The module that computes. The values of its parameters have no meaning between calls."""
        return self.build()

    @cached_property
    def tensors(self) -> ModuleTensors:
        """The module's parameters and buffers."""
        return ModuleTensors(self.module)

    @cached_property
    def python_state(self) -> PythonState:
        """What the module and the loss keep in Python."""
        return PythonState(self.module, self.held_loss)

    def move(self, device: str) -> None:
        """Compute on another device from now on."""
        self.module.to(device)
        for name in ("tensors", "python_state", "given"):
            self.__dict__.pop(name, None)

    def release(self) -> None:
        """Free the module's memory but keep its names. The module is built again if you need it."""
        for name in ("trainable", "frozen", "form"):
            getattr(self, name)
        for name in ("module", "tensors", "python_state", "given"):
            self.__dict__.pop(name, None)

    @cached_property
    def trainable(self) -> tuple[str, ...]:
        """The names of parameters that are trained. All other leaves are buffers and frozen parameters."""
        return tuple(name for name, parameter in self.module.named_parameters() if parameter.requires_grad)

    @cached_property
    def frozen(self) -> Tree:
        """The parameters that are not trained. Every process holds them, so that they are neither sent nor averaged."""
        names = _frozen(self.module)
        return select(self._weights(self.build()), names) if names else {}

    @cached_property
    def frozen_sha256(self) -> str:
        """The fingerprint of the frozen parameters; empty if there are none."""
        return sha256(self.frozen) if self.frozen else ""

    @cached_property
    def form(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """The shape and dtype of every leaf of the model."""
        return {name: (tuple(leaf.shape), leaf.dtype) for name, leaf in _named(self.module).items()}

    @property
    def learnt(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """The shape and dtype of every parameter that is trained."""
        return {name: self.form[name] for name in self.trainable}

    @cached_property
    def given(self) -> Tree:
        """What every client starts with and nobody sends: frozen parameters, and buffers that are not saved."""
        named = dict(self.build().named_buffers())
        kept = self.module.state_dict().keys()
        unsaved = {name: buffer for name, buffer in named.items() if name not in kept}
        device = next(self.module.parameters()).device
        return {name: leaf.to(device) for name, leaf in {**self.frozen, **unsaved}.items()}

    @cached_property
    def normalization(self) -> tuple[str, ...]:
        """The names of leaves in normalisation layers, which are found by their type, at any depth."""
        inside = [path for path, part in self.module.named_modules() if isinstance(part, NORMALIZATION)]
        return tuple(name for name in leaves(self.module) if name.rpartition(".")[0] in inside)

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.module.parameters())

    def initial(self) -> Tree:
        """Return the initial weights without frozen ones. The same seed always gives the same weights."""
        module = self.build()
        weights, frozen = self._weights(module), _frozen(module)
        return {name: leaf for name, leaf in weights.items() if name not in frozen}

    def whole(self, model: Tree) -> Tree:
        """Return a model with its frozen parameters, in the order of the module's leaves."""
        every = {**self.frozen, **model}
        return {name: every[name] for name in self.form if name in every} | every if self.frozen else model

    def without_frozen(self, groups: Groups) -> Groups:
        """Return groups without frozen parameters, which earlier versions of fedloom stored in every checkpoint."""
        if not self.frozen:
            return groups
        for group, leaves in groups.items():
            for name in leaves.keys() & self.frozen.keys():
                if not same_bits(leaves[name], self.frozen[name]):
                    raise InputError(
                        f"An earlier version of fedloom stored other values of the frozen parameter '{name}' in "
                        f"'{group}', and now all models of a run have the same. Use {FRESH} to start over."
                    )
        kept = self.frozen.keys()
        return {group: {n: leaf for n, leaf in leaves.items() if n not in kept} for group, leaves in groups.items()}

    def _weights(self, module: nn.Module) -> Tree:
        """Return the initial weights of a new module, with the frozen ones."""
        if self.init == "glorot":
            with GENERATOR, torch.random.fork_rng(devices=[]):
                torch.manual_seed(keys.key(self.seed, "glorot") >> 1)
                _glorot(module)
        weights = leaves(module)
        return weights if self.init in ("torch", "glorot") else _load(Path(self.init), weights)

    def build(self) -> nn.Module:
        """Return a new module with initial weights."""
        # modules draw their initial weights from global generators: lend them seeded ones
        with generators.seeded(keys.key(self.seed, "init")):
            if isinstance(self.model, nn.Module):
                module = copy.deepcopy(self.model)
            else:
                from fedloom.models import build, construct

                if isinstance(self.model, str):
                    module = build(self.model, **self.args)
                else:
                    module = construct(getattr(self.model, "__name__", str(self.model)), self.model, self.args)
                    alone = nn.Identity()
                    if sys.getrefcount(module) > sys.getrefcount(alone) and not is_keras(module):
                        module = _copied(module)
            try:
                unbuilt = [name for name, leaf in module.named_parameters() if is_lazy(leaf)]
            except AttributeError as error:
                if not re.search("'_(parameters|modules|buffers)'", str(error)):
                    raise
                raise InputError(f"The model is no complete module of torch: {error}.{NO_SUPER}") from error
            if is_keras(module) and not module.built:
                unbuilt = ["its layers"]
            if unbuilt:
                self._give_sizes(module, unbuilt)
            if is_keras(module):
                module = KerasModule(module)
        if next(module.parameters(), None) is None:
            hidden = about_hidden_layers(module)
            raise InputError(
                f"The model {type(module).__name__} has no parameters, so there is nothing to learn. {hidden}".rstrip()
            )
        if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
            raise InputError("The model is compiled by torch.jit, and cannot be trained here. Give the module itself.")
        return widened(module, self.torch_dtype)

    def _give_sizes(self, module: nn.Module, unbuilt: Sequence[str]) -> None:
        """Use a module once, so that its lazy layers take their sizes and draw their weights."""
        example = self.example() if callable(self.example) else self.example
        if example is None:
            raise InputError(
                f"The model does not know the shape of {', '.join(unbuilt)} before it is first used, and there are no "
                "examples here to use it on. Give its lazy layers their sizes, or give the task an `example`."
            )
        if isinstance(example, np.ndarray):
            example = torch.as_tensor(example, dtype=torch.float32 if example.dtype.kind == "f" else None)
        object.__setattr__(self, "example", example)
        modes = [(part, part.training) for part in module.modules()]
        try:
            with torch.no_grad():
                module.eval()(example.clone())
        except Exception as error:
            raise InputError(
                f"The model failed on the first examples, which give its lazy layers their sizes: {said(error)}"
            ) from error
        for part, training in modes:
            part.training = training

    def see(self, federation: Federation) -> None:
        """Take from the data what you did not give: an example for lazy layers, and metrics for this kind of labels."""
        if self.metrics is None:
            self._measure(("accuracy",) if federation.classes else ("mae",))
        if self.example is None and len(federation.x):
            object.__setattr__(self, "example", federation.example())

    def __getstate__(self) -> dict[str, Any]:
        # each worker process builds its own module: nothing that is derived from one travels with the task
        derived = {name for name, value in vars(Task).items() if isinstance(value, cached_property)}
        state = {name: value for name, value in self.__dict__.items() if name not in derived}
        state["frozen"] = self.frozen  # they may come from a file, or be drawn again whenever the model is built
        return {**state, "example": None} if callable(self.example) else state


def _copied(module: nn.Module) -> nn.Module:
    """Copy a module that others hold, too, as in `Task(lambda: net)`: training must not change theirs."""
    try:
        return copy.deepcopy(module)
    except Exception:  # it cannot be copied; most such modules are new, and only refer to themselves
        return module


def widened(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Convert a module to double precision if `dtype` is that; otherwise each tensor keeps its dtype."""
    if dtype != torch.float64:
        return module

    def wide(leaf: Tensor) -> Tensor:
        wider = {torch.float32: torch.float64, torch.complex64: torch.complex128}
        return leaf.to(wider.get(leaf.dtype, leaf.dtype))

    module._apply(wide)  # type: ignore[no-untyped-call]
    return module


def leaves(module: nn.Module) -> Tree:
    """Return a module's parameters and saved buffers by their state_dict names. Tied parameters appear once."""
    named = _named(module)
    return {name: leaf.detach().clone(memory_format=torch.contiguous_format) for name, leaf in named.items()}


def _named(module: nn.Module) -> Tree:
    persistent = module.state_dict().keys()
    return {**dict(module.named_parameters()), **{n: b for n, b in module.named_buffers() if n in persistent}}


def _frozen(module: nn.Module) -> set[str]:
    """Return the names of frozen parameters, but not of those that share the memory of a leaf that may change."""
    frozen = {name: leaf for name, leaf in module.named_parameters() if not leaf.requires_grad}
    others = [leaf for name, leaf in _named(module).items() if name not in frozen] if frozen else []
    changing = {leaf.untyped_storage().data_ptr() for leaf in others if leaf.numel()}
    return {name for name, leaf in frozen.items() if leaf.untyped_storage().data_ptr() not in changing}


def _glorot(module: nn.Module) -> None:
    """Initialise as Keras does: Glorot-uniform matrices and zero biases. Normalisation layers keep their values."""
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            if parameter.dim() >= 2:
                nn.init.xavier_uniform_(parameter)
            elif "bias" in name:
                nn.init.zeros_(parameter)


def _load(path: Path, expected: Tree) -> Tree:
    from safetensors.torch import load_file

    if not path.is_file():
        raise InputError(
            f"The 'init' of the task must be torch, glorot or a safetensors file. There is no file {path}."
            f"{about_path(path)}"
        )
    try:
        loaded = load_file(path)
    except Exception as error:
        raise InputError(f"The 'init' file {path} cannot be read as safetensors: {error}") from error
    wrong = [name for name in expected if name not in loaded or loaded[name].shape != expected[name].shape]
    if wrong or len(loaded) != len(expected):
        extra = sorted(set(loaded) - set(expected))
        raise InputError(
            f"{path} does not fit the model: missing or of another shape: {', '.join(wrong) or 'none'}; "
            f"unknown: {', '.join(extra) or 'none'}."
        )
    return {name: loaded[name].to(leaf.dtype) for name, leaf in expected.items()}
