"""Noise that clients add together: never less than is accounted, whoever of the clients is left."""

from __future__ import annotations

import math
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
import torch

import fedloom as fl
from fedloom import tree
from fedloom.algorithm import Update
from fedloom.errors import InputError, PrivacySpent
from fedloom.federation.engine import RoundRecord, fit
from fedloom.privacy.dp import clipping, distributed
from fedloom.privacy.dp.accounting import Mechanism, epsilon
from fedloom.privacy.dp.client_level import ClientLevel
from fedloom.privacy.dp.clipping import COUNT
from fedloom.privacy.dp.distributed import FEWEST_STEPS, OVERFLOW, NoiseShare, discrete_gaussian, unit
from fedloom.privacy.dp.noise import derive
from fedloom.privacy.protection import Protection, check_plan
from fedloom.privacy.secure import aggregation
from fedloom.privacy.secure.ring import Ring, RingConfig
from fedloom.privacy.secure.session import Refusal
from fedloom.privacy.table import DpTable, PrivacyTable, SecureTable
from fedloom.task import Task
from tests.conftest import Dense, federation

KEY = bytes(range(32))
UNIFORM = fl.FedAvg(weights="uniform", lr=0.1)


def table(secure: dict[str, Any] | None = None, **dp: Any) -> PrivacyTable:
    settings = {"noise_multiplier": 1.0, "clip": 1.0, "noise": "distributed", **dp}
    return PrivacyTable(secure_aggregation=SecureTable(**(secure or {})), dp=DpTable(**settings))


def ring(clients: int, like: dict[str, Any], z: float = 1.0, bits: Any = "auto", **dp: Any) -> Ring:
    noise = NoiseShare.of(table(**dp), z, clients)
    return Ring(RingConfig(4.0, clients, 1, bits, noise), like)


def secret(number: int) -> bytes:
    return number.to_bytes(32, "big")


# --- the numbers


@pytest.mark.parametrize("deviation", [0.4, 0.8, 3.0])
def test_numbers_have_the_probabilities_of_a_discrete_gaussian(deviation: float) -> None:
    count = 100_000
    drawn = discrete_gaussian(KEY, deviation, count)
    values = np.arange(-60, 61)
    expected = np.exp(-(values**2) / (2 * deviation**2))
    expected *= count / expected.sum()
    seen = np.array([(drawn == value).sum() for value in values])
    common = expected > 20
    statistic = float(((seen - expected)[common] ** 2 / expected[common]).sum())
    degrees = int(common.sum())
    assert statistic < degrees + 5 * math.sqrt(2 * degrees)  # χ², five deviations


@pytest.mark.parametrize("deviation", [8.0, 1e6, 2.0**44])
def test_numbers_have_the_deviation_at_every_size(deviation: float) -> None:
    count = 200_000
    drawn = discrete_gaussian(KEY, deviation, count) / deviation
    assert len(drawn) == count
    assert float(drawn.std()) == pytest.approx(1, rel=4 / math.sqrt(2 * count))
    assert float(drawn.mean()) == pytest.approx(0, abs=4 / math.sqrt(count))
    assert float((drawn**4).mean()) == pytest.approx(3, rel=0.04)


@pytest.mark.parametrize("deviation", [2.0**55, 2.0**59])
def test_noise_of_any_size_covers_the_last_digit(deviation: float) -> None:
    """Floating-point numbers of this size are multiples of 4, which would show the last digits of a sum."""
    drawn = discrete_gaussian(KEY, deviation, 10_000)
    assert [int(((drawn % 4) == rest).sum()) for rest in range(4)] == pytest.approx([2500] * 4, abs=5 * 43)
    assert float((drawn / deviation).std()) == pytest.approx(1, rel=0.04)


def test_every_part_below_the_scale_is_equally_likely(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last words, whose remainders would be more likely than others, are left out."""

    def last_words(key: bytes, target: tuple[Any, int]) -> None:
        target[0][:] = 0
        target[0][: len(target[0]) // 4] = np.arange(2**64 - len(target[0]) // 4, 2**64, dtype=np.uint64)

    monkeypatch.setattr(distributed, "add_stream", last_words)
    drawn = distributed._candidates(KEY, 9.0, 64)  # 2^64 is 6 more than a multiple of 10
    assert sorted(np.unique(drawn, return_counts=True)[1].tolist()) == [5] * 2 + [6] * 8


def test_another_secret_gives_other_numbers_and_the_same_one_the_same() -> None:
    first = discrete_gaussian(KEY, 1e6, 100)
    assert np.array_equal(first, discrete_gaussian(KEY, 1e6, 100))
    assert not (first == discrete_gaussian(secret(1), 1e6, 100)).any()


# --- the sensitivity


def sent(values: torch.Tensor, clip: float, bits: Any = "auto", clients: int = 5, **dp: Any) -> tuple[Ring, Any]:
    """What one client encodes, without its noise, and its ring."""
    protection = Protection(table({"bits": bits}, clip=clip, **dp), fl.Sampling(), clients, 1)
    guard = protection.guard(UNIFORM, clients)
    update = Update({"model": {"w": values[None]}}, torch.ones(1), positions={"model": "model"})
    task = Task(lambda: SingleLeaf(len(values)))
    guarded = guard.apply(update, {"model": {"w": torch.zeros_like(values)}}, task)
    groups = {group: tree.row(leaves, 0) for group, leaves in guarded.groups.items()}
    found = Ring(guard.ring, groups)
    noise = guard.noise
    assert noise is not None
    vector = found.encode(groups, dict.fromkeys(groups, 1.0), {}, KEY)[1 : 1 + len(values)]
    added = discrete_gaussian(derive(KEY, "model", "w"), noise.deviation("model", found.scales["model"]), len(values))
    return found, vector.view(f"<i{found.bits // 8}").astype(np.int64) - added


class SingleLeaf(torch.nn.Module):
    """A model that is one vector."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(size))


@pytest.mark.parametrize("clip", [1e-4, 1.0, 300.0])
@pytest.mark.parametrize("factor", [0.5, 1.0, 1000.0])
def test_no_change_is_longer_than_one_after_rounding(clip: float, factor: float) -> None:
    """All numbers lie half a step of the ring above a whole one, so that rounding makes each of them larger."""
    found, _ = sent(torch.zeros(10_000), clip, bits=32, noise_multiplier=1000.0)
    scale = found.scales["model"]
    assert scale < 2**20  # coarse steps
    value = (math.floor(scale / 100) + 0.5 + 1e-3) / scale  # 10,000 of these have a length of a bit more than 1
    _, whole = sent(torch.full((10_000,), value * unit(clip) * factor), clip, bits=32, noise_multiplier=1000.0)
    length = float(np.linalg.norm(whole / scale))
    assert length <= 1
    assert length > min(factor, 1.0) * (1 - 3 * found.rounding)


def test_a_ring_whose_rounding_would_take_most_of_the_clip_is_refused() -> None:
    with pytest.raises(InputError, match=r"rounds changes by up to .* and dp clips them to 1"):
        sent(torch.zeros(10_000), 1.0, bits=32, noise_multiplier=3e6)


def test_a_client_refuses_a_change_that_is_longer_than_its_clip() -> None:
    found = ring(5, {"model": {"w": torch.zeros(4)}})
    found.encode({"model": {"w": torch.full((4,), 0.5)}}, {"model": 1.0}, {}, KEY)
    with pytest.raises(Refusal, match="longer than its clip"):
        found.encode({"model": {"w": torch.full((4,), 0.500001)}}, {"model": 1.0}, {}, KEY)


# --- shares


@pytest.mark.parametrize(
    ("clients", "secure", "colluders", "honest"),
    [(3, {}, None, 2), (10, {}, None, 6), (100, {}, None, 57), (10, {"threshold": 1.0}, 0.0, 10), (10, {}, 0.5, 2)],
)
def test_the_fewest_honest_clients_are_the_threshold_without_the_colluders(
    clients: int, secure: dict[str, Any], colluders: float | None, honest: int
) -> None:
    assert NoiseShare.of(table(secure, colluders=colluders), 1.0, clients).honest == honest


@pytest.mark.parametrize("clients", [3, 5, 10])
@pytest.mark.parametrize("z", [0.3, 2.0])
def test_no_set_of_survivors_has_less_noise_than_is_accounted(clients: int, z: float) -> None:
    """Every set at or above the threshold, without every set of colluders: a sum of variances."""
    settings = table()
    assert settings.dp is not None
    assert settings.secure_aggregation is not None
    found = ring(clients, {"model": {"w": torch.zeros(50)}}, z)
    noise = found.config.noise
    assert noise is not None
    scale = found.scales["model"]
    variance = noise.deviation("model", scale) ** 2
    accounted = (z * scale) ** 2
    least = math.inf
    for size in range(settings.secure_aggregation.needed(clients), clients + 1):
        for survivors in combinations(range(clients), size):
            for colluders in combinations(range(clients), settings.dp.most_colluders(clients)):
                honest = set(survivors) - set(colluders)
                least = min(least, len(honest) * variance)
                assert len(honest) * variance >= accounted * (1 - 1e-12)
    assert least == pytest.approx(accounted)  # and not more than needed


@pytest.mark.parametrize("survivors", [6, 7, 10])
def test_the_noise_of_a_sum_has_the_deviation_that_its_survivors_give_it(survivors: int) -> None:
    count, z = 20_000, 1.5
    like = {"model": {"w": torch.zeros(count)}}
    found = ring(10, like, z)
    total = np.zeros(found.size, found.dtype)
    for client in range(survivors):
        total += found.encode(like, {"model": 1.0}, {}, secret(client))
    values = found.sums(total, survivors)[0]["model"]["w"]
    expected = z * math.sqrt(survivors / 6)  # of ten, six are honest and stay
    assert float(values.std()) == pytest.approx(expected, rel=4 / math.sqrt(2 * count))


def test_the_count_of_short_changes_is_a_number_of_the_ring_with_noise_of_its_own() -> None:
    """z⁻² is the sum of both: nothing is given away by counting."""
    like = {"model": {"w": torch.zeros(2)}, COUNT: {COUNT: torch.zeros((), dtype=torch.float64)}}
    found = ring(100, like, z=2.0, clip="adaptive")
    noise = found.config.noise
    assert noise is not None
    of_count = noise.deviation(COUNT, 1.0) * math.sqrt(noise.honest) / 0.5
    of_change = noise.deviation("model", 1.0) * math.sqrt(noise.honest)
    assert of_count == pytest.approx(2 * clipping.indicator_deviation(100))
    assert of_change**-2 + of_count**-2 == pytest.approx(2.0**-2)
    one = {"model": {"w": torch.zeros(2)}, COUNT: {COUNT: torch.tensor(0.5, dtype=torch.float64)}}
    weights = {"model": 1.0, COUNT: 1.0}
    counts = []
    for trial in range(50):
        total = np.zeros(found.size, found.dtype)
        for client in range(100):
            total += found.encode(one, weights, {}, secret(1000 * trial + client))
        counts.append(float(found.sums(total, 100)[0][COUNT][COUNT]))
    wanted = clipping.indicator_deviation(100) * noise.excess
    assert np.mean(counts) == pytest.approx(50, abs=4 * wanted / math.sqrt(50))
    assert np.std(counts) == pytest.approx(wanted, rel=4 / math.sqrt(2 * 50))


def test_whole_numbers_and_weights_get_no_noise() -> None:
    like = {"model": {"w": torch.zeros(3), "seen": torch.zeros((), dtype=torch.int64)}}
    found = ring(3, like)
    total = sum((found.encode(like, {"model": 1.0}, {}, secret(c)) for c in range(3)), np.zeros(5, found.dtype))
    sums, weights = found.sums(total, 3)
    assert float(weights["model"]) == 3
    assert float(sums["model"]["seen"]) == 0
    assert bool((sums["model"]["w"] != 0).all())


def test_clients_that_may_all_be_colluders_are_refused() -> None:
    with pytest.raises(InputError, match="7 of 10 clients must stay, and 7 may work with the server"):
        NoiseShare.of(table(colluders=0.65), 1.0, 10)


# --- the ring's room


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("z", [0.5, 5.0, 50.0])
def test_the_ring_has_room_for_all_changes_and_for_the_tails_of_the_noise(bits: int, z: float) -> None:
    found = ring(20, {"model": {"w": torch.zeros(1000)}}, z, bits)
    noise, scale = found.config.noise, found.scales["model"]
    assert noise is not None
    tail = noise.tail("model", scale, 1000)
    assert 20 * scale + tail < 2 ** (bits - 1)
    of_all = noise.deviation("model", scale) * math.sqrt(20)
    assert 1000 * 2 * math.exp(-(tail**2) / (2 * of_all**2)) <= OVERFLOW
    assert noise.deviation("model", scale) >= FEWEST_STEPS


@pytest.mark.parametrize(
    ("z", "why"),
    [
        (1e8, r"rounds changes by up to 3, and dp clips them to 1: use bits = 64 or less noise"),
        (1e10, r"bits = 32 is too few for the sum of 3 clients .*: use bits = 64"),
    ],
)
def test_a_ring_that_is_too_small_for_the_noise_is_refused_when_a_run_is_planned(z: float, why: str) -> None:
    data, task = federation((8, 8, 8)), Task(Dense)
    protection = Protection(table({"bits": 32}, noise_multiplier=z), fl.Sampling(), 3, 1)
    with pytest.raises(InputError, match=why):
        protection.check(UNIFORM, task.initial())
    with pytest.raises(InputError, match=why):
        next(fit(data, task, UNIFORM, 1, protection=protection))
    Protection(table({"bits": 64}, noise_multiplier=z), fl.Sampling(), 3, 1).check(UNIFORM, task.initial())


# --- what it costs


def test_only_renyi_accounting_covers_whole_numbers() -> None:
    found = epsilon({Mechanism(1.0, discrete=True): 1}, 1e-5)
    assert found.pld is None
    assert found.value == pytest.approx(4.7285, abs=1e-3)


@pytest.mark.parametrize(("z", "shift"), [(1.0, 1), (0.5, 3)])
def test_the_divergence_of_a_sum_of_discrete_gaussians_is_that_of_a_gaussian(z: float, shift: int) -> None:
    """Computed from the probabilities of the sum of three shares, whose deviation is as small as it may be."""
    share = FEWEST_STEPS
    values = np.arange(-120, 121)
    one = np.exp(-(values**2) / (2 * share**2))
    of_sum = np.convolve(np.convolve(one / one.sum(), one / one.sum()), one / one.sum())
    moved = round(math.sqrt(3) * share / z) * shift
    p, q = of_sum[moved:], of_sum[:-moved]
    inside = (p > 1e-200) & (q > 1e-200)
    for order in (1.5, 2.0, 8.0):
        logs = order * np.log(p[inside]) + (1 - order) * np.log(q[inside])
        top = logs.max()
        divergence = (top + math.log(np.exp(logs - top).sum())) / (order - 1)
        assert divergence <= order * moved**2 / (2 * 3 * share**2) * (1 + 1e-9)


def test_drawing_some_of_the_clients_amplifies_nothing() -> None:
    dp = ClientLevel(DpTable(noise_multiplier=1.0, clip=1.0, noise="distributed"), fl.Sampling(count=2), 10, 9)
    assert dp.mechanism == Mechanism(1.0, discrete=True)
    assert dp.expected == 2


def test_the_multiplier_is_that_of_all_planned_rounds() -> None:
    z = distributed.multiplier(DpTable(epsilon=4.0, clip=1.0, noise="distributed"), 10)
    assert z == round(z, 4)
    assert 3.9 < epsilon({Mechanism(z, discrete=True): 10}, 1e-5).value <= 4.0
    assert ClientLevel(DpTable(epsilon=4.0, clip=1.0, noise="distributed"), fl.Sampling(), 5, 10).noise_multiplier == z


# --- runs


def trained(settings: PrivacyTable, rounds: int = 2, **more: Any) -> list[RoundRecord]:
    protection = Protection(settings, fl.Sampling(), 5, rounds, **more)
    data, task = federation((12, 9, 7, 11, 8)), Task(Dense)
    return list(fit(data, task, UNIFORM, rounds, protection=protection))


def weights(record: RoundRecord) -> torch.Tensor:
    return torch.cat([leaf.flatten().double() for leaf in record.state["model"].values()])


def test_a_simulation_releases_the_exact_sum_of_what_clients_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors: list[np.ndarray[Any, Any]] = []
    encode, masked = Ring.encode, aggregation.secure_sum

    def keeping(self: Ring, *args: Any) -> Any:
        vectors.append(encode(self, *args))
        return vectors[-1]

    def checked(*args: Any) -> Any:
        total, survivors = masked(*args)
        assert np.array_equal(total, sum(vectors[1:], vectors[0]))
        return total, survivors

    monkeypatch.setattr(Ring, "encode", keeping)
    monkeypatch.setattr(aggregation, "secure_sum", checked)
    (record,) = trained(table(), rounds=1)
    assert len(vectors) == 5
    start = torch.cat([leaf.flatten().double() for leaf in Task(Dense).initial().values()])
    like = {"model": Task(Dense).initial()}
    found = ring(5, like).sums(sum(vectors[1:], vectors[0]), 5)[0]["model"]
    change = torch.cat([leaf.flatten() for leaf in found.values()]) / 5
    assert torch.allclose(weights(record), start + change, atol=1e-6)


def test_the_noise_is_there_and_two_runs_differ() -> None:
    first, second = (weights(trained(table(noise_multiplier=100.0), rounds=1)[0]) for _ in range(2))
    start = torch.cat([leaf.flatten().double() for leaf in Task(Dense).initial().values()])
    expected = 100 / 5 * math.sqrt(5 / 3)  # of five clients, three are honest and stay
    tolerance = 4 / math.sqrt(2 * len(start))
    assert float((first - start).std()) == pytest.approx(expected, rel=tolerance)
    assert float((first - second).std()) == pytest.approx(expected * math.sqrt(2), rel=tolerance)


def test_a_run_that_begins_again_has_the_same_bits_and_costs_nothing_more(tmp_path: Any) -> None:
    first, second = (trained(table(), folder=tmp_path) for _ in range(2))
    assert torch.equal(weights(first[-1]), weights(second[-1]))
    cost = epsilon({Mechanism(1.0, discrete=True): 2}, 1e-5).value
    assert [records[-1].notes["distributed_epsilon"] for records in (first, second)] == [cost, cost]


def test_another_answer_to_the_same_question_is_charged() -> None:
    dp = ClientLevel(DpTable(noise_multiplier=1.0, clip=1.0, noise="distributed"), fl.Sampling(), 5, 9)
    shared = {"model": {"w": torch.zeros(2)}}
    dp.charge_question(1, 0, shared)
    assert dp.ledger.spent[dp.mechanism] == 1  # before anybody is asked
    for sums, charged in (((1.0, 2.0), 1), ((1.0, 2.0), 1), ((1.0, 3.0), 2), ((1.0, 2.0), 2)):
        total = {"change": {"w": torch.tensor(sums)}}
        assert dp.release(1, 0, total, {}, shared, Task(Dense))["change"]["w"].tolist() == pytest.approx(
            [value / 5 for value in sums], rel=1e-5
        )
        assert dp.ledger.spent[dp.mechanism] == charged


def test_a_sum_is_charged_even_if_its_question_was_not() -> None:
    dp = ClientLevel(DpTable(noise_multiplier=1.0, clip=1.0, noise="distributed"), fl.Sampling(), 5, 9)
    dp.release(1, 0, {"change": {"w": torch.ones(2)}}, {}, {}, Task(Dense))
    assert dp.ledger.spent[dp.mechanism] == 1


def test_a_round_that_is_abandoned_stays_spent() -> None:
    lossy = table({"threshold": 1.0, "lost": (0.0, 0.0, 0.9, 0.0, 0.0)})
    protection = Protection(lossy, fl.Sampling(), 5, 1)
    (record,) = fit(federation((12, 9, 7, 11, 8)), Task(Dense), UNIFORM, 1, protection=protection)
    assert not record.complete
    assert protection.dp is not None
    assert protection.dp.ledger.spent[protection.dp.mechanism] == 1


def test_nobody_is_asked_when_everything_is_spent() -> None:
    dp = ClientLevel(DpTable(epsilon=1.0, clip=1.0, noise="distributed"), fl.Sampling(), 5, 1)
    dp.charge_question(1, 0, {})
    with pytest.raises(PrivacySpent, match="replace by zero what is sent by one client"):
        dp.charge_question(2, 0, {})


def test_an_adaptive_clip_moves_by_the_noisy_count() -> None:
    sizes = (6,) * 30
    protection = Protection(table(noise_multiplier=0.5, clip="adaptive"), fl.Sampling(), 30, 4)
    records = list(fit(federation(sizes), Task(Dense), UNIFORM, 4, protection=protection))
    clips = [record.notes["clip"] for record in records]
    assert len({*clips}) == 4
    assert all(abs(math.log(after / before)) < 0.2 * 3 for before, after in pairwise(clips))


def test_state_that_is_no_position_keeps_its_precision() -> None:
    protection = Protection(table(), fl.Sampling(max_examples=20), 5, 1)
    sampling = fl.Sampling(max_examples=20)
    data, task = federation((12, 9, 7, 11, 8)), Task(Dense)
    (record,) = fit(data, task, fl.Scaffold(), 1, sampling=sampling, protection=protection)
    assert {leaf.dtype for leaf in record.state["control"].values()} == {torch.float32}


# --- what is refused


def test_cohorts_of_any_size_are_refused() -> None:
    poisson = fl.Sampling(sampling="poisson", fraction=0.5)
    with pytest.raises(InputError, match=r'cannot be used with \[cohort\] sampling = "poisson"'):
        check_plan(table(), poisson, {"fedavg": UNIFORM})
    with pytest.raises(InputError, match="hides nobody"):
        Protection(table(), poisson, 10, 1)
