from __future__ import annotations

import hashlib
import math
import re
import shutil
from pathlib import Path

import pytest

from fedloom.data.preprocessing import Column, Preprocessing
from fedloom.experiment.store import Store
from fedloom.results.comparisons import Comparison
from fedloom.results.model_card import NAME, write_card
from fedloom.results.result import Result
from fedloom.results.run_data import RunData
from fedloom.results.summary import in_short, table
from tests.results.hospitals import EXPERIMENT, hospitals


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return hospitals(
        tmp_path_factory.mktemp("hospitals"), EXPERIMENT.replace("rounds = 2", "rounds = 2\nseeds = [1, 2]")
    )


def card(result: Result, folder: Path) -> str:
    (folder / "model.pt2").write_bytes(b"a model")
    assert write_card(result, folder, [folder / "model.pt2"]) == folder / NAME
    return (folder / NAME).read_text(encoding="utf-8")


def test_the_card_says_what_the_model_is_and_where_it_comes_from(result: Result, tmp_path: Path) -> None:
    text = card(result, tmp_path)
    for line in (
        "It predicts outcome, as probabilities of alive, dead.",
        "- Inputs: 3 columns (age, ward, crp), as 5 features.",
        "- ward is a category, as one feature for each: general, icu, surgery.",
        "- A missing value becomes the mean that scaling uses.",
        "Federated learning on 2 clients with 48 training examples in all.",
        "| berlin | 24 | 8 | 8 |",
        f"| model.pt2 | `{hashlib.sha256(b'a model').hexdigest()}` |",
        "- No secure aggregation: on a network, the coordinator can read each client's update.",
    ):
        assert line in text.splitlines()
    assert all(f"`{cell.weights_sha256}`" in text for cell in result.runs)


def test_inputs_have_a_kind_and_what_they_were_in_training(
    result: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader sees the unit that the model expects; clients' own statistics are none of the card's."""
    fitted = result.preprocessing(1)
    text = card(result, tmp_path)
    assert "| input | kind | mean ± standard deviation in training |" in text.splitlines()
    places = {"age": 0, "crp": 4}
    for name, place in places.items():
        assert f"| {name} | number | {fitted.mean[place]:.4g} ± {fitted.std[place]:.3g} |" in text.splitlines()
    assert "| ward | 3 categories |  |" in text.splitlines()
    own = fitted.replace(mean=(), std=(), clients={"berlin": (fitted.mean, fitted.std)})
    for other in (own, fitted.replace(mean=(), std=())):
        monkeypatch.setattr(Result, "preprocessing", lambda self, seed, other=other: other)
        text = card(result, tmp_path)
        assert "| age | number |" in text.splitlines()
        assert "±" not in text
    many = fitted.replace(columns=tuple(Column(name=f"c{place}") for place in range(103)), mean=(1.0,) * 103)
    many = many.replace(std=(math.inf,) + (2.0,) * 102, shape=(103,))
    monkeypatch.setattr(Result, "preprocessing", lambda self, seed: many)
    text = card(result, tmp_path)
    assert "| c99 | number | 1 ± 2 |" in text.splitlines()
    assert "| c0 | number | no values |" in text.splitlines()
    assert "| c100 |" not in text
    assert "3 more inputs are in the run's file preprocessing-SEED.json." in text.splitlines()
    monkeypatch.setattr(Result, "preprocessing", lambda self, seed: Preprocessing(shape=(8, 8)))
    assert "| input |" not in card(result, tmp_path)


def test_metrics_have_intervals_over_seeds_or_the_range_of_clients(result: Result, tmp_path: Path) -> None:
    assert "| metric | algorithm | measured | value | 95 % interval over seeds |" in card(result, tmp_path)
    (tmp_path / "one").mkdir()
    text = card(hospitals(tmp_path / "one"), tmp_path)
    assert "| metric | algorithm | measured | value | lowest and highest client |" in text
    (line,) = [line for line in text.splitlines() if line.startswith("| accuracy | fedavg | final model")]
    assert re.search(r"\| \d+\.\d\d % at [a-z, ]+ to \d+\.\d\d % at [a-z, ]+ \|$", line)


def test_the_range_of_clients_is_empty_where_the_value_is_not_of_the_last_round(tmp_path: Path) -> None:
    best = hospitals(tmp_path, EXPERIMENT + '[evaluate]\nheadline = "best"\n')
    lines = [line for line in card(best, tmp_path).splitlines() if line.startswith("| accuracy | fedavg")]
    ranges = {line.split(" | ")[2]: line.rsplit("|", 2)[1].strip() for line in lines}
    assert len(ranges) == 2
    assert set(ranges.values()) == {""}


def test_an_interval_of_a_share_is_not_cut(result: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(run: RunData, metric: str) -> list[Comparison]:
        return [Comparison("test", run.metric(metric), {"fedavg": {1: 0.95, 2: 1.0}})]

    monkeypatch.setattr("fedloom.results.model_card.comparisons", found)
    assert "| auroc | fedavg | final model, own test | 0.975 | 0.6573 to 1.293 |" in card(result, tmp_path).splitlines()


def test_names_that_others_chose_cannot_change_the_card(tmp_path: Path) -> None:
    (tmp_path / "sites").mkdir()
    (tmp_path / "sites" / "a|b<i>.csv").write_text("x,y\n" + "1,0\n2,1\n" * 10)
    (tmp_path / "e.toml").write_text(
        '[data]\nsource = "csv"\npath = "sites"\nlabel = "y"\n[task]\nmodel = "logistic"\nargs = { features = 1 }\n'
        '[run]\nbackend = "serial"\n'
    )
    from fedloom.experiment import experiment_file
    from fedloom.experiment.plan import Plan
    from fedloom.experiment.run import run_plan

    found = run_plan(Plan.of(experiment_file.load(tmp_path / "e.toml")), tmp_path / "run")
    assert "| a\\|b&lt;i> | 12 |" in card(found, tmp_path)


@pytest.mark.parametrize(
    ("preprocessing", "said"),
    [
        (Preprocessing(label=("price",)), "It predicts price: a number, in the units of the data."),
        (
            Preprocessing(words=3, classes=("a", "b")),
            "It predicts the next word of a text, from a vocabulary of 2 words.",
        ),
        (Preprocessing(classes=("a", "b")), "It predicts the label, as probabilities of a, b."),
    ],
)
def test_the_card_says_what_is_predicted(
    preprocessing: Preprocessing, said: str, result: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Result, "preprocessing", lambda self, seed: preprocessing)
    assert f"\n\n{said}\n\n" in card(result, tmp_path)


def test_the_card_has_the_numbers_of_the_very_models_in_the_files(result: Result, tmp_path: Path) -> None:
    lines = card(result, tmp_path).splitlines()
    assert "| model | measured | accuracy | auroc | loss |" in lines
    run = RunData.read(result.folder)
    for cell in result.runs:
        clients = run.client_values(cell.algorithm, cell.seed, "final", "accuracy").values.tolist()
        whose = " (of each client's own model)" if cell.algorithm == "local" else ""
        mean, low, high = (f"{100 * value:.2f} %" for value in (sum(clients) / 2, min(clients), max(clients)))
        ends = [
            ", ".join(name for name, one in zip(run.client_names, clients, strict=True) if one == end)
            for end in (min(clients), max(clients))
        ]
        between = f"{low} at {ends[0]} to {high} at {ends[1]}"
        wanted = f"| {cell.algorithm}, seed {cell.seed} | final model, own test{whose} | {mean} ({between}) |"
        assert any(line.startswith(wanted) for line in lines), wanted


def test_the_card_says_what_is_about_the_drawn_clients_only(drawn: Path, tmp_path: Path) -> None:
    text = card(Result.read(drawn), tmp_path)
    assert "| fedavg, seed 1 | final model, own test |" in text
    assert "| fedavg, seed 1 | after local training, universal test (drawn clients) |" in text


def test_the_card_lists_only_models_that_were_exported(result: Result, tmp_path: Path) -> None:
    text = card(result.only("fedavg", 2), tmp_path)
    assert "| fedavg, seed 2 | final model" in text
    assert "| fedavg, seed 1 | final model" not in text
    assert "| local, seed 2 |" not in text
    assert "| accuracy | local |" not in text
    assert "| accuracy | fedavg |" in text


def test_cautions_and_privacy_are_about_the_exported_algorithms(comparison: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(comparison, tmp_path / "run"))
    with Store(folder) as store:
        weighed = "Algorithms weigh clients in different ways: local does not."
        store.set_fact("cautions about algorithms", ["local: it shares nothing.", "fedavg: it shares.", weighed])
        store.set_fact("weights of algorithms", {"fedavg": "examples", "local": "uniform"})
        store.set_fact("labels", {"classes": ["a", "b", "c"], "counts": [[0, 50, 0]] * 4})
    everything = Result.read(folder)
    text = card(everything.only("fedavg"), tmp_path)
    own = text.partition("## Know this")[2].partition("## For you")[0] + text.partition("## Privacy")[2]
    assert "- fedavg: it shares." in own
    assert "No better than always predicting b" in own
    for words in ("local", "pooled (", "pooled:", "every example of every client would leave"):
        assert words not in own.replace("local training", "")
    whole = card(everything, tmp_path)
    assert "every example of every client would leave" in whole
    assert 'weigh clients in different ways (weights = "examples" for fedavg and "uniform" for local)' in whole


def test_the_card_begins_with_what_its_reader_needs(result: Result, tmp_path: Path) -> None:
    text = card(result, tmp_path)
    assert re.findall("^## (.*)", text, re.MULTILINE)[:3] == [
        "What it does",
        "Know this before you use it",
        "For you to complete",
    ]
    assert "- 2 seeds: intervals rest on few numbers" in text.partition("## For you")[0]
    assert re.search(r"^Labels, in all splits: \d+ of alive, \d+ of dead\.$", text, re.MULTILINE)
    assert "local training |" not in text  # these models are not in the files


def test_the_card_says_if_the_exported_models_were_not_measured(result: Result, tmp_path: Path) -> None:
    with Store(Path(shutil.copytree(result.folder, tmp_path / "run"))) as store:
        store._database.execute("DELETE FROM client_metrics WHERE phase = 'final'")
    text = card(Result.read(tmp_path / "run", result.plan), tmp_path)
    assert "The models in the files were not measured after the last round." in text


def test_an_interval_without_a_width_is_not_shown_as_one(result: Result, tmp_path: Path) -> None:
    with Store(Path(shutil.copytree(result.folder, tmp_path / "run"))) as store:
        store._database.execute("UPDATE client_metrics SET value = 0.5 WHERE phase = 'final'")
    text = card(Result.read(tmp_path / "run", result.plan), tmp_path)
    assert "| accuracy | fedavg | final model, own test | 50.00 % | the same in all seeds |" in text


def test_the_card_says_what_was_doubted_when_sites_agreed(
    result: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fitted = result.preprocessing(1).replace(doubts=("crp is about 10 times larger at <b>lyon</b> than elsewhere.",))
    monkeypatch.setattr(Result, "preprocessing", lambda self, seed: fitted)
    text = card(result, tmp_path)
    assert "crp is about 10 times larger at &lt;b>lyon&lt;/b> than" in text.partition("Know this before you use it")[2]


def test_the_card_says_in_which_unit_the_model_takes_a_column(tmp_path: Path) -> None:
    result = hospitals(tmp_path)
    file = next(result.folder.glob("preprocessing-*.json"))
    Preprocessing.read(file).replace(convert={"crp": {"bonn": 10.0}}).write(file)
    assert "- crp was multiplied when the training data was read (by 10 at bonn): the model" in card(result, tmp_path)


def test_metrics_of_one_class_name_it_in_the_card_and_on_the_screen(tmp_path: Path) -> None:
    metrics = 'metrics = ["recall_of_0", "accuracy", "auroc"]'
    result = hospitals(tmp_path, EXPERIMENT.replace('metrics = ["accuracy", "auroc"]', metrics))
    text = card(result, tmp_path)
    assert "| model | measured | recall_of_0 (alive) | accuracy |" in text
    assert "\n| recall_of_0 (alive) | fedavg |" in text
    assert table(result).title == "run: recall_of_0 (alive)"
    assert in_short(RunData.read(result.folder)).endswith(" recall_of_0 (alive)")


def test_bounds_are_no_statistics_of_the_training_data(
    result: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounded = result.preprocessing(1).replace(bounds={"age": (18.0, 100.0)})
    monkeypatch.setattr(Result, "preprocessing", lambda self, seed: bounded)
    lines = card(result, tmp_path).splitlines()
    assert "| input | kind | bounds |" in lines
    assert "| age | number | 18 to 100 |" in lines
    assert "| crp | number |  |" in lines
    assert "- A missing value becomes the middle of its bounds, or 0 without bounds." in lines
    assert not any("standard deviation" in line and "scaled" in line for line in lines)
    assert any(line.startswith("- Features with bounds are scaled from these to −1 and 1") for line in lines)
