"""Differential privacy of clients: bounded contributions, noisy sums, and an ε that survives crashes and rollbacks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fedloom as fl
from fedloom.algorithm import Update
from fedloom.errors import InputError, PrivacySpent, StoreError
from fedloom.experiment.run_folder import roll_back
from fedloom.experiment.store import Store
from fedloom.federation.engine import fit
from fedloom.privacy.dp import client_level, noise
from fedloom.privacy.dp.accounting import Mechanism, epsilon
from fedloom.privacy.dp.client_level import ClientLevel, bounded
from fedloom.privacy.dp.clipping import COUNT
from fedloom.privacy.dp.ledger import KEY, LEDGER
from fedloom.privacy.protection import Protection
from fedloom.privacy.table import DpTable, PrivacyTable
from fedloom.results.disclosure import what_left
from fedloom.results.run_data import RunData
from fedloom.task import Task
from tests.conftest import Normed
from tests.conftest import federation as some_clients
from tests.experiment.small_run import Net, StopAfter

POISSON = fl.Sampling(sampling="poisson", fraction=0.5)
UNIFORM = fl.FedAvg(weights="uniform", lr=0.2, batch_size=4)


class One(nn.Module):
    """A weight, a frozen weight and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))
        self.frozen = nn.Parameter(torch.ones(1), requires_grad=False)
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.w


def level(folder: Path | None = None, **more: Any) -> ClientLevel:
    """Ten clients, of which five are expected."""
    return ClientLevel(DpTable(**{"noise_multiplier": 1.0, "clip": 1.0, **more}), POISSON, 10, 5, folder)


def update(*changes: tuple[float, float], weight: Any = None) -> Update:
    """Clients that moved from w = (1, 1) by these changes, and counted a batch."""
    rows = torch.tensor(changes)
    leaves = {"w": 1 + rows, "frozen": torch.ones(len(rows), 1), "seen": torch.ones(len(rows), dtype=torch.int64)}
    weight = torch.ones(len(rows)) if weight is None else torch.tensor(weight)
    return Update({"model": leaves}, weight, positions={"model": "model"})


SHARED = {"model": {"w": torch.ones(2), "frozen": torch.ones(1), "seen": torch.tensor(0)}}


# --- the client's half


def test_a_client_contributes_its_clipped_change_and_leaves_the_rest_alone() -> None:
    sent = bounded(update((3.0, 4.0), (0.0, 0.5)), SHARED, Task(One), 1.0, 1.0, count=False)
    assert torch.allclose(sent.groups["model"]["w"], torch.tensor([[0.6, 0.8], [0.0, 0.5]]), atol=1e-5)
    assert sent.groups["model"]["frozen"].tolist() == [[0.0], [0.0]]
    assert sent.groups["model"]["seen"].tolist() == [0, 0]
    assert sent.weights("model").tolist() == [1.0, 1.0]
    assert sent.positions == {"model": "model"}


def test_a_weight_scales_the_clipped_change_and_never_beyond_its_bound() -> None:
    sent = bounded(
        update((3.0, 4.0), (3.0, 4.0), (0.0, 0.5), weight=[5.0, 50.0, 0.0]), SHARED, Task(One), 1.0, 10.0, False
    )
    assert sent.groups["model"]["w"].norm(dim=1).tolist() == pytest.approx([0.5, 1.0, 0.0], abs=1e-5)


def test_an_adaptive_clip_counts_short_changes() -> None:
    sent = bounded(update((3.0, 4.0), (0.0, 0.5), (0.1, 0.0)), SHARED, Task(One), 1.0, 1.0, count=True)
    assert sent.groups[COUNT][COUNT].tolist() == [-0.5, 0.5, 0.5]


def test_running_statistics_are_refused() -> None:
    algorithm = fl.FedAvg(weights="uniform", batch_size=4)
    protection = Protection(PrivacyTable(dp=DpTable(noise_multiplier=1.0, clip=1.0)), fl.Sampling(), 3, 1)
    with pytest.raises(InputError, match=r"dp cannot average 'norm.running_mean'.*nn.GroupNorm"):
        next(fit(some_clients((20, 20, 20)), Task(Normed), algorithm, 1, protection=protection))


def test_whole_numbers_that_are_no_model_are_refused() -> None:
    counts = Update({"counts": {"n": torch.tensor([1, 2])}}, torch.ones(2))
    with pytest.raises(InputError, match=r"floating-point numbers, and 'counts' has n of torch.int64"):
        bounded(counts, {}, Task(One), 1.0, 1.0, False)


# --- the server's half


def total(*sums: float) -> dict[str, dict[str, torch.Tensor]]:
    zero = torch.zeros((), dtype=torch.float64)
    return {"model": {"w": torch.tensor(sums), "frozen": torch.zeros(1), "seen": zero}}


def released(dp: ClientLevel, round: int = 1, sums: tuple[float, ...] = (1.0, 2.0)) -> torch.Tensor:
    return dp.release(round, 0, total(*sums), {"model": "model"}, SHARED, Task(One))["model"]["w"]


def test_the_sum_is_divided_by_the_expected_number_of_clients() -> None:
    found = released(level(noise_multiplier=1e-9))
    assert found.tolist() == pytest.approx([1 + 1 / 5, 1 + 2 / 5])
    assert found.dtype == torch.float32


def test_leaves_that_nobody_trains_keep_their_bits() -> None:
    found = level().release(1, 0, total(0.0, 0.0), {"model": "model"}, SHARED, Task(One))["model"]
    assert torch.equal(found["frozen"], SHARED["model"]["frozen"])
    assert torch.equal(found["seen"], SHARED["model"]["seen"])


def test_the_noise_of_a_mean_has_the_deviation_that_clip_and_multiplier_say() -> None:
    count, z, clip = 200_000, 1.5, 0.3
    dp = level(noise_multiplier=z, clip=clip)
    sums = {"change": {"w": torch.zeros(count)}}
    drawn = dp.release(1, 0, sums, {}, {}, Task(One))["change"]["w"]
    assert float(drawn.std()) == pytest.approx(z * clip / 5, rel=4 / (2 * count) ** 0.5)


def test_an_adaptive_clip_adds_more_noise_to_changes_and_moves_on() -> None:
    count, table = 200_000, DpTable(noise_multiplier=1.0, clip="adaptive")
    dp = ClientLevel(table, POISSON, 100, 5)
    sums = {"change": {"w": torch.zeros(count)}, COUNT: {COUNT: torch.tensor(-25.0, dtype=torch.float64)}}
    drawn = dp.release(1, 0, sums, {}, {}, Task(One))
    assert drawn.keys() == {"change"}
    wanted = (1 - (2 * 50 / 20) ** -2) ** -0.5 * 0.1 / 50
    assert float(drawn["change"]["w"].std()) == pytest.approx(wanted, rel=4 / (2 * count) ** 0.5)
    assert 0.1 < dp.clip < 0.12  # nobody's change was short enough
    assert dp.epsilon == epsilon({Mechanism(1.0, 0.5): 1}, 1e-5).value


def test_the_same_sum_gets_the_same_noise_and_costs_once(tmp_path: Path) -> None:
    first = released(level(tmp_path))
    again = level(tmp_path)
    assert torch.equal(released(again), first)
    assert again.ledger.releases == 1
    assert again.epsilon == epsilon({Mechanism(1.0, 0.5): 1}, 1e-5).value


def test_another_sum_round_or_clip_gets_other_noise_and_costs_again(tmp_path: Path) -> None:
    dp = ClientLevel(DpTable(noise_multiplier=1.0, clip=1.0), fl.Sampling(), 5, 5, tmp_path)
    first = released(dp)
    noises = [first - torch.tensor([1.2, 1.4]), released(dp, round=2) - torch.tensor([1.2, 1.4])]
    noises.append(released(dp, sums=(1.0, 2.5)) - torch.tensor([1.2, 1.5]))
    dp.clip = 2.0
    noises.append((released(dp) - torch.tensor([1.2, 1.4])) / 2)
    assert dp.ledger.releases == 4
    for one in range(4):
        for other in range(one):
            assert not torch.allclose(noises[one], noises[other], atol=1e-3)


def test_it_is_charged_before_anything_is_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(noise, "noise_like", crash)
    with pytest.raises(KeyboardInterrupt):
        released(level(tmp_path))
    assert level(tmp_path).ledger.releases == 1


def test_nothing_is_released_beyond_epsilon(tmp_path: Path) -> None:
    most = epsilon({Mechanism(1.0, 0.5): 2}, 1e-5).value
    dp = level(tmp_path, epsilon=most)
    released(dp, 1)
    assert not dp.is_spent
    released(dp, 2)
    assert dp.is_spent
    with pytest.raises(PrivacySpent, match=r"Nothing more was released: another round would cost more than ε"):
        released(dp, 3)
    released(dp, 2)  # what was paid for
    assert dp.ledger.releases == 2


def test_the_noise_is_calibrated_to_the_planned_rounds_once(tmp_path: Path) -> None:
    table = DpTable(epsilon=3.0, clip=1.0)
    dp = ClientLevel(table, POISSON, 10, 5, tmp_path)
    z = dp.mechanism.noise_multiplier
    assert 2.99 < epsilon({Mechanism(z, 0.5): 5}, 1e-5).value <= 3.0
    more = ClientLevel(table, POISSON, 10, 50, tmp_path)  # the run is continued with more rounds
    assert more.mechanism == dp.mechanism


def test_cohorts_come_from_the_secret(tmp_path: Path) -> None:
    drawn = [ClientLevel(DpTable(noise_multiplier=1.0, clip=1.0), POISSON, 100, 5, tmp_path / name) for name in "ab"]
    assert drawn[0].draw(1) != drawn[1].draw(1)
    assert drawn[0].draw(1) == ClientLevel(drawn[0].table, POISSON, 100, 5, tmp_path / "a").draw(1)
    assert drawn[0].draw(1) != drawn[0].draw(2)


def test_the_neighbours_are_stated(tmp_path: Path) -> None:
    table = DpTable(noise_multiplier=1.0, clip=1.0)
    assert ClientLevel(table, POISSON, 10, 5).adjacency == "add or remove one client"
    assert ClientLevel(table, fl.Sampling(count=5), 10, 5).adjacency == "replace one client"
    assert ClientLevel(table, fl.Sampling(), 10, 5).mechanism == Mechanism(1.0, 1.0, of=10)
    assert "add or remove one client" in ClientLevel(table, fl.Sampling(), 10, 5).lines()[0]
    assert "δ should be smaller than 1 / 1000000" in ClientLevel(table, fl.Sampling(), 10**6, 5).lines()[1]


def test_on_a_network_a_cohort_is_not_secret_and_amplifies_nothing() -> None:
    table = DpTable(noise_multiplier=1.0, clip=1.0)
    dp = ClientLevel(table, fl.Sampling(count=5), 10, 5, sampled=False)
    assert dp.mechanism == Mechanism(1.0)
    assert dp.expected == 5
    assert dp.adjacency == "add or remove one client"


# --- what is refused


@pytest.mark.parametrize(
    ("cohort", "words"),
    [
        ({"redraw_every": 2}, r"\[cohort\] redraw_every = 2: a cohort that stays"),
        ({"everyone_every": 3}, r"everyone_every = 3"),
        ({"quorum": 0.5}, r"quorum = 0.5: whether a round counts"),
        ({"over_select": 0.5}, r"over_select = 0.5"),
        ({"sampling": "window", "count": 2}, r"sampling = \"window\": everybody knows"),
    ],
)
def test_a_cohort_that_cannot_be_accounted_for_is_refused(cohort: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        ClientLevel(DpTable(noise_multiplier=1.0, clip=1.0), fl.Sampling(**cohort), 10, 5)


def test_an_adaptive_clip_with_few_clients_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"more clients in a round than 10 × the noise multiplier 1, and 5 are expected"
    ):
        level(clip="adaptive")


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        (fl.FedAvg(), r"needs a bound on how much one client counts, and fedavg .* max_examples"),
        (fl.QFedAvg(), "formulas of qfedavg need exact ones"),
        (fl.FedNova(weights="uniform"), "formulas of fednova"),
        (fl.Pooled(), "pooled trains on all examples in one place"),
    ],
)
def test_an_algorithm_that_noise_or_weights_would_break_is_refused(algorithm: fl.Algorithm, words: str) -> None:
    with pytest.raises(InputError, match=words):
        client_level.weight_bound(algorithm, fl.Sampling())


def test_weights_are_bounded_by_max_examples() -> None:
    assert client_level.weight_bound(fl.FedAvg(), fl.Sampling(max_examples=50)) == 50
    assert client_level.weight_bound(UNIFORM, fl.Sampling(max_examples=50)) == 1
    assert client_level.weight_bound(fl.FedDyn(), fl.Sampling(max_examples=50)) == 1


# --- whole runs


def clients(count: int = 12) -> fl.Federation:
    random = np.random.default_rng(3)
    x = random.normal(size=(10 * count, 3)).astype("float32")
    return fl.Federation.from_arrays(x, (x[:, 0] > 0).astype(int), client=np.repeat(np.arange(count), 10))


def run(folder: Path, rounds: int = 4, algorithms: Any = UNIFORM, dp: dict[str, Any] | None = None, **more: Any) -> Any:
    table = PrivacyTable(dp=DpTable(**(dp or {"epsilon": 20.0, "clip": 0.5})))
    given = {"cohort": POISSON, "backend": "serial", "evaluate": fl.Evaluation(splits=()), **more}
    return fl.run(clients(), fl.Task(Net), algorithms, rounds, out=folder, privacy=table, **given)


def spent(folder: Path) -> list[float]:
    with Store(folder, read_only=True) as store:
        rows = store.rows("server_metrics")
    return [row["value"] for row in rows if row["metric"] == "epsilon"]


def test_two_fresh_runs_differ_and_a_stopped_one_goes_on_to_the_same_bits_and_epsilon(tmp_path: Path) -> None:
    for name in ("whole", "parts"):
        folder = tmp_path / name / "cells" / "fedavg-1"
        folder.mkdir(parents=True)
        (folder / KEY).write_bytes(b"k" * 32)
    whole, other = run(tmp_path / "whole"), run(tmp_path / "other")
    assert whole.weights_sha256 != other.weights_sha256
    for stop in (1, 2):
        run(tmp_path / "parts", should_stop=StopAfter(stop))
    assert run(tmp_path / "parts").weights_sha256 == whole.weights_sha256
    assert spent(tmp_path / "parts") == spent(tmp_path / "whole") == spent(tmp_path / "other")
    assert len(spent(tmp_path / "whole")) == 4
    assert sorted(spent(tmp_path / "whole")) == spent(tmp_path / "whole")
    assert 19 < spent(tmp_path / "whole")[-1] <= 20


@pytest.mark.slow
def test_worker_processes_give_the_bits_of_one_process(tmp_path: Path) -> None:
    found = []
    for name, more in {"serial": {"backend": "serial"}, "vector": {"backend": "vector", "workers": 2}}.items():
        folder = tmp_path / name / "cells" / "fedavg-1"
        folder.mkdir(parents=True)
        (folder / KEY).write_bytes(b"k" * 32)
        found.append(run(tmp_path / name, rounds=2, **{**more, "group": 1}).weights_sha256)
    assert found[0] == found[1]


KILLED = """
import sys
from pathlib import Path
from tests.privacy.dp.test_client_level import run
if __name__ == "__main__":
    run(Path(sys.argv[1]), rounds=3, dp={"noise_multiplier": 1.0, "clip": 0.5})
"""


@pytest.mark.parametrize("point", ["privacy.charged:2", "checkpoint.rename:2", "checkpoint.renamed:2"])
@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_bits_and_epsilon(tmp_path: Path, point: str) -> None:
    for name in ("whole", "killed"):
        folder = tmp_path / name / "cells" / "fedavg-1"
        folder.mkdir(parents=True)
        (folder / KEY).write_bytes(b"k" * 32)
    dp = {"noise_multiplier": 1.0, "clip": 0.5}
    whole = run(tmp_path / "whole", rounds=3, dp=dp)
    environment = {**os.environ, "FEDLOOM_KILL_AT": point, "PYTHONPATH": str(Path(__file__).parents[3])}
    killed = subprocess.run([sys.executable, "-c", KILLED, tmp_path / "killed"], env=environment, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert run(tmp_path / "killed", rounds=3, dp=dp).weights_sha256 == whole.weights_sha256
    assert spent(tmp_path / "killed") == spent(tmp_path / "whole")
    lines = [(tmp_path / name / "cells" / "fedavg-1" / LEDGER).read_text() for name in ("whole", "killed")]
    assert lines[0] == lines[1]


def test_a_rolled_back_release_stays_spent(tmp_path: Path) -> None:
    run(tmp_path, rounds=3, dp={"noise_multiplier": 1.0, "clip": 0.5})
    before = spent(tmp_path)
    roll_back(tmp_path, 2)
    ledger = tmp_path / "cells" / "fedavg-1" / LEDGER
    assert len(ledger.read_text().splitlines()) == 1 + 3
    run(tmp_path, rounds=3, dp={"noise_multiplier": 1.0, "clip": 0.5})  # the same sum again: nothing new is charged
    assert spent(tmp_path) == before
    lines = ledger.read_text().splitlines()
    entry = json.loads(lines[-1])
    ledger.write_text("\n".join([*lines[:-1], json.dumps({**entry, "release": "another sum"})]) + "\n")
    roll_back(tmp_path, 2)
    run(tmp_path, rounds=3, dp={"noise_multiplier": 1.0, "clip": 0.5})  # another sum was released before: both count
    assert spent(tmp_path)[-1] == epsilon({Mechanism(1.0, 0.5): 4}, 1e-5).value > before[-1]


def test_a_second_sum_of_the_same_drawn_clients_is_not_released(tmp_path: Path) -> None:
    """Its cohort is not drawn anew, so no amplification by sampling covers both."""
    run(tmp_path, rounds=3, dp={"noise_multiplier": 1.0, "clip": 0.5})
    ledger = tmp_path / "cells" / "fedavg-1" / LEDGER
    lines = ledger.read_text().splitlines()
    entry = json.loads(lines[-1])
    other = {**entry, "release": entry["release"].replace("sum ", "sum 0")}
    ledger.write_text("\n".join([*lines[:-1], json.dumps(other)]) + "\n")
    roll_back(tmp_path, 2)
    before = ledger.read_text()
    with pytest.raises(PrivacySpent, match=r"Round 3 was released with another sum before.*Start again with --fresh"):
        run(tmp_path, rounds=3, dp={"noise_multiplier": 1.0, "clip": 0.5})
    assert ledger.read_text() == before


def test_a_run_stops_before_the_round_that_would_overspend(tmp_path: Path) -> None:
    most = epsilon({Mechanism(1.0, 0.5): 2}, 1e-5).value
    result = run(tmp_path, rounds=5, dp={"noise_multiplier": 1.0, "epsilon": most, "clip": 0.5})
    assert result.status == "done"
    assert spent(tmp_path) == pytest.approx([epsilon({Mechanism(1.0, 0.5): n}, 1e-5).value for n in (1, 2)])
    assert result.weights_sha256 is not None


def test_an_empty_cohort_releases_noise_and_is_charged(tmp_path: Path) -> None:
    drawn = {bytes([n]) * 32: [noise.cohort(bytes([n]) * 32, round, 12, 0.1) for round in (1, 2)] for n in range(50)}
    secret = next(secret for secret, (first, second) in drawn.items() if first and not second)
    folder = tmp_path / "cells" / "fedavg-1"
    folder.mkdir(parents=True)
    (folder / KEY).write_bytes(secret)
    rare = fl.Sampling(sampling="poisson", fraction=0.1)
    result = run(tmp_path, rounds=2, dp={"noise_multiplier": 1.0, "clip": 0.5}, cohort=rare, keep_models=True)
    assert {row["round"] for row in result.rows("participants")} == {1}
    assert len(spent(tmp_path)) == 2
    first, second = (load_file(folder / "models" / f"round-00000{n}.safetensors") for n in (1, 2))
    moved = torch.cat([(second[name] - first[name]).flatten() for name in first])
    assert float(moved.std()) == pytest.approx(0.5 / 1.2, rel=0.4)


def test_a_checkpoint_that_knows_more_than_the_ledger_is_refused(tmp_path: Path) -> None:
    run(tmp_path, rounds=4, should_stop=StopAfter(2))
    ledger = tmp_path / "cells" / "fedavg-1" / LEDGER
    ledger.write_text(ledger.read_text().splitlines()[0] + "\n")
    with pytest.raises(StoreError, match="nobody knows what was spent"):
        run(tmp_path, rounds=4)


def test_an_algorithm_that_asks_twice_a_round_is_refused(tmp_path: Path) -> None:
    class Twice(fl.FedAvg):
        def round(self, state: Any, cohort: Any) -> Any:
            return super().round(super().round(state, cohort), cohort)

    with pytest.raises(InputError, match="plans one release a round, and Twice asks clients more often"):
        run(tmp_path, algorithms={"twice": Twice(weights="uniform")})


@pytest.mark.parametrize(
    "algorithm",
    [
        fl.Scaffold(lr=0.1),
        fl.FedDyn(lr=0.1),
        fl.FedAdam(weights="uniform", lr=0.1),
        fl.FedSGD(weights="uniform", lr=0.1),
        fl.IFCA(weights="uniform", lr=0.1),
        fl.Ditto(weights="uniform", lr=0.1),
    ],
)
def test_algorithms_that_take_means_run(tmp_path: Path, algorithm: fl.Algorithm) -> None:
    result = run(tmp_path, rounds=2, algorithms={"one": algorithm}, dp={"noise_multiplier": 0.01, "clip": 10.0})
    assert result.status == "done"
    assert len(spent(tmp_path)) == 2


def test_with_hardly_any_noise_and_everyone_it_is_the_mean(tmp_path: Path) -> None:
    everyone: dict[str, Any] = {"cohort": fl.Sampling(), "rounds": 2}
    dp = run(tmp_path / "dp", dp={"noise_multiplier": 1e-6, "clip": 100.0}, **everyone)
    given = {"backend": "serial", "evaluate": fl.Evaluation(splits=())}
    plain = fl.run(clients(), fl.Task(Net), UNIFORM, 2, out=tmp_path / "plain", cohort=fl.Sampling(), **given)
    for name, leaf in plain.weights()["model"].items():
        assert torch.allclose(dp.weights()["model"][name], leaf, atol=1e-3)


def test_fixed_cohorts_report_the_epsilon_of_replacing_a_client(tmp_path: Path) -> None:
    result = run(tmp_path, rounds=2, dp={"noise_multiplier": 4.0, "clip": 0.5}, cohort=fl.Sampling(count=6))
    found = {row["metric"]: row["value"] for row in result.rows("server") if row["round"] == 2}
    assert found["replace_epsilon"] == epsilon({Mechanism(4.0, 0.5, of=12): 2}, 1e-5).value
    assert "epsilon" not in found
    assert {len(ids) for ids in cohorts(result).values()} == {6}


def cohorts(result: Any) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    for row in result.rows("participants"):
        found.setdefault(row["round"], set()).add(row["client"])
    return found


def test_the_report_says_what_each_cell_spent_and_what_they_spend_together(tmp_path: Path) -> None:
    run(tmp_path, rounds=1, dp={"noise_multiplier": 4.0, "clip": 0.5}, seeds=2)
    text = " ".join(what_left(RunData.read(tmp_path)))
    one = epsilon({Mechanism(4.0, 0.5): 1}, 1e-5).value
    about = "two runs that differ in one client, added or removed"
    assert f"fedavg (2 seeds: 1, 2) has spent ε = {one:.3g} in each, for {about}." in text
    assert (
        f"These 2 trained on the same data: a person who sees all of them learns as much as ε = {2 * one:.3g}" in text
    )


def test_clients_that_send_nothing_cost_nothing(tmp_path: Path) -> None:
    alone = {"local": fl.LocalOnly(lr=0.1)}
    result = run(tmp_path, rounds=2, algorithms=alone, dp={"noise_multiplier": 1.0, "clip": 0.5})
    assert result.status == "done"
    assert spent(tmp_path) == [0.0, 0.0]


# --- correlated noise


TREE = {"noise_multiplier": 8.0, "clip": 0.5, "correlated": True}
TURNS = fl.Sampling(count=4)


def test_correlated_noise_is_one_release_of_a_tree_and_clients_take_turns(tmp_path: Path) -> None:
    result = run(tmp_path, rounds=5, dp=TREE, cohort=TURNS)
    # three turns of four clients: at most two participations, three rounds apart; nodes of 1, 2 and 4 rounds
    sensitivity = (2 * (1 + 1 + 2)) ** 0.5
    assert spent(tmp_path) == [epsilon({Mechanism(8.0 / sensitivity): 1}, 1e-5).value] * 5
    drawn = cohorts(result)
    assert [len(drawn[round]) for round in range(1, 6)] == [4] * 5
    assert drawn[1] == drawn[4]
    assert drawn[2] == drawn[5]
    assert len(drawn[1] | drawn[2] | drawn[3]) == 12


def test_correlated_noise_is_calibrated_as_a_whole() -> None:
    dp = ClientLevel(DpTable(epsilon=4.0, clip=1.0, correlated=True), TURNS, 12, 5)
    assert 3.99 < epsilon({dp.mechanism: 1}, 1e-5).value <= 4.0


def test_a_correlated_round_is_released_once(tmp_path: Path) -> None:
    dp = ClientLevel(DpTable(**TREE), TURNS, 12, 2, tmp_path)
    first = released(dp, 1)
    assert torch.equal(released(dp, 1), first)
    with pytest.raises(PrivacySpent, match="Round 1 was released with another sum"):
        released(dp, 1, sums=(5.0, 5.0))
    assert not dp.is_spent
    released(dp, 2)
    assert dp.is_spent
    with pytest.raises(PrivacySpent, match="is for 2 rounds, and no more"):
        released(dp, 3)


def test_a_correlated_run_continues_with_the_same_bits(tmp_path: Path) -> None:
    for name in ("whole", "parts"):
        folder = tmp_path / name / "cells" / "fedavg-1"
        folder.mkdir(parents=True)
        (folder / KEY).write_bytes(b"k" * 32)
    whole = run(tmp_path / "whole", dp=TREE, cohort=TURNS)
    run(tmp_path / "parts", dp=TREE, cohort=TURNS, should_stop=StopAfter(2))
    assert run(tmp_path / "parts", dp=TREE, cohort=TURNS).weights_sha256 == whole.weights_sha256


def test_correlated_noise_refuses_what_it_cannot_account_for() -> None:
    with pytest.raises(InputError, match="lets clients take turns"):
        ClientLevel(DpTable(**TREE), POISSON, 12, 5)
    for wrong in ({"clip": "adaptive"}, {"noise": "local"}):
        with pytest.raises(InputError, match="correlated = true needs"):
            DpTable(**{**TREE, **wrong})
