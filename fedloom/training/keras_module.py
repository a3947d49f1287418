"""Keras models on Keras's torch backend, as ordinary torch modules."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

SEED = "seed_generator_state"  # Keras's name for the state of a layer's own generator


def is_keras(module: object) -> bool:
    """Whether an object is a Keras layer or model."""
    keras = sys.modules.get("keras")
    return keras is not None and isinstance(module, keras.Layer)


class KerasModule(nn.Module):
    """A Keras model whose variables are the parameters and buffers of a torch module. It follows `train` and `eval`.

    Keras keeps values in its own variables, names them by what else the process has made, and computes in training mode
    only if it is asked to. Here, names count variables from 0, values are given to the model in each call, and its
    generators are seeded from torch's.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        stateless = sys.modules["keras"].StatelessScope
        variables = [variable for variable in model.variables if variable.name != SEED]
        seeds = [variable for variable in model.variables if variable.name == SEED]
        named = [(f"{number}_{variable.name}", variable) for number, variable in enumerate(variables)]
        for name, variable in named:
            value = variable.value.detach().clone()
            if variable.trainable:
                self.register_parameter(name, nn.Parameter(value))
            else:
                self.register_buffer(name, value)

        # a function, because the model's own state is none of this module's
        def run(held: nn.Module, *inputs: Any) -> Any:
            given = [(variable, getattr(held, name)) for name, variable in named]
            drawn = [(seed, torch.randint(2**31, tuple(seed.shape))) for seed in seeds] if held.training else []
            with stateless([*given, *drawn]) as scope:
                output = model(*inputs, training=held.training)
            for name, variable in named:
                new = scope.get_current_value(variable)
                if not variable.trainable and isinstance(new, Tensor):
                    setattr(held, name, new.detach())
            return output

        self.run = run

    def forward(self, *inputs: Any) -> Any:
        return self.run(self, *inputs)
