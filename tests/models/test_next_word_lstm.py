"""The next-word model computes an LSTM as its papers define it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fedloom import keys
from fedloom.models import build
from fedloom.training.masking import Masked
from tests.models.helpers import parameters


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({"layer_norm": True}, 830_736 + 2 * (256 + 256 + 64)),
        ({"recurrent_dropout": 0.5}, 830_736),
        ({"units": 128}, 10_000 * 16 + 4 * 128 * (16 + 128 + 1) + 10_000 * 129),
        ({"embedding": 6}, 10_000 * 6 + 4 * 64 * (6 + 64 + 1) + 10_000 * 65),
    ],
)
def test_variants_of_the_next_word_model_have_the_parameters_of_their_layers(
    args: dict[str, Any], expected: int
) -> None:
    assert parameters(build("next_word_lstm", **args)) == expected


def test_the_next_word_model_starts_as_in_keras() -> None:
    model = build("next_word_lstm", vocabulary=500, embedding=6, units=8)
    assert model.embedding.weight.abs().max() <= 0.05
    assert model.out.weight.abs().max() <= (6 / 508) ** 0.5
    torch.testing.assert_close(model.recurrent.weight.T @ model.recurrent.weight, torch.eye(8))
    assert model.input.bias.tolist() == [0.0] * 8 + [1.0] * 8 + [0.0] * 16  # the second quarter lets it remember
    assert not model.out.bias.any()


def test_the_next_word_model_is_torchs_lstm_with_one_bias() -> None:
    model = build("next_word_lstm", vocabulary=11, embedding=3, units=4)
    lstm, order = nn.LSTM(3, 4, batch_first=True), [0, 1, 3, 2]  # torch has the candidate third, the model last
    with torch.no_grad():
        for ours, theirs in ((model.input.weight, lstm.weight_ih_l0), (model.recurrent.weight, lstm.weight_hh_l0)):
            theirs.copy_(torch.cat([ours.chunk(4)[gate] for gate in order]))
        lstm.bias_ih_l0.copy_(torch.cat([model.input.bias.chunk(4)[gate] for gate in order]))
        lstm.bias_hh_l0.zero_()
    tokens = torch.randint(0, 11, (5, 7))
    expected = model.out(lstm(model.embedding(tokens))[0][:, -1])
    torch.testing.assert_close(model(tokens), expected)


def test_a_normalised_cell_follows_its_definition() -> None:
    model = build("next_word_lstm", vocabulary=11, embedding=3, units=4, layer_norm=True).double()
    tokens = torch.randint(0, 11, (5, 7))
    hidden = memory = torch.zeros(5, 4, dtype=torch.float64)
    with torch.no_grad():
        model.norms["state"].weight.mul_(1.5)

    def normal(name: str, values: torch.Tensor) -> torch.Tensor:
        centred = values - values.mean(1, keepdim=True)
        scaled = centred / (centred.square().mean(1, keepdim=True) + 1e-3).sqrt()
        return scaled * model.norms[name].weight + model.norms[name].bias

    for step in range(7):
        entering = normal("input", model.embedding(tokens[:, step]) @ model.input.weight.T)
        gates = entering + normal("recurrent", hidden @ model.recurrent.weight.T) + model.input.bias
        enter, forget, leave, candidate = gates.chunk(4, 1)
        memory = normal("state", forget.sigmoid() * memory + enter.sigmoid() * candidate.tanh())
        hidden = leave.sigmoid() * memory.tanh()
    torch.testing.assert_close(model(tokens), model.out(hidden))


def test_recurrent_dropout_is_for_training_only() -> None:
    model = build("next_word_lstm", vocabulary=11, embedding=3, units=4, recurrent_dropout=0.5)
    tokens = torch.randint(0, 11, (5, 7))
    assert torch.equal(model.eval()(tokens), model(tokens))
    assert not torch.equal(model.train()(tokens), model(tokens))


def test_recurrent_dropout_drops_candidates_and_never_what_is_remembered() -> None:
    model = build("next_word_lstm", vocabulary=11, embedding=3, units=4, recurrent_dropout=0.5).double()
    tokens, key = torch.randint(0, 11, (5, 7)), torch.tensor([3, 4])
    hidden = memory = torch.zeros(5, 4, dtype=torch.float64)
    for step in range(7):
        gates = model.input(model.embedding(tokens[:, step])) + model.recurrent(hidden)
        enter, forget, leave, candidate = gates.chunk(4, 1)
        kept = (keys.uniform(key, 20, step) >= 0.5).reshape(5, 4)  # the draw of this client, in this step
        memory = forget.sigmoid() * memory + enter.sigmoid() * candidate.tanh() * kept * 2
        hidden = leave.sigmoid() * memory.tanh()
    with Masked(key):
        torch.testing.assert_close(model(tokens), model.out(hidden))
