"""Probable mistakes in a model that trains all the same, found by one look at it and its output."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from fedloom.data.federation import Federation
from fedloom.task import Task
from fedloom.training.hidden_layers import about_hidden_layers


def model_cautions(federation: Federation, task: Task, output: Any) -> Iterator[str]:
    """Yield a sentence for each."""
    hidden, softmax = about_hidden_layers(task.module), _about_softmax(task, output)
    yield from filter(None, (hidden, softmax, _about_spare_outputs(federation, task, output)))


def without_gradient(parameters: Sequence[str]) -> str:
    """Say which layers no training step changed, as after `detach()`: nobody would see it in the numbers.

    >>> without_gradient(["features.0.weight", "features.0.bias"]).partition(":")[0]
    'features.0 gets no gradient in the examples tried, so it is not trained there'
    """
    layers = list(dict.fromkeys(name.rpartition(".")[0] or name for name in parameters))
    if not layers:
        return ""
    gets, it, its = ("gets", "it is", "its") if len(layers) == 1 else ("get", "they are", "their")
    more = f" and {len(layers) - 4} more" if len(layers) > 4 else ""
    return (
        f"{', '.join(layers[:4])}{more} {gets} no gradient in the examples tried, so {it} not trained there: does "
        f"forward leave {'it' if len(layers) == 1 else 'them'} out, or use detach(), .data or torch.no_grad() after "
        f"{'it' if len(layers) == 1 else 'them'}? If that is meant, give {its} parameters requires_grad = False, and "
        "clients do not send them."
    )


def _about_softmax(task: Task, output: Any) -> str:
    """Say so if the model gives probabilities, where the loss takes scores and makes probabilities of them itself."""
    if task.loss != "cross_entropy" or output.shape[-1] < 2:
        return ""
    sums = output.detach().double().sum(-1)
    if bool((output < 0).any()) or not torch.allclose(sums, torch.ones_like(sums), atol=1e-4):
        return ""
    return (
        "The model seems to end in a softmax: its outputs are between 0 and 1 and have the sum 1. "
        "Cross-entropy applies a softmax itself, and after two the model learns slowly: leave yours out."
    )


def _about_spare_outputs(federation: Federation, task: Task, output: Any) -> str:
    """Say so if the model has outputs for classes that no label has, which may be right: a class may be missing here.

    A language model usually has some: for padding, or because the texts have fewer words than it has room for.
    """
    classes, x = len(federation.classes), federation.x
    of_words = not x.is_floating_point() and x.dtype != torch.uint8
    if task.loss != "cross_entropy" or classes < 2 or of_words or output.shape[-1] <= classes:
        return ""
    return (
        f"The model gives {output.shape[-1]} outputs per example, but the labels have {classes} classes. The other "
        "outputs take a share of the probability: leave them out, unless classes are missing here."
    )
