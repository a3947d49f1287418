"""fedloom against transcriptions of the papers' pseudo-code: three rounds, three clients, one absent in round 2."""

import inspect
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from fedloom.algorithm import Algorithm
from fedloom.algorithms import ALGORITHMS
from fedloom.federation.engine import Evaluation, RoundRecord, Snapshot, fit
from fedloom.training.clients import Clients
from fedloom.tree import Groups
from tests.conformance.transcriptions import (
    CASES,
    SEED,
    Attendance,
    Case,
    TwoLayers,
    Vector,
    World,
    three_clients,
)

QUIET = Evaluation(splits=())
EXACT = {"rtol": 1e-9, "atol": 1e-12}
BY_OTHER_TESTS = {
    "fed_dropout",  # its sub-models are drawn, so that a transcription has to be told them: below
    "neuroevolution",  # these take no gradients: tests/algorithms/evolution has their papers' formulas
    "random_search",
    "openai_es",
    "snes",
    "fedasync",  # its clients start from different versions: tests/algorithms/test_fedasync.py
}


def algorithm_of(name: str, **settings: object) -> Algorithm:
    if name not in ALGORITHMS:
        pytest.skip(f"fedloom has no algorithm '{name}' yet")
    return ALGORITHMS[name](**settings)


def orders(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, int]]:
    """Collects for what, and in which calls of a round, clients draw an order: this is up to the implementation."""
    drawn: set[tuple[str, int]] = set()
    original = Clients.key

    def key(self: Clients, position: int, purpose: str, *parts: int) -> int:
        if purpose in ("batches", "dual"):
            drawn.add((purpose, self.call))
        return original(self, position, purpose, *parts)

    monkeypatch.setattr(Clients, "key", key)
    return drawn


def rounds(
    world: World, algorithm: Algorithm, resume: Snapshot | None = None
) -> tuple[list[RoundRecord], dict[int, Groups]]:
    """All records, and what every client keeps in the end."""
    own = {client: algorithm.init_own(world.task, world.task.initial()) for client in range(world.population)}
    own.update(resume.own if resume else {})
    records = []
    sampling = Attendance(rounds=world.rounds)
    last = len(world.rounds) if resume is None else resume.round + 1
    for record in fit(
        world.federation, world.task, algorithm, last, seed=SEED, sampling=sampling, evaluation=QUIET, resume=resume
    ):
        own.update(record.own)
        records.append(record)
    return records, own


@pytest.mark.parametrize("case", CASES, ids=[case.label for case in CASES])
def test_three_rounds_match_the_paper(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    world = case.world()
    training = {**world.training, **({"momentum": 0.0} if case.name == "fedsgd" else {})}
    algorithm = algorithm_of(case.name, **{**training, **case.settings, **case.more})
    drawn = orders(monkeypatch)
    records, own = rounds(world, algorithm)
    known = inspect.signature(case.transcription).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    settings = {name: value for name, value in case.settings.items() if takes_all or name in known}
    if drawn:
        (purpose,) = {purpose for purpose, _ in drawn}
        world = replace(world, purpose=purpose, calls=tuple(sorted(call for _, call in drawn)))
    expected = case.transcription(world, **settings)
    state = records[-1].state
    if expected.server is not None:
        found = algorithm.server_model(world.task, state)
        assert found is not None
        compare = np.ones(len(expected.server), bool) if expected.compare is None else expected.compare
        np.testing.assert_allclose(world.model.flatten(found)[compare], expected.server[compare], **EXACT)
    for client, model in expected.clients.items():
        found = algorithm.model(world.task, state, own[client])
        np.testing.assert_allclose(world.model.flatten(found), model, **EXACT, err_msg=f"client {client}")


def test_every_algorithm_has_a_transcription() -> None:
    covered = Counter(case.name for case in CASES)
    assert {name for name in ALGORITHMS if name not in covered} <= BY_OTHER_TESTS


def test_the_hand_made_gradients_are_those_of_torch() -> None:
    import torch

    for case in {case.world: case for case in CASES}.values():
        world = case.world()
        module, (x, y) = world.task.build().train(), world.examples(world.rows(1))
        loss = world.task.losses(module(torch.from_numpy(x)), torch.from_numpy(y)).mean()
        loss.backward()
        if world.loss == "bce":
            continue
        gradient = {name: leaf.grad for name, leaf in module.named_parameters()}
        buffers = {name: torch.zeros_like(leaf) for name, leaf in module.named_buffers()}
        np.testing.assert_allclose(
            world.model.gradient(world.start(), x, y), world.model.flatten({**gradient, **buffers}), **EXACT
        )


# --- federated dropout: each client's sub-model is seen by letting it train alone


def alone(world: World, algorithm: Algorithm, client: int, at: Snapshot) -> Vector:
    """What a client comes to in the next round if it is the only one: its sub-model shows in what did not move."""
    attendance = tuple((client,) for _ in world.rounds)
    records, _ = rounds(replace(world, rounds=attendance), algorithm, at)
    return world.model.flatten(records[-1].state["model"])


def test_federated_dropout_trains_sub_models_and_averages_each_weight_over_the_clients_that_had_it() -> None:
    rate, hidden = 0.25, TwoLayers.hidden
    world = three_clients(TwoLayers())
    algorithm = algorithm_of("fed_dropout", **world.training, rate=rate)
    records, _ = rounds(world, algorithm)
    model = TwoLayers()
    state, w, dropped = {"model": world.task.initial()}, world.start(), set()
    for round, cohort in enumerate(world.rounds, 1):
        sums, weights = np.zeros_like(w), np.zeros_like(w)
        for k in cohort:
            moved = model.parts(
                alone(world, algorithm, k, Snapshot(round - 1, state, {})) - model.flatten(state["model"])
            )
            kept = np.abs(moved["body.weight"]).max(1) > 1e-12
            assert kept.sum() == hidden - round_half(rate * hidden), f"client {k} trains {kept.sum()} of {hidden} units"
            assert (np.abs(moved["head.weight"]).max(0) > 1e-12).tolist() == kept.tolist()
            dropped.add(tuple(kept.tolist()))
            local = w.copy()
            for rows in world.batches(k, round):
                local = local - world.lr * model.gradient(local, *world.examples(rows), kept=kept.astype(float))
            had = model.join(
                {
                    "body.weight": np.broadcast_to(kept[:, None], model.leaves["body.weight"]),
                    "body.bias": kept,
                    "head.weight": np.broadcast_to(kept, model.leaves["head.weight"]),
                    "head.bias": np.ones(model.leaves["head.bias"]),
                }
            )
            np.testing.assert_array_equal(local[had == 0], w[had == 0])
            sums += world.size(k) * had * local
            weights += world.size(k) * had
        w = np.where(weights > 0, sums / np.where(weights > 0, weights, 1.0), w)
        state = records[round - 1].state
        np.testing.assert_allclose(model.flatten(state["model"]), w, **EXACT)
    assert len(dropped) > 1, "all clients had the same sub-model"


def round_half(value: float) -> int:
    return int(np.floor(value + 0.5))
