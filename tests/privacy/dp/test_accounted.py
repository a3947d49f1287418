"""The numbers that are shown beside an ε are those with which another accountant computes it again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import dp_accounting
import pytest
from dp_accounting import rdp

import fedloom as fl
from fedloom.cli.shared import print_summary
from fedloom.experiment.experiment_file import parse
from fedloom.privacy.dp.accounted import planned
from fedloom.privacy.table import PrivacyTable
from fedloom.results.disclosure import epsilons, spent, what_left
from fedloom.results.run_data import RunData
from fedloom.training.local import Training
from fedloom.tuning.estimate import estimate
from tests.conftest import Dense, federation


@pytest.mark.parametrize(
    ("table", "sampling"),
    [
        ({"dp": {"epsilon": 4.0}}, {"sampling": "poisson", "fraction": 0.5}),
        ({"dp": {"noise_multiplier": 3.0}}, {}),
        ({"dp": {"epsilon": 4.0, "noise": "local", "clip": 1.0}}, {}),
        ({"dp": {"epsilon": 4.0, "clip": 1.0, "correlated": True}}, {"count": 10}),
        ({"example_dp": {"epsilon": 4.0}}, {}),
    ],
)
def test_another_accountant_computes_the_same_epsilon(table: dict[str, Any], sampling: dict[str, Any]) -> None:
    training = {"fedavg": Training(batch_size=10, epochs=2.0)}
    (one,) = planned(PrivacyTable(**table), fl.Sampling(**sampling), 40, 50, 6, training)
    assert one.steps is not None
    accountant = dp_accounting.pld.PLDAccountant()
    gaussian = dp_accounting.GaussianDpEvent(one.noise_multiplier)
    accountant.compose(dp_accounting.PoissonSampledDpEvent(one.sampling_rate, gaussian), one.steps)
    assert accountant.get_epsilon(one.delta) == pytest.approx(one.epsilon, rel=1e-3)
    words = f"sampling rate {one.sampling_rate:.6g}, {one.steps} step{'s' * (one.steps > 1)}"
    if "example_dp" in table:
        assert f"{words}: those of the client with the fewest training examples. Clients with more" in str(one)
    else:
        assert str(one).endswith(f"{words}.")
    assert str(one).startswith("fedavg: ε" if "example_dp" in table else "ε = ")


def test_a_cohort_of_a_fixed_size_is_drawn_without_replacement() -> None:
    (one,) = planned(PrivacyTable(dp={"epsilon": 4.0, "clip": 1.0}), fl.Sampling(count=20), 40, 50, 6, {})
    accountant = rdp.RdpAccountant(None, dp_accounting.NeighboringRelation.REPLACE_ONE)
    assert one.noise_multiplier is not None
    gaussian = dp_accounting.GaussianDpEvent(one.noise_multiplier / 2)
    accountant.compose(dp_accounting.SampledWithoutReplacementDpEvent(40, 20, gaussian), 6)
    assert accountant.get_epsilon(one.delta) == pytest.approx(one.epsilon)
    assert one.words.endswith(
        "sampling rate 0.5 without replacement (one replaced client moves the sum by up to two clips), 6 steps, by "
        "Rényi accounting (RDP)"
    )


def test_noise_that_clients_add_together_says_which_noise_accountant_and_neighbours_it_is_about() -> None:
    table = PrivacyTable(dp={"epsilon": 4.0, "clip": 1.0, "noise": "distributed"}, secure_aggregation={})
    (one,) = planned(table, fl.Sampling(), 40, 50, 6, {})
    accountant = rdp.RdpAccountant(None, dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    accountant.compose(dp_accounting.GaussianDpEvent(one.noise_multiplier), 6)
    assert accountant.get_epsilon(one.delta) == pytest.approx(one.epsilon)
    assert one.words == (
        f"noise multiplier {one.noise_multiplier:.6g} of a sum of discrete Gaussians, sampling rate 1, 6 steps, by "
        "Rényi accounting (RDP) as for one Gaussian, where a client's change is replaced by zero"
    )


def test_check_the_report_and_json_show_the_numbers(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    privacy = PrivacyTable(dp={"epsilon": 8.0, "clip": 1.0}, example_dp={"epsilon": 2.0})
    algorithm = fl.FedAvg(weights="uniform")
    result = fl.run(
        federation([20] * 8), fl.Task(Dense), algorithm, 2, privacy=privacy, out=tmp_path / "run", backend="serial"
    )
    run = RunData.read(result.folder)
    (server,) = spent(run, "epsilon").values()
    (expected,) = planned(privacy.replace(example_dp=None), fl.Sampling(), 8, 12, 2, {})
    assert replace(server, algorithm="") == expected
    assert f"fedavg (seed 1): another accountant can compute ε again from {server.words}." in what_left(run)
    assert [row["kind"] for row in epsilons(run)["spent"]] == ["epsilon", "example_epsilon"]
    print_summary(result, as_json=True)
    assert '"noise_multiplier"' in capsys.readouterr().out


def test_check_says_from_which_numbers_epsilon_follows() -> None:
    data = {"source": "digits", "partition": {"name": "iid", "clients": 20}}
    values = {"rounds": 3, "data": data, "privacy": {"dp": {"epsilon": 8.0, "clip": 1.0}}}
    found = estimate(parse({**values, "algorithm": {"fedavg": {"weights": "uniform"}}}))
    (line,) = [line for line in found.lines() if line.startswith("ε = 8 at δ = 1e-05 follows from noise multiplier")]
    assert line.endswith("sampling rate 1, 3 steps.")
    assert found.json()["accounting"][0]["steps"] == 3
