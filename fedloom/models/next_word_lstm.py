"""The next-word model.

The recurrence is written out, with one bias vector as in Keras: torch's LSTM has two, and does not work for several
clients at once. With `layer_norm`, the cell is normalised as in TensorFlow Addons (inputs, recurrent part and state).
`recurrent_dropout` drops candidate values, so that the cell keeps what it remembers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.errors import InputError
from fedloom.models.mlp import check_sizes


class NextWordLSTM(nn.Module):
    """Embedding 16, LSTM 64 and a dense layer over 10,000 words: predicts the word that follows some tokens."""

    inputs = (10,)  # the shape of an example

    def __init__(
        self,
        vocabulary: int = 10_000,
        embedding: int = 16,
        units: int = 64,
        layer_norm: bool = False,
        recurrent_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_sizes("next_word_lstm", vocabulary=vocabulary, embedding=embedding, units=units)
        if not 0 <= recurrent_dropout < 1:
            raise InputError(
                "The 'recurrent_dropout' parameter of next_word_lstm must be at least 0 and below 1. "
                f"Got {recurrent_dropout!r} instead."
            )
        self.units, self.recurrent_dropout = units, recurrent_dropout
        self.embedding = nn.Embedding(vocabulary, embedding)
        # the gates are in the order enter, forget, leave, candidate: the first three share one sigmoid
        self.input = nn.Linear(embedding, 4 * units)
        self.recurrent = nn.Linear(units, 4 * units, bias=False)
        self.out = nn.Linear(units, vocabulary)
        self._as_keras()
        norms = {"input": 4 * units, "recurrent": 4 * units, "state": units} if layer_norm else {}
        self.norms = nn.ModuleDict({name: nn.LayerNorm(width, eps=1e-3) for name, width in norms.items()})

    @torch.no_grad()
    def _as_keras(self) -> None:
        """Initialise the weights as in the published model."""
        nn.init.uniform_(self.embedding.weight, -0.05, 0.05)
        for matrix in (self.input.weight, self.out.weight):
            nn.init.xavier_uniform_(matrix)
        nn.init.orthogonal_(self.recurrent.weight)
        for bias in (self.input.bias, self.out.bias):
            nn.init.zeros_(bias)
        self.input.bias[self.units : 2 * self.units] = 1.0  # remember at first

    def forward(self, tokens: Tensor) -> Tensor:
        """Return one logit per word, from the state after the last token."""
        seen = self.embedding(tokens)
        if self.norms:  # the bias comes after the normalisation
            entering = self._norm("input", F.linear(seen, self.input.weight)) + self.input.bias
        else:
            entering = self.input(seen)
        hidden = memory = seen.new_zeros(seen.shape[0], self.units)
        for entry in entering.unbind(1):
            gates = entry + self._norm("recurrent", self.recurrent(hidden))
            opened, candidate = torch.split(gates, [3 * self.units, self.units], 1)
            enter, forget, leave = opened.sigmoid().chunk(3, 1)
            candidate = F.dropout(candidate.tanh(), self.recurrent_dropout, self.training)
            memory = self._norm("state", forget * memory + enter * candidate)
            hidden = leave * memory.tanh()
        logits: Tensor = self.out(hidden)
        return logits

    def _norm(self, name: str, values: Tensor) -> Tensor:
        normed: Tensor = self.norms[name](values) if self.norms else values
        return normed
