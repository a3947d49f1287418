"""Reference models, one per file. A name in an experiment file resolves to a class here, or to somebody else's."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedloom import resolve
from fedloom.errors import InputError, nearest
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


def build(name: str, **args: Any) -> nn.Module:
    """A model by its name, or somebody else's as `package.module:Class`.

    >>> build("logistic", features=4, classes=3)
    Logistic(
      (out): Linear(in_features=4, out_features=3, bias=True)
    )
    """
    if name not in MODELS and not resolve.is_code(name):
        known = ", ".join(MODELS)
        raise InputError(
            f"There is no model '{name}'. Known: {known}, or your own as 'package.module:Class'.{nearest(name, MODELS)}"
        )
    model = MODELS[name] if name in MODELS else resolve.code(name, Path())
    if not callable(model):
        raise InputError(f"The model '{name}' must be a class or a function. Got {type(model).__name__} instead.")
    signature = inspect.signature(model)
    try:
        signature.bind(**args)
    except TypeError as error:
        known = ", ".join(str(parameter) for parameter in signature.parameters.values()) or "none"
        given = ", ".join(args) or "no args"
        raise InputError(f"The model '{name}' cannot be built with {given}: {error}. Its args are: {known}.") from None
    built = model(**args)
    if not isinstance(built, nn.Module):
        raise InputError(f"The model '{name}' must be a torch.nn.Module. Got {type(built).__name__} instead.")
    return built


def describe() -> list[tuple[str, str, str]]:
    """Name, number of parameters (— where it depends on args) and a line about each model.

    >>> describe()[0]
    ('digits_mlp', '2,410', 'Dense 64-32-10 with ReLU, for the 8 × 8 digits of scikit-learn.')
    """
    found = []
    for name, model in MODELS.items():
        needs = [p for p in inspect.signature(model).parameters.values() if p.default is p.empty]
        count = "—" if needs else f"{_count(model):,}"
        found.append((name, count, (model.__doc__ or "").strip().splitlines()[0]))
    return found


def _count(model: type[nn.Module]) -> int:
    with torch.device("meta"):  # neither memory nor random numbers for weights that nobody needs
        return sum(parameter.numel() for parameter in model().parameters())
