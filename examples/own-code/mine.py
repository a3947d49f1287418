"""A loader, a model, a loss and an algorithm: all the code that an experiment file can name."""

import numpy as np
import torch.nn.functional as F
from torch import nn

import fedloom as fl
from fedloom.tree import add, sub


def load(examples):
    """Three sites that measure the same thing with different offsets: arrays, labels and the site of each example."""
    random = np.random.default_rng(7)
    site = random.integers(0, 3, size=examples)
    x = random.normal(size=(examples, 4)).astype("float32")
    y = (x[:, 0] - x[:, 1] > 0).astype(int)
    return x + 0.3 * site[:, None].astype("float32"), y, np.array(["north", "south", "west"])[site]


class Net(nn.Module):
    """Any torch module."""

    def __init__(self, hidden):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, 2))

    def forward(self, x):
        return self.layers(x)


def smooth(output, target):
    """Cross-entropy with smoothed labels, one value per example."""
    return F.cross_entropy(output, target, label_smoothing=0.05, reduction="none")


class Proximal(fl.FedAvg):
    """FedAvg with a pull towards the global model."""

    mu: float = 0.01

    def correct(self, step, shared, own):
        """Add the gradient of mu/2 · ‖w − w_global‖²."""
        return add(step.grad, sub(step.params, step.start), scale=self.mu)
