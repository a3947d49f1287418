"""Probable mistakes in a model that trains all the same, found by one look at it and its output."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fedloom.data.federation import Federation
from fedloom.task import Task


def model_cautions(federation: Federation, task: Task, output: Any) -> Iterator[str]:
    """Yield a sentence for each."""
    hidden, softmax = _about_hidden_layers(task.module), _about_softmax(task, output)
    yield from filter(None, (hidden, softmax, _about_spare_outputs(federation, task, output)))


def _about_hidden_layers(module: nn.Module) -> str:
    """Say so if layers are in a list or a dict of Python, where torch does not find them."""
    known = {id(leaf) for leaf in module.parameters()}
    for part in module.modules():
        for name, value in vars(part).items():
            if name.startswith("_") or not isinstance(value, (list, tuple, dict)):
                continue
            held = value.values() if isinstance(value, dict) else value
            layers = [one for one in held if isinstance(one, nn.Module)]
            if any(id(leaf) not in known for layer in layers for leaf in layer.parameters()):
                kind = "ModuleDict" if isinstance(value, dict) else "ModuleList"
                return (
                    f"{type(part).__name__}.{name} holds layers in a {type(value).__name__}, where torch does not find "
                    f"them: they are never trained, sent or saved. Use nn.{kind}."
                )
    return ""


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
