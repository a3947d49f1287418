"""What clients send, what the server reads, and what clients keep for their next change."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.algorithm import Update
from fedloom.compression.method import Damaged, form_of
from fedloom.compression.methods import METHODS, method
from fedloom.compression.uplink import Uplink
from fedloom.tree import Groups

WEIGHT = torch.randn(40, 20, generator=torch.Generator().manual_seed(1))
SHARED: Groups = {"model": {"w": WEIGHT, "mean": torch.tensor([0.25]), "seen": torch.tensor(5)}}
LEARNT = form_of({"w": WEIGHT})
FORMS = {"model": form_of(SHARED["model"])}


def trained(clients: int = 2, seed: int = 2) -> Update:
    moved = torch.randn(clients, 40, 20, generator=torch.Generator().manual_seed(seed)) * 0.01
    leaves = {"w": WEIGHT + moved, "mean": torch.tensor([[0.5]] * clients), "seen": torch.arange(clients) + 6}
    return Update({"model": leaves}, torch.ones(clients), positions={"model": "model"})


def link(name: object, round: int = 1) -> Uplink:
    return Uplink(method(name), LEARNT, seed=3, round=round, call=0, asked="client")


@pytest.mark.parametrize("name", METHODS)
def test_the_server_reads_what_the_simulation_computes(name: str) -> None:
    uplink, update = link(name), trained()
    sent = uplink.send(update, SHARED, (4, 7), {})
    for position, client in enumerate((4, 7)):
        rest = {g: {n: leaf[position][None] for n, leaf in leaves.items()} for g, leaves in sent.rest.items()}
        found = uplink.receive(client, rest, sent.parts[position], FORMS, update.positions, SHARED)
        assert list(found["model"]) == list(SHARED["model"])
        for leaf_name, leaf in found["model"].items():
            assert torch.equal(leaf[0], sent.update.groups["model"][leaf_name][position]), leaf_name


@pytest.mark.parametrize("name", METHODS)
def test_buffers_and_counters_are_never_changed(name: str) -> None:
    update = trained()
    found = link(name).send(update, SHARED, (4, 7), {}).update
    for leaf in ("mean", "seen"):
        assert torch.equal(found.groups["model"][leaf], update.groups["model"][leaf])
    if METHODS[name].exact:
        assert torch.equal(found.groups["model"]["w"], update.groups["model"]["w"])


def test_bytes_are_those_of_the_parts() -> None:
    sent = link({"name": "topk", "keep": 0.1}).send(trained(), SHARED, (4, 7), {})
    gaps = [parts["model"]["gaps"].numel() for parts in sent.parts]
    assert sent.bytes == [80 * 4 + gap + 4 + 8 for gap in gaps]
    assert link("float16").send(trained(), SHARED, (4, 7), {}).bytes == [1600 + 4 + 8] * 2


@pytest.mark.parametrize("name", ["topk", "randomk", "powersgd", {"name": "eden", "error_feedback": True}])
def test_nothing_is_lost_with_error_feedback(name: object) -> None:
    """The sum of what arrived and what is left out is the sum of all changes."""
    memory: dict[str, torch.Tensor] = {}
    arrived, moved = torch.zeros(2, 40, 20), torch.zeros(2, 40, 20)
    for round in range(1, 6):
        update = trained(seed=round)
        sent = link(name, round).send(update, SHARED, (4, 7), memory)
        memory = sent.memory
        arrived += sent.update.groups["model"]["w"] - WEIGHT
        moved += update.groups["model"]["w"] - WEIGHT
    left = memory["client/model/left out/w"]
    assert left.abs().max() > 1e-3
    torch.testing.assert_close(arrived + left, moved, rtol=0, atol=1e-5)


def test_clients_and_rounds_draw_their_own_numbers() -> None:
    values = [
        link({"name": "randomk", "keep": 0.1}, round)
        .send(trained(1), SHARED, (client,), {})
        .parts[0]["model"]["values"]
        for client, round in ((4, 1), (4, 1), (5, 1), (4, 2))
    ]
    assert torch.equal(values[0], values[1])
    assert not torch.equal(values[0], values[2])
    assert not torch.equal(values[0], values[3])


def test_a_change_that_is_not_finite_is_sent_as_it_is() -> None:
    update = trained()
    update.groups["model"]["w"][1, 0, 0] = torch.nan
    sent = link("topk").send(update, SHARED, (4, 7), {})
    assert sent.parts[0].keys() == {"model"}
    assert not sent.parts[1]
    assert sent.update.groups["model"]["w"][1].isnan().sum() == 1
    assert not sent.memory["client/model/left out/w"][1].any()
    assert sent.bytes[1] == 3200 + 4 + 8


def test_one_client_that_is_not_finite_does_not_change_what_the_others_keep() -> None:
    for bad, good in ((0, 1), (1, 0)):
        update = trained()
        update.groups["model"]["w"][bad, 0, 0] = torch.nan
        alone = link("powersgd").send(trained(), SHARED, (4, 7), {})
        found = link("powersgd").send(update, SHARED, (4, 7), {})
        assert found.memory.keys() == alone.memory.keys()
        for name, leaf in found.memory.items():
            assert torch.equal(leaf[good], alone.memory[name][good])


def test_a_number_too_large_for_the_method_is_not_held_back() -> None:
    update = trained()
    update.groups["model"]["w"][1, 0, 0] = 1e6
    sent = link({"name": "float16", "error_feedback": True}).send(update, SHARED, (4, 7), {})
    assert sent.update.groups["model"]["w"][1].isinf().sum() == 1
    assert all(bool(leaf.isfinite().all()) for leaf in sent.memory.values())


def test_groups_without_trained_parameters_are_sent_as_they_are() -> None:
    update = Update({"fitness": {"fitness": torch.rand(2, 5)}}, torch.ones(2))
    sent = link("topk").send(update, {}, (4, 7), {})
    assert sent.update.groups == update.groups
    assert sent.parts == [{}, {}]
    assert sent.bytes == [20, 20]


@pytest.mark.parametrize("feedback", [True, False])
def test_projections_add_up_to_the_mean_of_what_single_clients_send(feedback: bool) -> None:
    """Under masks, the mean of the numbers that were sent becomes the mean of the compressed updates."""
    uplink = link({"name": "randomk", "keep": 0.1, "mask": "round", "error_feedback": feedback})
    update = trained(3)
    memory = {"client/model/left out/w": torch.full((3, 40, 20), 0.01)} if feedback else {}
    sent = uplink.send(update, SHARED, (4, 7, 9), memory)
    short, kept = uplink.project(update, SHARED, (4, 7, 9), memory)
    assert short.groups["model"]["w"].shape == (3, 80)
    mean = {"model": {name: leaf.float().mean(0) for name, leaf in short.groups["model"].items()}}
    found = uplink.expand(mean, SHARED, update.positions)
    torch.testing.assert_close(found["model"]["w"], sent.update.groups["model"]["w"].mean(0), rtol=0, atol=5e-6)
    assert kept.keys() == sent.memory.keys()
    for name, leaf in kept.items():
        torch.testing.assert_close(leaf, sent.memory[name], rtol=0, atol=1e-6)


@st.composite
def spoilt(draw: st.DrawFn, part: torch.Tensor) -> torch.Tensor:
    """Sometimes what was sent, and sometimes anything else."""
    how = draw(st.sampled_from(["same", "kind", "shape", "shorter", "longer", "bytes", "empty"]))
    if how == "kind":
        return part.to(draw(st.sampled_from([torch.float64, torch.float16, torch.uint8, torch.int64, torch.int16])))
    if how == "shape":
        return part.reshape(-1, 1)
    if how == "shorter":
        return part[: draw(st.integers(0, len(part)))]
    if how == "longer":
        return torch.cat([part, part])
    if how == "bytes":
        raw = draw(st.binary(min_size=16, max_size=16))
        every = (raw * (part.numel() * part.element_size() // 16 + 1))[: part.numel() * part.element_size()]
        return torch.frombuffer(bytearray(every), dtype=part.dtype).reshape(part.shape) if every else part
    return torch.empty(0, dtype=part.dtype) if how == "empty" else part


@settings(max_examples=60)
@pytest.mark.parametrize("name", METHODS)
@given(data=st.data())
def test_whatever_comes_is_refused_or_has_the_right_form(name: str, data: st.DataObject) -> None:
    uplink, update = link(name), trained(1)
    sent = uplink.send(update, SHARED, (4,), {})
    parts = {path: data.draw(spoilt(part)) for path, part in sent.parts[0]["model"].items()}
    if data.draw(st.booleans()):
        parts["more"] = torch.ones(1)
    if data.draw(st.booleans()):
        parts.pop(data.draw(st.sampled_from(sorted(parts))))
    try:
        found = uplink.receive(4, sent.rest, {"model": parts}, FORMS, update.positions, SHARED)
    except Damaged:
        return
    assert {path: (tuple(leaf.shape[1:]), leaf.dtype) for path, leaf in found["model"].items()} == FORMS["model"]


@pytest.mark.parametrize("wrong", [{}, {"model": {}, "other": {}}, {"other": {}}])
def test_parts_of_other_groups_are_refused(wrong: Groups) -> None:
    with pytest.raises(Damaged, match=r"an answer has parts for \d groups, and 1 are compressed"):
        link("topk").receive(4, {"model": {}}, wrong, FORMS, {"model": "model"}, SHARED)


def test_a_leaf_that_is_sent_twice_is_refused() -> None:
    uplink, update = link("float16"), trained(1)
    sent = uplink.send(update, SHARED, (4,), {})
    with pytest.raises(Damaged, match="'w' is compressed, and also sent as it is"):
        uplink.receive(4, update.groups, sent.parts[0], FORMS, update.positions, SHARED)
