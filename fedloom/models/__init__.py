"""Reference models, one per file: a new file is a new model. Experiment files use their names, or your own class."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from fedloom import machine, user_code
from fedloom.discovery import discover
from fedloom.errors import FedloomError, InputError, unknown

# a model has the name of its file
COPIES = 3  # of the weights at least: initial ones, a module's own, and gradients
SMALL = 100_000_000  # bytes, which every machine has
MODELS = discover(__path__, __name__, nn.Module, lambda kind: kind.__module__.rpartition(".")[2])


def build(name: str, **args: Any) -> nn.Module:
    """Build a model by its name, or your own as `file.py:Class` or `package.module:Class`.

    >>> build("logistic", features=4, classes=3)
    Logistic(
      (out): Linear(in_features=4, out_features=3, bias=True)
    )
    """
    if name in MODELS:
        _check_memory(name, args)
        return construct(name, MODELS[name], args)
    if user_code.is_code(name):
        return construct(name, user_code.code(name, Path(), nn.Module), args)
    own = "or your own as 'file.py:Class' or 'package.module:Class'"
    linear = "; 'logistic' with classes = 1 and the loss 'mse' is linear regression" if "linear" in name else ""
    raise unknown("model", name, MODELS, own + linear)


def construct(name: str, model: Callable[..., nn.Module], args: Mapping[str, Any]) -> nn.Module:
    """Build a module from its class or from a function that returns one. Error messages use `name`."""
    if not callable(model):
        raise InputError(f"The model '{name}' must be a class or a function. Got {type(model).__name__} instead.")
    signature = inspect.signature(model)
    try:
        signature.bind(**args)
    except TypeError as error:
        known = ", ".join(str(parameter) for parameter in signature.parameters.values()) or "none"
        given = ", ".join(args) or "no args"
        raise InputError(f"The model '{name}' cannot be built with {given}: {error}. Its args are: {known}.") from None
    try:
        built = model(**args)
    except FedloomError:
        raise
    except Exception as error:
        raise InputError(f"The model '{name}' failed while it was built: {user_code.said(error)}") from error
    if not isinstance(built, nn.Module):
        raise InputError(f"The model '{name}' must be a torch.nn.Module. Got {type(built).__name__} instead.")
    return built


def _check_memory(name: str, args: Mapping[str, Any]) -> None:
    """Refuse a model that this machine cannot hold, before the system ends the process without a word."""
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):  # tensors without memory
            needed = COPIES * sum(leaf.numel() * leaf.element_size() for leaf in MODELS[name](**args).parameters())
    except Exception:
        return  # building it says why
    free = machine.free_memory() if needed > SMALL else None
    if free is not None and needed > free:
        raise InputError(
            f"The model '{name}' with {', '.join(f'{key} = {value}' for key, value in args.items())} needs about "
            f"{needed / 1e9:.1f} GB to train ({COPIES} times its weights), and {free / 1e9:.1f} GB are free. Make it "
            "smaller."
        )


class Description(NamedTuple):
    """Facts about a model that are known before it is built."""

    name: str
    parameters: int | None  # None if it depends on args
    buffers: int  # numbers that are kept with the weights but not trained
    inputs: tuple[int, ...] | None  # the shape of an example
    summary: str


def describe() -> list[Description]:
    """Describe each model that fedloom ships.

    >>> describe()[0]
    Description(name='digits_mlp', parameters=2410, buffers=0, inputs=(64,), summary='Dense 64-32-10 with ReLU, ...')
    """
    return [_description(name, model) for name, model in MODELS.items()]


def _description(name: str, model: type[nn.Module]) -> Description:
    summary = (model.__doc__ or "").strip().splitlines()[0]
    inputs = cast("tuple[int, ...] | None", getattr(model, "inputs", None))
    if inputs is None:  # its args decide
        return Description(name, None, 0, None, summary)
    with torch.device("meta"):  # needs neither memory nor random numbers
        module = model()
    buffers = sum(buffer.numel() for buffer in module.buffers() if buffer.is_floating_point())
    return Description(name, sum(leaf.numel() for leaf in module.parameters()), buffers, inputs, summary)
