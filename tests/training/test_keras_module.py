"""Keras models train like torch modules, also in worker processes."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from fedloom.training.keras_module import is_keras

SCRIPT = """
import os

os.environ["KERAS_BACKEND"] = "torch"  # after this process started, as in a file of your own

import keras
import numpy as np
import torch

import fedloom as fl
from fedloom import tree
from fedloom.backends.serial import Serial
from fedloom.backends.vector import Vector
from fedloom.training.probe import probe


def net(dropout=0.5):
    layers = [keras.layers.Dense(6, "relu"), keras.layers.BatchNormalization(), keras.layers.Dropout(dropout)]
    return keras.Sequential([*layers, keras.layers.Dense(2)])  # without an input: the data gives the sizes


rng = np.random.default_rng(0)
x = rng.normal(size=(90, 4)).astype("float32")
federation = fl.Federation.from_arrays(x, (x[:, 0] > 0).astype(int), clients=3)
task = fl.Task(net, seed=3, example=federation.example())
print(*(name for name in task.initial()))
print(tree.sha256(task.initial()) == tree.sha256(fl.Task(net, seed=3, example=federation.example()).initial()))
backends = Serial(federation, task), Vector(federation, task, probe(federation, task).setup(group=1), workers=2)
for backend in backends:
    for record in fl.fit(federation, task, fl.FedAvg(lr=0.1, batch_size=9, epochs=3.0), 4, backend=backend):
        pass
    print(tree.sha256(record.state["model"]), record.clients["final"][0]["test"].values(task)["accuracy"] > 0.6)
    backend.close()
module = task.build()
moving = module.get_buffer("4_moving_mean").clone()
batch = torch.from_numpy(x)
print(torch.equal(module.eval()(batch), module(batch)), torch.equal(module.get_buffer("4_moving_mean"), moving))
print(torch.equal(module.train()(batch), module(batch)), torch.equal(module.get_buffer("4_moving_mean"), moving))
"""


@pytest.mark.skipif(importlib.util.find_spec("keras") is None, reason="Keras is not installed")
@pytest.mark.slow
def test_a_keras_model_has_the_same_bits_in_workers_and_follows_training_mode() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names, same, serial, workers, evaluating, training = done.stdout.splitlines()
    assert names.split() == [
        "0_kernel",
        "1_bias",
        "2_gamma",
        "3_beta",
        "6_kernel",
        "7_bias",
        "4_moving_mean",
        "5_moving_variance",
    ]
    assert same == "True"
    assert serial == workers
    assert serial.endswith("True"), "it learnt nothing"
    assert evaluating == "True True", "an evaluation draws nothing and changes nothing"
    assert training == "False False", "training drops units and moves the means"


def test_without_keras_nothing_is_a_keras_model() -> None:
    assert "keras" in sys.modules or not is_keras(object())
