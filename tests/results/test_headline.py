"""The headline's curve and the rounds that count."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fedloom.results import headline
from fedloom.results.run_data import RunData
from fedloom.training.evaluation import Measured
from tests.experiment.round_records import RANKING, TASK, measured, ranked, record


@pytest.mark.parametrize(
    ("rule", "higher_is_better", "number"),
    [("final", True, 0.5), ("best", True, 0.9), ("best", False, 0.1), ("last:2", True, 0.7), ("last:9", True, 0.5)],
)
def test_the_rule_says_which_rounds_count(rule: str, higher_is_better: bool, number: float) -> None:
    assert headline.of_rounds([0.1, 0.9, 0.5], rule, higher_is_better) == pytest.approx(number)


def test_the_curve_is_the_global_model_if_it_was_measured(run: RunData) -> None:
    rounds, values = headline.curve(run, "fedavg", 1, "accuracy")
    assert rounds.tolist() == [1, 2, 3, 4, 5]
    assert values.tolist() == run.server_values("fedavg", 1, "accuracy")[1].tolist()
    assert list(headline.curves(run, "fedavg", "accuracy")) == [1, 2]
    assert headline.curves(run, "local", "accuracy") == {}  # it has no global model
    assert headline.curve_in_words(run) == "the global model on the test splits of all clients together"
    served = RunData(run.folder, run.cells, run.metrics, run.clients, {**run.facts, "server": {"test": 30}})
    assert headline.curve_in_words(served) == "the global model on the server's test data"


def test_otherwise_the_curve_is_the_mean_over_clients_after_training(run: RunData) -> None:
    unserved = RunData(run.folder, run.cells, run.metrics, run.clients, run.facts)
    unserved.__dict__["has_server_test"] = False
    rounds, values = headline.curve(unserved, "local", 2, "loss")
    stats = run.client_values("local", 2, "post_fit", "loss").by_round()
    assert (rounds.tolist(), values.tolist()) == (stats.index.tolist(), stats.mean.tolist())
    assert headline.curve_in_words(unserved).startswith("the mean over the drawn clients")


def test_a_round_is_graded_on_the_servers_test_data_or_else_by_the_mean_over_clients() -> None:
    assert headline.of_round(record(1), TASK) == pytest.approx({"loss": 1.0, "accuracy": 0.6})
    assert headline.of_round(record(1, server={}), TASK) == pytest.approx({"loss": 1.0, "accuracy": 0.6})
    last = {0: {"test": measured(10, 0.9)}, 1: {"test": Measured()}}
    ended = record(1, server={}, clients={"pre_fit": {0: {"test": measured(10, 0.1)}}, "final": last})
    assert headline.of_round(ended, TASK)["accuracy"] == pytest.approx(0.9)
    assert headline.of_round(record(1, server={}, clients={}), TASK) == {}


def test_progress_has_the_loss_and_the_first_metric_that_is_known() -> None:
    task = replace(TASK, metrics=("auroc", "accuracy", "f1"))
    values = {"loss": 1.0, "auroc": 0.7, "accuracy": 0.6, "f1": 0.5}
    assert headline.in_short(values, task) == {"loss": 1.0, "auroc": 0.7}
    assert headline.in_short({"loss": 1.0, "accuracy": 0.6, "f1": 0.5}, task) == {"loss": 1.0, "accuracy": 0.6}
    assert headline.in_short({}, task) == {}


def test_a_site_that_keeps_its_scores_to_itself_stops_no_round() -> None:
    """On a network a policy may hide them: then the mean is over the other clients, and all else is as it was."""
    hidden = Measured(2, {"loss": 2.0, "accuracy": 2.0})
    for order in ((ranked([0.1, 0.2], [0, 1]), hidden), (hidden, ranked([0.1, 0.2], [0, 1]))):
        clients = {"pre_fit": {client: {"test": part} for client, part in enumerate(order)}}
        found = headline.of_round(record(1, clients=clients, server={}), RANKING)
        assert found == {"loss": 1.0, "accuracy": 0.75, "auroc": 1.0}
    nobody = {"pre_fit": {0: {"test": hidden}, 1: {"test": ranked([0.1], [1])}}}
    assert "auroc" not in headline.of_round(record(1, clients=nobody, server={}), RANKING)


def test_the_last_round_shows_the_same_kind_of_number_as_the_others() -> None:
    trained, ended = {0: {"test": measured(10, 0.7)}}, {0: {"test": measured(10, 0.9)}}
    phases = {"post_fit": trained, "pre_fit": {0: {"test": measured(10, 0.1)}}}
    for clients in (phases, {**phases, "final": ended}):
        assert headline.of_round(record(1, server={}, clients=clients), TASK)["accuracy"] == pytest.approx(0.7)


def test_progress_says_if_numbers_are_about_models_after_local_training() -> None:
    phases = {"post_fit": {0: {"test": measured(10, 0.7)}}, "pre_fit": {0: {"test": measured(10, 0.1)}}}
    assert headline.is_after_training(record(1, server={}, clients=phases))
    assert not headline.is_after_training(record(1, server={}, clients={**phases, "post_fit": {0: {}}}))
    assert not headline.is_after_training(record(1, clients=phases))  # the global model on the server's data


def test_a_mean_is_over_the_clients_that_were_measured_also_in_a_round_that_does_not_count() -> None:
    assert headline.clients_of_round(record(1)) == {0, 1}  # on the server's data: who took part
    before = {"pre_fit": {1: {"test": measured(30, 0.4)}}, "post_fit": {}}
    abandoned = record(1, server={}, clients=before, reports=(), complete=False, absences={0: "gone"})
    assert headline.clients_of_round(abandoned) == {1}
