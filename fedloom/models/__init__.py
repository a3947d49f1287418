"""Reference models, one per file. A name in an experiment file resolves to a class here, or to somebody else's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from fedloom import user_code
from fedloom.errors import FedloomError, InputError, nearest
from fedloom.models.digits_mlp import DigitsMLP
from fedloom.models.eeg_cnn import EegCNN
from fedloom.models.logistic import Logistic
from fedloom.models.mlp import MLP
from fedloom.models.mnist_2nn import Mnist2NN
from fedloom.models.mnist_cnn import MnistCNN
from fedloom.models.natural_images_cnn import NaturalImagesCNN
from fedloom.models.next_word_lstm import NextWordLSTM
from fedloom.models.postures_mlp import PosturesMLP

__all__ = [
    "MLP",
    "MODELS",
    "DigitsMLP",
    "EegCNN",
    "Logistic",
    "Mnist2NN",
    "MnistCNN",
    "NaturalImagesCNN",
    "NextWordLSTM",
    "PosturesMLP",
    "build",
    "construct",
    "describe",
]

MODELS: dict[str, type[nn.Module]] = {
    "digits_mlp": DigitsMLP,
    "eeg_cnn": EegCNN,
    "logistic": Logistic,
    "mlp": MLP,
    "mnist_2nn": Mnist2NN,
    "mnist_cnn": MnistCNN,
    "natural_images_cnn": NaturalImagesCNN,
    "next_word_lstm": NextWordLSTM,
    "postures_mlp": PosturesMLP,
}

# the shape of an example; of the others args decide
INPUTS: dict[str, tuple[int, ...]] = {
    "digits_mlp": (64,),
    "eeg_cnn": (64, 256),
    "mnist_2nn": (1, 28, 28),
    "mnist_cnn": (1, 28, 28),
    "natural_images_cnn": (3, 80, 80),
    "next_word_lstm": (10,),
    "postures_mlp": (36,),
}


def build(name: str, **args: Any) -> nn.Module:
    """A model by its name, or somebody else's as `package.module:Class`.

    >>> build("logistic", features=4, classes=3)
    Logistic(
      (out): Linear(in_features=4, out_features=3, bias=True)
    )
    """
    if name not in MODELS and not user_code.is_code(name):
        known = ", ".join(MODELS)
        raise InputError(
            f"There is no model '{name}'. Known: {known}, or your own as 'package.module:Class'.{nearest(name, MODELS)}"
        )
    return construct(name, MODELS[name] if name in MODELS else user_code.code(name, Path()), args)


def construct(name: str, model: Callable[..., nn.Module], args: Mapping[str, Any]) -> nn.Module:
    """A module from its class or from a function that returns one; `name` is what messages call it."""
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
        raise InputError(f"The model '{name}' failed while it was built: {type(error).__name__}: {error}") from error
    if not isinstance(built, nn.Module):
        raise InputError(f"The model '{name}' must be a torch.nn.Module. Got {type(built).__name__} instead.")
    return built


class Description(NamedTuple):
    """What there is to know about a model before it is built."""

    name: str
    parameters: int | None  # None where it depends on args
    buffers: int  # numbers that are kept with the weights but not trained
    inputs: tuple[int, ...] | None
    summary: str


def describe() -> list[Description]:
    """All about each model that fedloom ships.

    >>> describe()[0]
    Description(name='digits_mlp', parameters=2410, buffers=0, inputs=(64,), summary='Dense 64-32-10 with ReLU, ...')
    """
    return [_description(name, model) for name, model in MODELS.items()]


def _description(name: str, model: type[nn.Module]) -> Description:
    summary = (model.__doc__ or "").strip().splitlines()[0]
    if name not in INPUTS:
        return Description(name, None, 0, None, summary)
    with torch.device("meta"):  # neither memory nor random numbers for weights that nobody needs
        module = model()
    buffers = sum(buffer.numel() for buffer in module.buffers() if buffer.is_floating_point())
    return Description(name, sum(leaf.numel() for leaf in module.parameters()), buffers, INPUTS[name], summary)
