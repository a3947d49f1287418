"""The EEG net has the published layers, and its faster form computes the same."""

from __future__ import annotations

import pytest
import torch

from fedloom.errors import InputError
from fedloom.models import build
from fedloom.models.eeg_cnn import mean_of_15
from tests.models.helpers import parameters


def test_the_eeg_net_has_the_published_layers_and_four_numbers_that_are_not_trained() -> None:
    model = build("eeg_cnn")
    counts = {name: sum(p.numel() for p in part.parameters()) for name, part in model.named_children()}
    assert counts == {"time": 780, "space": 19_210, "power": 162, "norm": 4, "out": 846}
    buffers = {name: leaf for name, leaf in model.named_buffers() if leaf.is_floating_point()}
    assert parameters(model) + sum(leaf.numel() for leaf in buffers.values()) == 21_006


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_composing_its_first_convolutions_changes_neither_answers_nor_gradients(mode: str) -> None:
    composed, plain = (build("eeg_cnn", composed=composed).double() for composed in (True, False))
    plain.load_state_dict(composed.state_dict())
    x = torch.randn(5, 64, 256, generator=torch.Generator().manual_seed(0)).double() * 10
    answers = []
    for model in (composed, plain):
        answer = getattr(model, mode)()(x)
        answer.square().sum().backward()
        answers.append(answer.detach())
    torch.testing.assert_close(*answers, rtol=1e-10, atol=1e-12)
    for (name, one), other in zip(composed.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-7, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


def test_its_logarithms_make_the_cross_entropy_of_keras() -> None:
    chances, logs = build("eeg_cnn").eval(), build("eeg_cnn", output="log_sigmoid").eval()
    logs.load_state_dict(chances.state_dict())
    x, y = torch.randn(6, 1, 64, 256), torch.tensor([0, 1, 1, 0, 1, 0])
    p = chances(x)
    expected = -(p[torch.arange(6), y] / p.sum(1)).log()  # Keras scales outputs to a sum of one
    torch.testing.assert_close(torch.nn.functional.cross_entropy(logs(x), y, reduction="none"), expected)
    with pytest.raises(InputError, match="'output' of eeg_cnn must be"):
        build("eeg_cnn", output="softmax")


def test_its_means_over_15_samples_are_those_of_torch() -> None:
    x = torch.randn(3, 10, 232, generator=torch.Generator().manual_seed(0)).double().square()
    torch.testing.assert_close(mean_of_15(x), torch.nn.functional.avg_pool1d(x, 15, 1), rtol=1e-12, atol=0)
