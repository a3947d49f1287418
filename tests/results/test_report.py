"""The report: one file that says what was run, what came out and how far to trust it."""

from __future__ import annotations

import csv
import re
import shutil
import sqlite3
from contextlib import closing
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedloom as fl
from fedloom.errors import TrainingError
from fedloom.results import report, tables
from fedloom.results.comparisons import Comparison, best_labels, comparisons
from fedloom.results.result import Result
from fedloom.results.run_data import RunData
from fedloom.results.run_values import MetricInfo
from fedloom.results.statistics import differences
from tests.conftest import Dense, federation, slow_after

STATIC = Path(fl.__file__).parent / "watch" / "static"
ACCURACY = MetricInfo("accuracy", is_mean=True, higher_is_better=True)
VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """Checks that elements are nested properly, and collects ids, links, addresses and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.addresses: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(str(value))
            elif name in ("href", "xlink:href") and str(value).startswith("#"):
                self.links.append(str(value)[1:])
            elif name in ("src", "href", "xlink:href", "action", "data"):
                self.addresses.append(str(value))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def announced() -> list[str]:
    """What `written` says while it works."""
    return []


@pytest.fixture(scope="module")
def written(comparison: Path, tmp_path_factory: pytest.TempPathFactory, announced: list[str]) -> Path:
    folder = tmp_path_factory.mktemp("report") / "small"
    shutil.copytree(comparison, folder)
    assert Result.read(folder).report(progress=announced.append) == folder / "report.html"
    return folder


def test_the_report_is_one_sound_file_that_needs_no_network(written: Path) -> None:
    text = (written / "report.html").read_text()
    page = Page(text)
    assert len(page.ids) == len(set(page.ids))  # drawings share the page
    assert set(page.links) <= set(page.ids)
    assert all(address.startswith("data:") for address in page.addresses)
    assert set(re.findall(r"url\(([^)]*)\)", text)) <= {f"#{one}" for one in page.ids}
    assert not re.search(r"https?://(?!www\.w3\.org)", text)  # names of XML spaces are no addresses
    assert len(text) < 3_000_000


def test_the_report_says_what_was_run_and_what_came_out(written: Path) -> None:
    text = (written / "report.html").read_text()
    result = Result.read(written)
    assert str(result.weights_sha256) in text
    for needed in (
        "fedavg",
        "local",
        "pooled",
        "torch",
        "Cautions",
        "client-3",
        "95\u00a0% interval",
        "Until accuracy",
    ):
        assert needed in text
    assert text.count("<svg") == 10  # one of nine figures is also drawn for phones
    assert "2 seeds: intervals rest on few numbers" in text
    assert "<b>2</b><span>seeds</span>" in text


def test_the_page_has_the_numbers_of_the_tables(written: Path) -> None:
    text = (written / "report.html").read_text()
    with open(written / "tables" / "universal_test_accuracy.csv", newline="") as file:
        _, *rows = csv.reader(file)
    values = [value for row in rows for value in row[1:] if value]
    assert len(values) > 10
    assert all(f'data-v="{value}"' in text for value in values)
    assert text.count('<tr class="total">') == 2 * 4  # four statistics under each of two universal tests


def test_each_step_is_announced(written: Path, announced: list[str]) -> None:
    assert announced[-3:] == ["Computing tables", "Writing tables and figures", "Writing the report"]
    assert all(line.startswith("Drawing figure") for line in announced[:-3])


def test_tables_and_figures_are_files_beside_it(written: Path) -> None:
    names = {path.stem for path in (written / "figures").iterdir()}
    expected = "headline comparison global_model sausage_rounds sausage_users pooled_curve bytes clients labels"
    assert names == set(expected.split())
    for name in names:
        drawing = ElementTree.parse(written / "figures" / f"{name}.svg").getroot()
        assert any(element.text for element in drawing.iter("{http://www.w3.org/2000/svg}text"))  # text stays text
        assert (written / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert (written / "tables" / "universal_test_accuracy.tex").is_file()


def test_names_are_text_and_never_markup(tmp_path: Path) -> None:
    data = federation([9, 8], names=("<script>alert(1)</script>", r"a $\y$ & | _"))
    fl.run(data, fl.Task(Dense), {"fedavg": fl.FedAvg()}, rounds=1, out=tmp_path / "n<i>ce",
           backend="serial", evaluate=fl.Evaluation(universal=True))  # fmt: skip
    text = report.write(tmp_path / "n<i>ce", files=False).read_text()
    Page(text)
    assert "<script>alert" not in text
    assert "n<i>ce" not in text
    assert "n&lt;i&gt;ce" in text
    assert "&lt;script&gt;alert" in text
    assert "<b>1</b><span>seed</span>" in text


@pytest.mark.parametrize(
    "evaluate",
    slow_after(
        1, [fl.Evaluation(every=3, clients="cohort"), fl.Evaluation(splits=()), fl.Evaluation(splits=("train",))]
    ),
    ids=["now and then", "nothing", "train only"],
)
def test_whatever_was_measured_there_is_a_report(evaluate: fl.Evaluation, tmp_path: Path) -> None:
    algorithms = {"fedavg": fl.FedAvg(), "pooled": fl.Pooled()}
    result = fl.run(federation([9, 8, 7]), fl.Task(Dense), algorithms, rounds=4, evaluate=evaluate,
                    out=tmp_path, backend="serial", cohort=fl.Sampling(count=2))  # fmt: skip
    text = report.write(result.folder, files=False).read_text()
    Page(text)
    assert "fedavg" in text
    assert "pooled" in text


def test_a_regression_and_a_metric_that_is_not_a_mean_have_reports(tmp_path: Path) -> None:
    from tests.conftest import Logit, two_classes

    task = fl.Task(Logit, loss="bce", metrics=["auroc"])
    data = two_classes(federation([20, 30]))
    result = fl.run(data, task, {"a": fl.FedAvg(), "b": fl.LocalOnly()}, rounds=2, out=tmp_path, backend="serial")
    text = report.write(result.folder, files=False).read_text()
    Page(text)
    assert "auroc" in text


def test_an_unfinished_or_failed_run_says_so(tmp_path: Path) -> None:
    algorithms = {"good": fl.FedAvg(lr=0.1), "bad": fl.FedAvg(lr=1e38, epochs=3)}
    with pytest.raises(TrainingError):
        fl.run(federation([9, 8]), fl.Task(Dense), algorithms, rounds=3, out=tmp_path, backend="serial")
    text = report.write(tmp_path, files=False).read_text()
    Page(text)
    assert "not finished" in text
    assert "bad (seed 1) failed after" in text


def test_a_run_that_failed_before_it_knew_its_machine_has_a_report(comparison: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(comparison, folder)
    with closing(sqlite3.connect(folder / "run.db")) as database, database:
        database.execute("DELETE FROM facts WHERE key = 'machine'")
    assert f"fedloom {fl.__version__}" in report.write(folder, files=False).read_text()


def test_on_a_phone_a_figure_keeps_its_size_and_scrolls(written: Path) -> None:
    style = (report.TEMPLATES / "report.css").read_text(encoding="utf-8")
    phone = re.search(r"@media \(max-width: 640px\) \{\n(.*?)\n\}", style, re.DOTALL)
    assert phone is not None
    assert ".drawing svg { max-width: none; }" in phone[1]  # tests/browser measures that its text can be read
    assert "\n.drawing { overflow-x: auto;" in style
    text = (written / "report.html").read_text(encoding="utf-8")
    drawings = re.findall(r'<div class="drawing([^"]*)"( tabindex="0")?>', text)
    assert sum(bool(scrolls) for _, scrolls in drawings) == text.count("<figcaption>") > 0
    assert (" on-phones", "") in drawings  # made to fit


@pytest.mark.parametrize("file", [report.TEMPLATES / "report.css", STATIC / "watch.css"], ids=lambda file: file.name)
def test_a_table_that_goes_on_beyond_the_edge_has_a_shadow_there(file: Path) -> None:
    style = file.read_text(encoding="utf-8")
    (rule,) = re.findall(r"^\.scroll \{(.*)\}$", style, re.MULTILINE)
    for side in ("left", "right"):
        away = "right" if side == "left" else "left"
        assert re.search(rf"\(to {away}, var\(--shade\), transparent\) {side} / \d+px 100% no-repeat scroll", rule)
        assert re.search(rf"\(to {away}, var\(--paper\) .*?\) {side} / \d+px 100% no-repeat local", rule)
    assert len(set(re.findall(r"--shade: (#\w+);", style))) == 2  # light and dark


def test_a_dark_scheme_is_for_screens_only_and_turns_every_dark_ink_of_figures(written: Path) -> None:
    style = (report.TEMPLATES / "report.css").read_text(encoding="utf-8")
    dark = re.search(r"@media screen and \(prefers-color-scheme: dark\) \{\n(.*?)\n\}", style, re.DOTALL)
    assert dark is not None
    text = (written / "report.html").read_text(encoding="utf-8")
    inks = {*re.findall(r"\b(?:fill|stroke): (#[0-9a-f]{6})", text)} - {"#00224e"}  # of a colour map
    assert len(inks) > 9
    for ink in inks:  # what is dark would be dark on dark, and white paper white
        red, green, blue = (int(ink[at : at + 2], 16) for at in (1, 3, 5))
        assert 80 < 0.3 * red + 0.6 * green + 0.1 * blue < 220 or ink in dark[1], ink
    named = {*re.findall(r"var\((--[a-z-]+)\)", style)}
    light = style.splitlines()[0]
    for name in sorted(named):  # a colour that the dark scheme forgets would be dark on dark
        assert f"{name}: #" in light
        assert f"{name}: #" in dark[1]


def test_shapes_that_markers_share_have_no_colour_which_a_dark_scheme_could_not_turn(written: Path) -> None:
    text = (written / "report.html").read_text(encoding="utf-8")
    shapes = re.findall(r'<path id="([^"]*)" d="[^"]*"( style="[^"]*")?', text)
    assert len(shapes) > 9
    assert [name for name, style in shapes if style] == []
    uses = re.findall(r'<use xlink:href="#([^"]*)"[^>]* style="[^"]*(?:fill|stroke)[^"]*"', text)
    assert {name for name, _ in shapes} <= {*uses}  # each use brings the colour itself


def test_accuracies_are_never_said_to_differ_by_more_than_100_points() -> None:
    values = {"a": {1: 0.9, 2: 0.2}, "b": {1: 0.1, 2: 0.6}}
    accuracy = Comparison("test", MetricInfo("accuracy", is_mean=True, higher_is_better=True), values)
    (sentence,) = report._against_others("a", ["b"], accuracy)
    assert "differences of up to 100.00 points remain possible." in sentence
    losses = {"a": {1: 900.0, 2: 200.0}, "b": {1: 100.0, 2: 600.0}}
    (sentence,) = report._against_others(
        "a", ["b"], Comparison("test", MetricInfo("loss", is_mean=True, higher_is_better=False), losses)
    )
    assert "differences of up to 7824 remain possible" in sentence  # 200 + 12.706 · 848.5 / √2


def test_the_widest_possible_difference_has_the_digits_of_the_table() -> None:
    values = {"a": {1: 0.53, 2: 0.5, 3: 0.54}, "b": {1: 0.5, 2: 0.54, 3: 0.5}}
    accuracy = Comparison("test", ACCURACY, values)
    (sentence,) = report._against_others("a", ["b"], accuracy)
    table = tables._paired_differences("differences", accuracy, differences(values))
    row = table.shown(table.rows[0])
    assert row[3] == "+11.83"  # 12 would be more than the interval has, and 11 less
    assert "differences of up to 11.83 points remain possible" in sentence
    assert f"95 % interval {row[2]} to {row[3]} points" in table.note


def test_above_others_is_about_these_test_examples_if_all_seeds_share_one_split() -> None:
    values = {"a": {1: 0.9, 2: 0.91, 3: 0.93}, "b": {1: 0.5, 2: 0.5, 3: 0.51}, "c": {1: 0.9, 2: 0.95, 3: 0.85}}
    close, apart = report._against_others("a", ["b", "c"], Comparison("test", ACCURACY, values, one_split=True))
    assert close.endswith(" points remain possible on these test examples.")
    assert apart == "It is above b on these test examples (the 95 % intervals, which hold together, exclude zero)."


def test_differences_that_are_the_same_in_every_seed_say_nothing_about_chance() -> None:
    values = {"a": {1: 0.8, 2: 0.83, 3: 0.79}, "b": {1: 0.75, 2: 0.78, 3: 0.74}, "c": {1: 0.7, 2: 0.6, 3: 0.75}}
    accuracy = Comparison("test", MetricInfo("accuracy", is_mean=True, higher_is_better=True), values)
    alike, close = report._against_others("a", ["b", "c"], accuracy)
    assert alike.startswith("Its difference from b is the same in every seed, which gives no interval")
    assert "vary nothing" not in alike  # seeds do vary
    assert close.startswith("These seeds do not tell it apart from c:")


@pytest.mark.parametrize(
    ("seeds", "said"),
    [
        (1, "has the best number of the 2 algorithms that leave the data where it is, with one seed: this may be"),
        (
            2,
            "has the best mean of the 2 algorithms that leave the data where it is, on these test examples. These",
        ),
    ],
)
def test_the_best_of_one_seed_may_be_the_best_by_chance(seeds: int, said: str, run: RunData) -> None:
    values = {"a": {1: 0.8, 2: 0.82}, "b": {1: 0.75, 2: 0.81}}
    values = {label: dict(list(known.items())[:seeds]) for label, known in values.items()}
    words = " ".join(report._best_in_words(run, Comparison("test", ACCURACY, values, one_split=True)))
    assert said in words
    assert all(one.one_split for metric in run.metrics for one in comparisons(run, metric))  # as in this run
    assert words.endswith("about chance in training, not about other examples.") == (seeds > 1)


def test_algorithms_with_the_same_numbers_have_no_best_one(run: RunData) -> None:
    accuracy = MetricInfo("accuracy", is_mean=True, higher_is_better=True)
    words = " ".join(report._best_in_words(run, Comparison("test", accuracy, {"a": {1: 0.8}, "b": {1: 0.8}})))
    assert words.endswith(": a and b (80.00 %) have the same accuracy.")


def test_seeds_that_change_nothing_are_named_as_the_reason() -> None:
    fixed = Comparison("test", ACCURACY, {"a": {1: 0.8, 2: 0.8}, "b": {1: 0.7, 2: 0.7}})
    (alike,) = report._against_others("a", ["b"], fixed)
    assert alike.startswith("Its difference from b is the same in every seed: these seeds vary nothing that matters")


def test_a_tie_has_no_winner(run: RunData) -> None:
    best, worst = {1: 0.9, 2: 0.95, 3: 1.0}, {1: 0.5, 2: 0.5, 3: 0.51}
    tie = Comparison("test", ACCURACY, {"a": best, "worst": worst, "b": dict(best)})
    words = " ".join(report._best_in_words(run, tie))
    assert ": a and b (95.00 %, 95 % interval " in words
    assert ") have the same accuracy in every seed, the best mean of the 3 algorithms that leave the data" in words
    assert "vary nothing" not in words
    assert "difference from b" not in words
    assert "They are above worst (" in words
    assert best_labels(run, tie) == ["a", "b"]


def test_the_same_mean_of_different_numbers_is_a_tie_too(run: RunData) -> None:
    values = {"a": {1: 0.9, 2: 0.8, 3: 0.7}, "b": {1: 0.7, 2: 0.8, 3: 0.9}, "c": {1: 0.1, 2: 0.2, 3: 0.3}}
    words = " ".join(report._best_in_words(run, Comparison("test", ACCURACY, values)))
    assert " and b (80.00 %, 95 % interval 55.16 % to 104.84 %) have the same mean, the best mean of the 3" in words
    assert "do not tell a apart from b" in words
    assert "in every seed" not in words


APART = {
    "fedavg": {1: 0.60, 2: 0.61, 3: 0.62},
    "local": {1: 0.50, 2: 0.52, 3: 0.51},
    "prox": {1: 0.615, 2: 0.60, 3: 0.61},
    "scaffold": {1: 0.40, 2: 0.41, 3: 0.43},
}


def test_a_baseline_that_is_the_best_keeps_its_verdict_with_the_intervals_of_the_table(run: RunData) -> None:
    values = {**APART, "fedavg": {1: 0.61, 2: 0.615, 3: 0.62}}
    words = " ".join(report._best_in_words(run, Comparison("test", ACCURACY, values), "fedavg"))
    assert ": fedavg (61.50 %" in words
    found = {each.first: each for each in differences(values, "fedavg")}
    assert [label for label, each in found.items() if each.clear] == ["local", "scaffold"]
    widest = 100 * max(map(abs, found["prox"].interval))
    assert f"do not tell it apart from prox: by their 95 % intervals, differences of up to {widest:.2f} points" in words
    assert "It is above local and scaffold (the 95 % intervals, which hold together, exclude zero)." in words
    assert "not tested" not in words


def test_of_another_best_than_the_baseline_its_difference_to_the_baseline_is_said(run: RunData) -> None:
    comparison = Comparison("test", ACCURACY, APART)
    words = " ".join(report._best_in_words(run, comparison, "local"))
    (pair,) = (each for each in differences(APART, "local") if each.first == "fedavg")
    low, high = (f"{100 * side:+.2f}" for side in pair.interval)
    assert f"Its difference from local is +10.00 points (95 % interval {low} to {high})." in words
    assert "It is above local (the 95 % intervals" in words
    assert words.endswith("Pairs without local were not tested.")
    assert "from prox" not in words
    losses = Comparison("test", MetricInfo("loss", True, False), APART)
    words = " ".join(report._best_in_words(run, losses, "prox"))
    assert ": scaffold (0.4133, " in words
    assert "Its difference from prox is −0.195 (95 % interval" in words
    two = {label: APART[label] for label in ("local", "prox")}
    assert "not tested" not in " ".join(report._best_in_words(run, Comparison("test", ACCURACY, two), "local"))
    one = {label: {1: known[1]} for label, known in APART.items()}
    words = " ".join(report._best_in_words(run, Comparison("test", ACCURACY, one), "local"))
    assert words.endswith("with one seed: this may be chance.")
    assert "not tested" in " ".join(report._best_in_words(run, comparison, "prox"))


def test_a_baseline_that_is_tied_for_the_best_is_what_the_verdict_is_about(run: RunData) -> None:
    tied = {"fedavg": APART["fedavg"], "prox": {1: 0.62, 2: 0.60, 3: 0.61}, "local": APART["local"]}
    words = " ".join(report._best_in_words(run, Comparison("test", ACCURACY, tied), "prox"))
    assert "have the same mean" in words
    assert "do not tell prox apart from fedavg" in words
    assert "prox is above local" in words


def test_algorithms_with_other_seeds_are_ranked_by_the_seeds_that_all_have(run: RunData) -> None:
    """The fourth seed is hard, and only one has it: over its own seeds it would be the second."""
    values = {"one": {1: 0.80, 2: 0.81, 3: 0.82, 4: 0.20}, "other": {1: 0.75, 2: 0.77, 3: 0.76}}
    comparison = Comparison("test", ACCURACY, values)
    words = " ".join(report._best_in_words(run, comparison))
    assert ": one (81.00 %, 95 % interval 78.52 % to 83.48 %, 3 seeds) has the best mean of the 2 algorithms" in words
    assert "leave the data where it is, over the 3 seeds that all of them have." in words
    assert "means in the table are over the seeds of each" in words
    assert best_labels(run, comparison) == ["one"]
    values["other"] = {1: 0.75}
    words = " ".join(report._best_in_words(run, comparison))
    assert ", over the one seed that all of them have: this may be chance." in words
    values["other"] = {5: 0.9}
    words = " ".join(report._best_in_words(run, comparison))
    assert "No seed is common to all, so means are over the seeds of each" in words


@given(st.integers(2, 12), st.floats(0.01, 5.0), st.floats(0.01, 5.0), st.booleans(), st.booleans())
@pytest.mark.slow
def test_the_first_sentences_never_get_weaker_with_more_seeds(
    seeds: int, first: float, second: float, higher_is_better: bool, one_split: bool
) -> None:
    """At equal means and spreads of differences, more seeds tell apart as many algorithms or more."""

    def told(seeds: int) -> tuple[set[str], float]:
        noise = np.arange(seeds) - (seeds - 1) / 2
        noise = 0.01 * noise / noise.std(ddof=1)
        ahead = 1 if higher_is_better else -1
        values = {
            "best": dict.fromkeys(range(seeds), 0.5),
            "second": dict(enumerate(0.5 - ahead * 0.01 * first + noise)),
            "third": dict(enumerate(0.5 - ahead * 0.01 * (first + second) - noise)),
        }
        metric = MetricInfo("accuracy", True, higher_is_better)
        comparison = Comparison("server_test", metric, values, one_split=one_split)
        sentences = list(report._against_others("best", ["second", "third"], comparison))
        close = next((text for text in sentences if text.startswith("These seeds do not tell")), "")
        widest = float(re.findall(r"up to ([\d.]+) points", close)[0]) if close else 0.0
        return {name for name in ("second", "third") if name in close}, widest

    (before, wide), (after, narrow) = told(seeds), told(seeds + 1)
    assert after <= before
    assert narrow <= wide


@pytest.mark.parametrize(
    ("key", "best", "said"), [("test", "b", True), ("test", "a", False), ("server_test", "b", False)]
)
def test_it_says_why_the_universal_test_may_have_another_best_algorithm(
    comparison: Path, monkeypatch: pytest.MonkeyPatch, key: str, best: str, said: bool
) -> None:
    accuracy = MetricInfo("accuracy", True, True)

    def made(key: str, first: str) -> Comparison:
        return Comparison(key, accuracy, {label: {1: 0.8 + 0.1 * (label == first)} for label in ("a", "b")})

    monkeypatch.setattr(report, "main_comparison", lambda run: made(key, "a"))
    monkeypatch.setattr(report, "universal_comparison", lambda run, metric: made("universal", best))
    words = [*report.result_in_words(RunData.read(comparison))]
    assert "everybody's" not in words[0]
    assert ("depends on whose data" in words[1]) == said


def test_a_headline_about_global_models_says_who_has_none_and_on_which_tests(run: RunData) -> None:
    first = next(iter(report.result_in_words(run)))
    assert first.startswith("Accuracy, global model, all clients' tests: fedavg (")
    assert "local has no global model, and so no such number: the tables about clients' own tests compare all." in first
    served = RunData(run.folder, run.cells, run.metrics, run.clients, {**run.facts, "server": {"test": 30}})
    assert next(iter(report.result_in_words(served))).startswith("Accuracy, global model, server's test data: fedavg")
