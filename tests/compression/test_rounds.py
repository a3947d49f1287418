"""Whole rounds with compressed messages: the same bits for any number of workers and after a restart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom import tree
from fedloom.algorithm import Algorithm
from fedloom.algorithms import FedAvg, FedBN, Scaffold
from fedloom.backends.vector import Vector
from fedloom.clock.fleet import Fleet
from fedloom.clock.system import System
from fedloom.compression.methods import METHODS
from fedloom.compression.table import CompressTable
from fedloom.compression.uplink import MEMORY
from fedloom.errors import InputError
from fedloom.experiment import checkpoint
from fedloom.federation.engine import RoundRecord, fit
from fedloom.federation.sampling import Sampling
from fedloom.privacy.protection import Protection
from fedloom.privacy.table import DpTable, PrivacyTable, SecureTable
from fedloom.task import Task
from tests.conftest import Dense, Normed, facts, federation, last

SIZES = (12, 30, 21, 45, 18, 25)
LIGHT = {"batch_size": 8, "lr": 0.05}
HALF = Sampling(count=3)
FEW = {"topk": {"keep": 0.1}, "randomk": {"keep": 0.1}}
TABLES = [CompressTable(up={"name": name, **FEW.get(name, {})}) for name in METHODS]
TABLES += [CompressTable(up="topk", down="bfloat16"), CompressTable(down="lossless")]


def run(
    algorithm: Algorithm, table: CompressTable, rounds: int = 3, model: Any = Normed, **more: Any
) -> list[RoundRecord]:
    data, task = federation(SIZES), Task(model)
    return list(fit(data, task, algorithm, rounds, sampling=HALF, compress=table, seed=5, **more))


@pytest.mark.parametrize("table", TABLES, ids=repr)
def test_workers_and_restarts_change_no_bit(
    table: CompressTable, vector: Callable[..., Vector], tmp_path: Path
) -> None:
    records = run(FedAvg(**LIGHT), table)
    data, task = federation(SIZES), Task(Normed)
    backend = vector(data, task, workers=2)
    for one, other in zip(records, run(FedAvg(**LIGHT), table, backend=backend), strict=True):
        assert facts(one) == facts(other)
    own: dict[int, Any] = {}
    for record in records[:2]:
        own.update(record.own)
    checkpoint.save(tmp_path, 2, records[1].state, own)
    loaded = checkpoint.load(tmp_path)
    assert loaded is not None
    again = last(run(FedAvg(**LIGHT), table, resume=loaded.snapshot))
    assert facts(again) == facts(records[2])


def test_lossless_changes_nothing_but_the_bytes() -> None:
    plain, packed = (run(FedAvg(**LIGHT), table) for table in (CompressTable(), CompressTable(up="lossless")))
    for one, other in zip(plain, packed, strict=True):
        assert facts(one) | {"reports": ()} == facts(other) | {"reports": ()}
    assert plain[0].reports[0].bytes_up != packed[0].reports[0].bytes_up


@pytest.mark.parametrize("table", [table for table in TABLES if not table.down], ids=repr)
def test_fewer_bytes_are_reported(table: CompressTable) -> None:
    whole = sum(leaf.numel() * leaf.element_size() for leaf in Task(Dense).initial().values()) + 8
    (record,) = run(FedAvg(**LIGHT), table, rounds=1, model=Dense)
    assert all(0 < report.bytes_up < whole for report in record.reports)
    assert all(report.bytes_down == whole - 8 for report in record.reports)


def test_what_goes_down_is_counted_and_the_server_keeps_the_exact_model() -> None:
    (record,) = run(FedAvg(**LIGHT, epochs=1e-9), CompressTable(down="bfloat16"), rounds=1, model=Dense)
    numbers = Task(Dense).parameters
    assert {report.bytes_down for report in record.reports} == {2 * numbers}
    assert {report.bytes_up for report in record.reports} == {4 * numbers + 8}


def test_an_update_is_what_the_method_makes_of_it() -> None:
    """One client, one round, computed by hand: the two largest numbers of its change."""
    data, task = federation((20,)), Task(Dense)
    plain = last(fit(data, task, FedAvg(**LIGHT), 1)).state["model"]
    found = last(fit(data, task, FedAvg(**LIGHT), 1, compress=CompressTable(up={"name": "topk", "keep": 0.0139})))
    start = task.initial()
    change = torch.cat([(plain[name] - start[name]).flatten() for name in start])
    moved = torch.cat([(found.state["model"][name] - start[name]).flatten() for name in start])
    two = change.abs().topk(2).indices
    assert sorted((moved.abs() > 1e-6).nonzero().flatten().tolist()) == sorted(two.tolist())
    torch.testing.assert_close(moved[two], change[two], rtol=1e-4, atol=1e-7)
    left = found.own[0][MEMORY]
    rest = torch.cat([left[f"client/model/left out/{name}"].flatten() for name in start])
    torch.testing.assert_close(rest + moved, change, rtol=0, atol=1e-6)


def test_clients_of_scaffold_and_its_server_agree_up_to_what_was_left_out() -> None:
    """c is the mean of all c_k: what error feedback holds back is missing in c, and nowhere else."""
    records = run(Scaffold(**LIGHT), CompressTable(up={"name": "topk", "keep": 0.1}), rounds=4, model=Dense)
    own: dict[int, Any] = {}
    for record in records:
        own.update(record.own)
    control = records[-1].state["control"]
    for name, leaf in control.items():
        kept = sum(
            client["control"][name] - client[MEMORY][f"client/control/left out/{name}"] for client in own.values()
        )
        torch.testing.assert_close(leaf, kept / len(SIZES), rtol=0, atol=1e-5)


def test_what_clients_keep_for_themselves_is_not_sent() -> None:
    (record,) = run(FedBN(**LIGHT), CompressTable(up={"name": "topk", "keep": 0.1}), rounds=1)
    names = {path.rpartition("/")[2] for own in record.own.values() for path in own[MEMORY]}
    assert names == {"hidden.weight", "hidden.bias", "out.weight", "out.bias"}


def test_a_robust_rule_judges_what_arrives() -> None:
    plain, rounded = (
        last(run(FedAvg(**LIGHT, rule="median"), table, rounds=2, model=Dense)).state["model"]
        for table in (CompressTable(), CompressTable(up={"name": "qsgd", "bits": 8}))
    )
    assert tree.sha256(plain) != tree.sha256(rounded)
    for name, leaf in plain.items():
        torch.testing.assert_close(rounded[name], leaf, rtol=0, atol=0.01)


@pytest.mark.parametrize("feedback", [True, False])
def test_masked_sums_give_what_plain_sums_give(feedback: bool) -> None:
    up = {"name": "randomk", "keep": 0.2, "mask": "round", "error_feedback": feedback}
    table, algorithm = CompressTable(up=up, down="float16"), FedAvg(**LIGHT, weights="uniform")
    plain = last(run(algorithm, table))
    protection = Protection(PrivacyTable(secure_aggregation=SecureTable()), HALF, len(SIZES), 3)
    masked = last(run(algorithm, table, protection=protection))
    for name, leaf in plain.state["model"].items():
        torch.testing.assert_close(masked.state["model"][name].float(), leaf.float(), rtol=0, atol=1e-5)
    sent = {report.bytes_up for report in masked.reports}
    assert max(sent) < max(report.bytes_up for report in run(algorithm, CompressTable(), rounds=1)[0].reports) / 2


def test_clipping_comes_after_compression(tmp_path: Path) -> None:
    """Without noise to speak of, the model moves by no more than the clip, whatever clients held back before."""
    privacy = PrivacyTable(dp=DpTable(noise_multiplier=1e-6, clip=0.01))
    sampling = Sampling(fraction=0.9, sampling="poisson")
    data, task = federation(SIZES), Task(Dense)
    protection = Protection(privacy, sampling, len(SIZES), 3, tmp_path)
    table = CompressTable(up={"name": "randomk", "keep": 0.3, "error_feedback": False})
    before = task.initial()
    algorithm = FedAvg(**LIGHT, weights="uniform")
    for record in fit(data, task, algorithm, 3, sampling=sampling, compress=table, protection=protection):
        after = record.state["model"]
        moved = float(tree.norm(tree.sub(after, before)))
        assert 0 < moved <= 0.01 * len(SIZES) / (0.9 * len(SIZES)) * 1.001
        before = after


def test_settings_that_do_not_fit_are_refused_before_the_first_round() -> None:
    with pytest.raises(InputError, match="'rank' of PowerSGD must be at most 7"):
        run(FedAvg(**LIGHT), CompressTable(up={"name": "powersgd", "rank": 8}), model=Dense)
    with pytest.raises(InputError, match="would drift away"):
        run(Scaffold(**LIGHT), CompressTable(up="eden"), model=Dense)


def test_a_number_too_large_for_half_precision_is_not_finite_and_never_silent() -> None:
    data, task = federation((20, 20)), Task(Dense)
    with pytest.raises(Exception, match="not finite"):
        list(fit(data, task, FedAvg(lr=1e7, batch_size=8), 1, compress=CompressTable(up="float16")))


def test_asynchronous_rounds_are_compressed_and_start_from_the_exact_model() -> None:
    """Lossless compression changes no bit. Rounded models on the way down change little, and rounding is not learnt."""
    data, task = federation(SIZES), Task(Dense)
    fleet = Fleet.of(System(step=1.0, speed={"name": "lognormal", "sigma": 1.0}), data)
    sampling, found = Sampling(mode="async", buffer=2, concurrency=4), []
    for table in (CompressTable(), CompressTable(up="lossless", down="lossless"), CompressTable(down="bfloat16")):
        record = last(fit(data, task, FedAvg(**LIGHT), 6, sampling=sampling, seed=5, fleet=fleet, compress=table))
        found.append(record.state["model"])
    assert tree.sha256(found[0]) == tree.sha256(found[1]) != tree.sha256(found[2])
    for name, leaf in found[0].items():
        torch.testing.assert_close(found[2][name], leaf, rtol=0, atol=2e-3)


def test_fewer_bytes_arrive_sooner() -> None:
    data, task = federation(SIZES), Task(Dense)
    fleet = Fleet.of(System(step=1.0, upload=1e-4, speed={"name": "lognormal", "sigma": 1.0}), data)
    times = [
        float(last(fit(data, task, FedAvg(**LIGHT), 2, seed=5, fleet=fleet, compress=table)).state["clock"]["now"])
        for table in (CompressTable(), CompressTable(up={"name": "topk", "keep": 0.05}))
    ]
    assert times[1] < times[0] / 2
