"""The reference models in plain PyTorch, for the peers that train such modules."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from work import LENGTH, VOCABULARY

EMBEDDING, HIDDEN = 16, 64


def build(work: str, fused: bool = True) -> nn.Module:
    """The model of a work."""
    if work == "2nn":
        return nn.Sequential(
            nn.Flatten(), nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10)
        )
    if work == "cnn":
        return nn.Sequential(
            *(nn.Unflatten(1, (1, 28)), nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(64 * 7 * 7, 512), nn.ReLU(), nn.Linear(512, 10)),
        )
    return NextWord(fused)


class NextWord(nn.Module):
    """Embedding 10,000 × 16, an LSTM of 64, dense 10,000: 830,736 parameters, because the LSTM has one bias vector.

    `fused` hands the recurrence to torch's LSTM kernel, with zeros for the second bias vector that it needs; otherwise
    it is written out step by step, which vmap can follow. Both compute the same.
    """

    def __init__(self, fused: bool = False) -> None:
        super().__init__()
        self.fused = fused
        self.embedding = nn.Embedding(VOCABULARY, EMBEDDING)
        self.weight_input = nn.Parameter(torch.empty(4 * HIDDEN, EMBEDDING))
        self.weight_hidden = nn.Parameter(torch.empty(4 * HIDDEN, HIDDEN))
        self.bias = nn.Parameter(torch.zeros(4 * HIDDEN))
        self.out = nn.Linear(HIDDEN, VOCABULARY)
        for weight in (self.weight_input, self.weight_hidden):
            nn.init.uniform_(weight, -(HIDDEN**-0.5), HIDDEN**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """One logit per word of the vocabulary, after the last token."""
        seen = self.embedding(tokens)
        memory = hidden = seen.new_zeros(seen.shape[0], HIDDEN)
        if self.fused:
            weights = [self.weight_input, self.weight_hidden, self.bias, torch.zeros_like(self.bias)]
            start = (hidden.unsqueeze(0), memory.unsqueeze(0))
            outputs = torch.lstm(seen, start, weights, True, 1, 0.0, self.training, False, True)[0]
            return self.out(outputs[:, -1])
        inputs = F.linear(seen, self.weight_input, self.bias)
        for step in range(LENGTH):
            gates = inputs[:, step] + F.linear(hidden, self.weight_hidden)
            enter, forget, cell, leave = gates.chunk(4, 1)
            memory = forget.sigmoid() * memory + enter.sigmoid() * cell.tanh()
            hidden = leave.sigmoid() * memory.tanh()
        return self.out(hidden)
