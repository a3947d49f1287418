"""What clients receive, and that its error does not become part of the server's model."""

from __future__ import annotations

import pytest
import torch

from fedloom.compression.downlink import Downlink, rebased
from fedloom.compression.method import Damaged, form_of
from fedloom.compression.methods import METHODS

MODEL = {"w": torch.randn(30, 20, generator=torch.Generator().manual_seed(1)), "seen": torch.tensor(5)}
STATE = {"model": MODEL, "size": {"examples": torch.tensor([7.0])}}


def link(name: str) -> Downlink:
    return Downlink(METHODS[name](), form_of(MODEL), ("w",))


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_parameters_are_rounded_and_the_rest_is_not(name: str) -> None:
    found, taken = link(name).received(STATE)
    assert torch.equal(found["model"]["w"], MODEL["w"].to(getattr(torch, name)).float())
    assert found["model"]["seen"] is MODEL["seen"]
    assert found["size"] == STATE["size"]
    assert list(found["model"]) == list(MODEL)
    assert taken == 1200 + 8 + 4


@pytest.mark.parametrize("name", ["float16", "bfloat16", "lossless"])
def test_what_was_rounded_once_is_not_rounded_again(name: str) -> None:
    """So a coordinator that has what clients compute with sends the same bytes."""
    found, taken = link(name).received(STATE)
    again, same = link(name).received(found)
    assert taken == same
    assert torch.equal(again["model"]["w"], found["model"]["w"])


@pytest.mark.parametrize("name", ["float16", "lossless"])
def test_both_sides_agree(name: str) -> None:
    down = link(name)
    found = down.unpack(*down.pack(STATE))
    expected, _ = down.received(STATE)
    for group, leaves in expected.items():
        for leaf_name, leaf in leaves.items():
            assert torch.equal(found[group][leaf_name], leaf)


def test_leaves_keep_the_order_of_the_model() -> None:
    """Both sides pack and unpack in this order, so frozen leaves must not come last."""
    model = {"frozen": torch.ones(3), "w": torch.ones(4)}
    down = Downlink(METHODS["float16"](), form_of(model), ("w",))
    assert list(down.unpack(*down.pack({"model": model}))["model"]) == ["frozen", "w"]


def test_what_does_not_fit_the_model_is_refused() -> None:
    down = link("lossless")
    rest, parts, names = down.pack(STATE)
    for wrong in ({"model": ["w", "strange"]}, {"other": ["w"]}, {}, {"model": ["w"]}):
        with pytest.raises(Damaged):
            down.unpack(rest, parts, wrong)
    assert names == {"model": ["w", "seen"]}


def test_means_start_from_the_exact_model() -> None:
    sent, _ = link("bfloat16").received(STATE)
    change = torch.full((30, 20), 0.5)
    means = {"model": {"w": sent["model"]["w"] + change, "seen": torch.tensor(6)}, "other": {"w": change}}
    found = rebased(means, {"model": "model"}, STATE, sent)
    torch.testing.assert_close(found["model"]["w"], MODEL["w"] + change)
    assert found["model"]["seen"] is means["model"]["seen"]
    assert found["other"]["w"] is change
