"""What a run over the network leaves out, and how many clients it invites."""

from __future__ import annotations

import json
from math import nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedloom.data.preprocessing import Column, Preprocessing
from fedloom.errors import InputError
from fedloom.experiment.progress import Silent
from fedloom.federation.sampling import Sampling, widened
from fedloom.network.agent.agent import Agent
from fedloom.network.coordinator.network_run import NetworkRun, federated
from fedloom.network.protocol.rejection import Rejected
from fedloom.network.protocol.signatures import Signer
from fedloom.network.protocol.token import Token
from fedloom.results.comparisons import comparisons
from fedloom.results.model_card import write_card
from fedloom.results.report import html
from fedloom.results.report_warnings import cautions
from fedloom.results.run_data import RunData
from fedloom.results.tables import all_tables
from tests.conftest import slow_after
from tests.network.conftest import EXPERIMENT, HELLO, InProcessRun, in_process, serial_weights, weights

DIGITS = HELLO.model_copy(update={"features": (64,), "dtype": "uint8", "classes": tuple("0123456789")})


def test_over_selection_invites_extra_clients() -> None:
    assert widened(Sampling(count=10, over_select=0.25)).size(100) == 13
    assert widened(Sampling(count=10, over_select=0.25)).size(11) == 11
    assert widened(Sampling(fraction=0.1, sampling="poisson", over_select=0.5)).fraction == pytest.approx(0.15)
    assert widened(Sampling(count=10)).size(100) == 10


@pytest.mark.parametrize(("quorum", "needed"), [(0.0, 0), (0.5, 1), (30, 1)])
def test_with_extra_clients_a_round_for_which_nobody_is_drawn_counts_only_without_a_quorum(
    quorum: float, needed: int
) -> None:
    poisson = Sampling(fraction=0.5, sampling="poisson", over_select=0.5, quorum=quorum)
    assert widened(poisson).needed(100) == needed


def test_what_needs_all_data_in_one_place_is_left_out_with_a_note() -> None:
    from fedloom.errors import InputError
    from fedloom.experiment.experiment_file import parse

    experiment, notes = federated(parse({"algorithm": {"fedavg": {}, "pooled": {}}, "evaluate": {"universal": True}}))
    assert list(experiment.algorithm) == ["fedavg"]
    assert not experiment.evaluate.universal
    assert len(notes) == 2
    with pytest.raises(InputError, match="nothing to serve"):
        federated(parse({"algorithm": {"pooled": {}}}))


def test_the_data_of_the_server_is_checked_before_anybody_joins(tmp_path: Path) -> None:
    from fedloom.errors import InputError
    from fedloom.experiment.experiment_file import parse

    (tmp_path / "holdout.csv").write_text("a,b,y\n" + "1,2,0\n3,4,1\n" * 10)
    data = {"source": "csv", "path": str(tmp_path / "holdout.csv"), "label": "y", "server": 9}
    with pytest.raises(InputError, match="Give a partition"):
        NetworkRun(parse({"data": data, "task": {"model": "logistic"}}), tmp_path / "net")
    with pytest.raises(InputError, match="features"):
        NetworkRun(parse({"data": {**data, "server": 1.0}, "task": {"model": "digits_mlp"}}), tmp_path / "net")
    assert not (tmp_path / "net").exists()


@pytest.mark.parametrize("data", [{}, {"data": {"source": "csv", "path": "elsewhere.csv", "label": "y"}}])
def test_a_target_of_no_metric_is_refused_before_anybody_joins(data: dict[str, Any], tmp_path: Path) -> None:
    from fedloom.errors import InputError
    from fedloom.experiment.experiment_file import parse

    values = {**data, "task": {"model": "logistic"}, "evaluate": {"target": {"accurcy": 0.9}}}
    with pytest.raises(InputError, match=r"target must be about one of loss, accuracy\. Got 'accurcy'"):
        NetworkRun(parse(values), tmp_path / "net")
    assert not (tmp_path / "net").exists()


def test_all_data_of_the_file_may_be_the_servers(tmp_path: Path) -> None:
    run = InProcessRun(tmp_path / "net", {**EXPERIMENT, "rounds": 1, "data": {**EXPERIMENT["data"], "server": 1.0}}, {})
    for table in run.tables:
        del table["data"]["server"]  # of the coordinator's file
    assert len(run.plan.federation(1).server["test"][1]) == 1797
    assert run.run(Silent()).status == "done"
    assert comparisons(RunData.read(tmp_path / "net"), "accuracy")[0].key == "server_test"


def test_a_private_run_that_learnt_nothing_says_so_and_on_how_many_examples(tmp_path: Path) -> None:
    """Nothing leaves the clients, so the server's own test examples are all that there is."""
    values = {
        **EXPERIMENT,
        "rounds": 1,
        "data": {**EXPERIMENT["data"], "server": 50},
        "task": {"model": "digits_mlp", "metrics": ["accuracy"]},
        "train": {"lr": 1e-6},
        "algorithm": {"fedavg": {"weights": "uniform"}},
        "privacy": {"secure_aggregation": {}, "example_dp": {"epsilon": 4.0}},
    }
    served = InProcessRun(tmp_path / "net", values, {}, {}, {}, {}, max_examples=2000)
    result = served.run(Silent())
    run = RunData.read(tmp_path / "net")
    tested = torch.bincount(served.plan.federation(1).server["test"][1], minlength=10).tolist()
    assert run.facts["server"] == {"test": 50}
    assert run.facts["labels"] == {"classes": [*"0123456789"], "counts": [], "tested": [], "server": tested}
    found = cautions(run)
    assert sum("better than always predicting" in text for text in found) == 1
    assert sum("a sum may be over only 3 clients" in text for text in found) == 1
    assert len({*found}) == len(found)
    (tmp_path / "model.pt2").write_bytes(b"a model")
    card = write_card(result, tmp_path, [tmp_path / "model.pt2"])
    assert card is not None
    for text in (html(run, [], all_tables(run)), card.read_text()):
        assert "server itself holds: 50." in text
        assert text.count("a sum may be over only 3 clients") == 1


def test_a_virtual_clock_is_not_for_a_network(tmp_path: Path) -> None:
    from fedloom.errors import InputError
    from fedloom.experiment.experiment_file import parse

    with pytest.raises(InputError, match=r"\[system\] is for simulations"):
        NetworkRun(parse({"system": {"step": 1.0}}), tmp_path)


@pytest.mark.parametrize(
    ("server", "kept"), [("none", ()), ("test", ("test",)), (0.1, ("test",)), ({"validation": 0.1}, ("validation",))]
)
def test_with_secure_aggregation_only_data_of_the_server_is_evaluated(server: Any, kept: tuple[str, ...]) -> None:
    """Otherwise the server's splits are those of all clients, whose numbers leave one by one."""
    from fedloom.experiment.experiment_file import parse

    values: dict[str, Any] = {"data": {"server": server}, "evaluate": {"server": ["validation", "test"]}}
    secure = {"cohort": {"max_examples": 10}, "privacy": {"secure_aggregation": {}}}
    experiment, notes = federated(parse({**values, **secure}))
    assert experiment.evaluate.server == kept
    left_out = [split for split in ("validation", "test") if split not in kept]
    assert any(note.startswith(f"evaluate.server: {', '.join(left_out)} left out") for note in notes)
    assert federated(parse(values))[0].evaluate.server == ("validation", "test")


def test_the_operator_is_told_if_secure_sums_of_two_algorithms_begin_alike() -> None:
    from fedloom.experiment.experiment_file import parse

    values: dict[str, Any] = {"cohort": {"max_examples": 10}, "privacy": {"secure_aggregation": {}}}
    told = "fedavg, fedprox begin with the same weights. If a client is missing from one of their first sums"
    for algorithms, is_told in ((("fedavg", "fedprox"), True), (("fedavg",), False)):
        _, notes = federated(parse({**values, "algorithm": {name: {} for name in algorithms}}))
        assert any(note.startswith(told) for note in notes) == is_told


class RunWithALiar(InProcessRun):
    """A run whose first agent lies about itself and then never answers."""

    lie: dict[str, Any]
    refused = ""

    def agent(self, number: int) -> Agent:
        if number == 0:
            signer, token = Signer(self.folder.parent / "liar.key"), Token.new("")
            self.ledger.invite(token.digest)
            signer.agent = self.ledger.enrol(token.digest, "a-liar", signer.public)
            try:
                hello = SimpleNamespace(model_dump_json=lambda: json.dumps({**DIGITS.model_dump(), **self.lie}))
                in_process(self.requests, signer).post("/v1/hello", hello)  # type: ignore[arg-type]
            except Rejected as error:
                self.refused = f"{error.code}: {error}"
        return super().agent(number)


def facts(**changes: Any) -> dict[str, Any]:
    return {"name": "c", "train": 5, "validation": 5, "test": 5, **changes}


@pytest.mark.parametrize(
    ("lie", "why"),
    slow_after(
        6,
        [
            ({"setup": {"group": "many", "micro_batch": 0, "evaluation_batch": -1}}, ""),
            ({"classes": tuple("abcdefghij")}, ""),  # the model takes them, but the other sites have others
            ({"clients": (facts(number=2**53),)}, ""),
            ({"clients": (facts(number=7), facts(number=9))}, ""),
            ({"clients": (facts(number=0), facts())}, "mismatch: its [site] hosts must number every client"),
            ({"clients": (facts(number=0), facts(number=0))}, "mismatch: its [site] hosts must number every client"),
            ({"features": (10**8,)}, "mismatch: an example has 100,000,000 values, and at most 16,777,216 are allowed"),
            ({"features": (2**53, 2**53)}, "mismatch: an example has "),
            ({"features": (63,)}, "mismatch: The model digits_mlp does not take the data"),
            ({"classes": tuple(map(str, range(11)))}, "mismatch: "),
            ({"labels": (10**8,)}, "mismatch: an example has 100,000,000 values"),
            ({"dtype": "nn"}, "malformed: "),
            ({"clients": (facts(train=2**60),)}, "malformed: "),
        ],
    ),
)
def test_what_an_agent_says_about_itself_decides_nothing_for_the_others(
    tmp_path: Path, lie: dict[str, Any], why: str
) -> None:
    values = {**EXPERIMENT, "rounds": 1}
    run = RunWithALiar(tmp_path / "net", values, {}, {})
    run.lie = lie
    assert run.run(Silent()).status == "done"
    assert run.refused.startswith(why)
    assert bool(run.refused) == bool(why)
    assert weights(tmp_path / "net") == serial_weights(values, tmp_path / "serial")


def test_agents_whose_data_differ_wait_for_others_and_the_operator_is_told(tmp_path: Path) -> None:
    run = InProcessRun(tmp_path / "net", EXPERIMENT, {}, {})
    for name, classes in (("kerry", "0123456789"), ("cork", "abcdefghij")):
        one = run.pool.mark_seen(run.ledger.enrol(_token(run), name, name.encode().hex()), name)
        run.pool.admit(one, DIGITS.model_copy(update={"classes": tuple(classes)}))
    assert run._agreeing(2) == []
    assert run._agreeing(("kerry", "cork")) == []
    (said,) = {text for text in run.said if text.startswith("Waiting for agents whose data")}
    assert said == (
        "Waiting for agents whose data and [site] hosts fit together. These are ready: cork, kerry. cork and kerry "
        'differ. classes: ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"] at kerry, ["a", "b", "c", "d", "e", "f", '
        '"g", "h", "i", "j"] at cork.'
    )
    run._agreeing(2)
    assert run.said.count(said) == 1
    assert [one.name for one in run._agreeing(("cork",))] == ["cork"]
    run.ledger.close()
    run._held.close()


@pytest.mark.parametrize("odd", ["berlin", "muenster", "oslo"])
@pytest.mark.parametrize("lie", [{"prepared": "ab" * 32}, {"classes": tuple("abcdefghij")}])
def test_the_agent_whose_data_differ_from_those_of_the_others_is_named(
    tmp_path: Path, odd: str, lie: dict[str, Any]
) -> None:
    run = InProcessRun(tmp_path / "net", EXPERIMENT, {}, {})
    sites = ("berlin", "muenster", "oslo")
    for name in sites:
        one = run.pool.mark_seen(run.ledger.enrol(_token(run), name, name.encode().hex()), name)
        run.pool.admit(one, DIGITS.model_copy(update=lie if name == odd else {}))
    assert run._agreeing(sites) == []
    (said,) = {text for text in run.said if text.startswith("Waiting for agents whose data")}
    others = ", ".join(name for name in sites if name != odd)
    assert f"These are ready: berlin, muenster, oslo. {odd} differs from {others}. " in said
    assert said.count("differs from") == 1
    run.ledger.close()
    run._held.close()


@pytest.mark.parametrize(("hosted", "warned"), [((3, 2), True), ((3, 3), False), ((2, 1), False)])
def test_the_operator_is_told_if_one_agent_hosts_most_clients(
    tmp_path: Path, hosted: tuple[int, int], warned: bool
) -> None:
    run = InProcessRun(tmp_path / "net", EXPERIMENT, {}, {})
    for name, count in zip(("kerry", "cork"), hosted, strict=True):
        one = run.pool.mark_seen(run.ledger.enrol(_token(run), name, name.encode().hex()), name)
        run.pool.admit(one, DIGITS.model_copy(update={"clients": DIGITS.clients * count}))
    run._fix_clients(2)
    note = f"kerry hosts {hosted[0]} of {sum(hosted)} clients: the median that outliers are compared with is its own"
    assert (note in run.said) == warned
    run.ledger.close()
    run._held.close()


def agree_on_wards(folder: Path) -> Preprocessing:
    columns = (Column(name="age"), Column(name="ward", categories=("general", "icu")))
    statistics = {"mean": (50.0, 0.5, 0.5), "std": (15.0, 0.5, 0.5)}
    agreed = Preprocessing(columns=columns, **statistics, shape=(3,), classes=("0", "1"), label=("dead",))
    agreed.write(folder / "agreed.json")
    return agreed


@pytest.mark.parametrize("normalize", ["federated", "none"])
def test_the_coordinator_keeps_the_preprocessing_that_sites_use(tmp_path: Path, normalize: str) -> None:
    rows = "".join(f"{age},{('icu', 'general')[age % 2]},{age % 3 > 0:d}\n" for age in range(20, 80))
    (tmp_path / "data.csv").write_text(f"age,ward,dead\n{rows}")
    agreed = agree_on_wards(tmp_path)
    data = {"source": "csv", "path": str(tmp_path / "data.csv"), "label": "dead", "normalize": normalize}
    data |= {"partition": {"name": "iid", "clients": 2}, "preprocessing": str(tmp_path / "agreed.json")}
    task = {"model": "logistic", "args": {"features": 3}}
    run = InProcessRun(tmp_path / "net", {**EXPERIMENT, "rounds": 1, "data": data, "task": task}, {}, {})
    assert run.run(Silent()).status == "done"
    kept = tmp_path / "net" / "preprocessing-1.json"
    assert Preprocessing.read(kept) == (agreed if normalize == "federated" else agreed.replace(mean=(), std=()))
    assert not any("`fedloom predict` cannot" in text for text in run.said)


def test_a_coordinator_with_a_table_of_its_own_keeps_how_all_prepare_it(tmp_path: Path) -> None:
    """Without a file that sites agreed on, `fedloom predict` takes the coordinator's own way if it is that of all."""
    for name, shift in (("sites", 0), ("own", 3)):
        rows = "".join(f"{age},{('icu', 'general')[age % 2]},{(age + shift) % 3 > 0:d}\n" for age in range(20, 80))
        (tmp_path / f"{name}.csv").write_text(f"age,ward,dead\n{rows}")
    data = {"source": "csv", "label": "dead", "normalize": {"age": [0, 100]}}
    data |= {"categorical": {"ward": ["general", "icu"]}}
    data |= {"partition": {"name": "iid", "clients": 2}}
    here = {**data, "path": str(tmp_path / "own.csv"), "server": 1.0}
    at_sites = {**data, "path": str(tmp_path / "sites.csv")}
    task = {"model": "logistic", "args": {"features": 3, "classes": 2}}
    run = InProcessRun(tmp_path / "net", {**EXPERIMENT, "rounds": 1, "data": here, "task": task}, {}, {})
    for table in run.tables:
        table["data"] = at_sites
    assert run.run(Silent()).status == "done"
    kept = Preprocessing.read(tmp_path / "net" / "preprocessing-1.json")
    assert (kept.bounds, kept.features) == ({"age": (0.0, 100.0)}, ("age", "ward=general", "ward=icu"))


def test_a_site_whose_table_lacks_an_optional_column_takes_part(tmp_path: Path) -> None:
    rows = [(age, ("icu", "general")[age % 2], int(age % 3 > 0)) for age in range(20, 80)]
    (tmp_path / "whole.csv").write_text("age,ward,dead\n" + "".join(f"{a},{w},{d}\n" for a, w, d in rows))
    (tmp_path / "lacks.csv").write_text("dead,age\n" + "".join(f"{d},{a}\n" for a, _, d in rows))
    agreed = agree_on_wards(tmp_path).replace(marks={"": nan}, missing=True, optional=("ward",))
    agreed.write(tmp_path / "agreed.json")
    data = {"source": "csv", "path": str(tmp_path / "whole.csv"), "label": "dead", "optional": ["ward"]}
    data |= {"partition": {"name": "iid", "clients": 2}, "preprocessing": str(tmp_path / "agreed.json")}
    task = {"model": "logistic", "args": {"features": 3}}
    run = InProcessRun(tmp_path / "net", {**EXPERIMENT, "rounds": 1, "data": data, "task": task}, {}, {})
    run.tables[1]["data"] = {**run.tables[1]["data"], "path": str(tmp_path / "lacks.csv")}
    assert run.run(Silent()).status == "done"
    assert Preprocessing.read(tmp_path / "net" / "preprocessing-1.json").optional == ("ward",)  # for `fedloom predict`


def _token(run: InProcessRun) -> str:
    token = Token.new("")
    run.ledger.invite(token.digest)
    return token.digest


def test_sites_evaluate_a_given_model_without_training(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    from fedloom.results.result import Result

    serial_weights({**EXPERIMENT, "rounds": 2}, tmp_path / "trained")
    trained = Result.read(tmp_path / "trained")
    save_file(trained.weights("fedavg")["model"], tmp_path / "model.safetensors")
    task = {**EXPERIMENT["task"], "init": str(tmp_path / "model.safetensors")}
    values = {**EXPERIMENT, "rounds": 0, "task": task}
    for _ in range(2):  # a second time in the same folder, too
        run = InProcessRun(tmp_path / "net", values, {"max_evaluations": 1}, {})
        assert run.run(Silent()).status == "done"
    (cell,) = Result.read(tmp_path / "net").runs
    assert (cell.rounds, cell.weights_sha256) == (0, trained.runs[0].weights_sha256)
    assert cell.final["test_accuracy"] == trained.runs[0].final["test_accuracy"]


def test_agents_hear_the_shape_of_an_agreed_example_before_they_load_weights(tmp_path: Path) -> None:
    rows = "".join(f"{age},icu,{age % 3 > 0:d}\n" for age in range(20, 80))
    (tmp_path / "data.csv").write_text(f"age,ward,dead\n{rows}")
    agree_on_wards(tmp_path)
    data = {"source": "csv", "path": str(tmp_path / "data.csv"), "label": "dead", "categorical": ["ward"]}
    data |= {"partition": {"name": "iid", "clients": 2}, "preprocessing": str(tmp_path / "agreed.json")}
    task = {"model": "logistic", "args": {"features": 3}}
    run = InProcessRun(tmp_path / "net", {**EXPERIMENT, "rounds": 1, "data": data, "task": task}, {}, {})
    del run.tables[1]["data"]["preprocessing"]
    with pytest.raises(InputError, match="2 features here, 3 features in the run"):
        run.run(Silent())


def test_a_run_that_waits_for_agents_stops_when_it_is_asked_to(tmp_path: Path) -> None:
    run = InProcessRun(tmp_path / "net", EXPERIMENT, {})
    with pytest.raises(KeyboardInterrupt):
        run.run(Silent(), should_stop=lambda: True)


def test_every_site_hears_how_many_outputs_the_model_has(tmp_path: Path) -> None:
    rows = "".join(f"{age},{('icu', 'general')[age % 2]},{age % 2}\n" for age in range(20, 80))
    (tmp_path / "data.csv").write_text(f"age,ward,dead\n{rows}")
    agree_on_wards(tmp_path).replace(classes=("0", "1", "2")).write(tmp_path / "agreed.json")
    data = {"source": "csv", "path": str(tmp_path / "data.csv"), "label": "dead"}
    data |= {"partition": {"name": "iid", "clients": 2}, "preprocessing": str(tmp_path / "agreed.json")}
    values = {**EXPERIMENT, "rounds": 1, "data": data}
    values.pop("task")
    run = InProcessRun(tmp_path / "net", values, {}, {})
    assert run.run(Silent()).status == "done"
    task = run.pool.run_plan["experiment"]["task"]
    assert (task["model"], task["args"]) == ("mlp", {"classes": 3})  # although no site has a third class


def test_the_operator_hears_cautions_once_and_the_report_has_them(tmp_path: Path, monkeypatch: Any) -> None:
    heard: list[str] = []
    monkeypatch.setattr(Silent, "caution", lambda self, text: heard.append(text))
    train = {**EXPERIMENT.get("train", {}), "batch_size": 1000, "drop_last": True}
    for rounds in (1, 2):
        run = InProcessRun(tmp_path / "net", {**EXPERIMENT, "rounds": rounds, "train": train}, {}, {})
        assert run.run(Silent()).status == "done"
    assert [text for text in heard if "drop_last = true drops nothing" in text] == heard[:1]
    assert heard[0] in RunData.read(tmp_path / "net").facts["cautions about algorithms"]
