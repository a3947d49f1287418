"""The report: one file that says what was run, what came out and how far to trust it."""

from __future__ import annotations

import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

import fedloom as fl
from fedloom.errors import TrainingError
from fedloom.experiment.store import Store
from fedloom.results import figures, report
from fedloom.results.report_warnings import cautions
from fedloom.results.result import Result
from fedloom.results.run_data import RunData
from tests.conftest import Dense, federation

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
def written(comparison: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report") / "small"
    shutil.copytree(comparison, folder)
    assert Result.read(folder).report() == folder / "report.html"
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
    assert text.count("<svg") == 9
    assert "2 seeds: intervals are wide" in text
    assert "<b>2</b><span>seeds</span>" in text


def test_tables_and_figures_are_files_beside_it(written: Path) -> None:
    names = {path.stem for path in (written / "figures").iterdir()}
    expected = "headline comparison global_model sausage_rounds sausage_users pooled_curve bytes clients labels"
    assert names == set(expected.split())
    for name in names:
        drawing = ElementTree.parse(written / "figures" / f"{name}.svg").getroot()
        assert any(element.text for element in drawing.iter("{http://www.w3.org/2000/svg}text"))  # text stays text
        assert (written / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert (written / "tables" / "universal_test_accuracy.tex").is_file()


def test_an_algorithm_has_one_colour_in_all_figures(comparison: Path) -> None:
    view = RunData.read(comparison)
    drawn = {each.name: each.figure for each in figures.draw_all(view)}
    colours = {label: look["color"] for label, look in figures.looks(view).items()}
    assert len(set(colours.values())) == len(view.labels)
    for axes, label in zip(drawn["sausage_rounds"].axes, view.labels, strict=False):
        assert axes.get_title(loc="left") == label
        assert colours[label] in {line.get_color() for line in axes.lines}
    lines = {str(line.get_label()).split()[0]: line.get_color() for line in drawn["bytes"].axes[0].lines}
    assert lines.items() <= colours.items()


def test_sausages_are_filled_from_the_lowest_to_the_highest_or_by_the_deviation(comparison: Path) -> None:
    view = RunData.read(comparison)
    stats = [view.client_values("fedavg", seed, "post_fit", "accuracy").by_round() for seed in (1, 2)]
    for fill, low in (("min-max", [s.low for s in stats]), ("std", [s.mean - s.std for s in stats])):
        drawn = figures.sausage(view, "accuracy", "rounds", fill)
        assert drawn is not None
        band = drawn.figure.axes[0].collections[1].get_paths()[0].vertices  # the second: after local training
        for round in range(1, 6):
            lowest = min(y for x, y in np.asarray(band) if x == round)
            assert lowest == pytest.approx(np.clip(np.mean(low, axis=0)[round - 1], 0, 1))


def test_names_are_text_and_never_markup(tmp_path: Path) -> None:
    data = federation([9, 8], names=("<script>alert(1)</script>", r"a $\y$ & | _"))
    fl.run(data, fl.Task(Dense), {"fedavg": fl.FedAvg()}, rounds=1, out=tmp_path / "r", backend="serial",
           evaluate=fl.Evaluation(universal=True), name="n<i>ce")  # fmt: skip
    text = report.write(tmp_path / "r", files=False).read_text()
    Page(text)
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert" in text
    assert "<b>1</b><span>seed</span>" in text


@pytest.mark.parametrize(
    "evaluate",
    [fl.Evaluation(splits=()), fl.Evaluation(splits=("train",)), fl.Evaluation(every=3, clients="cohort")],
    ids=["nothing", "train only", "now and then"],
)
def test_whatever_was_measured_there_is_a_report(evaluate: fl.Evaluation, tmp_path: Path) -> None:
    algorithms = {"fedavg": fl.FedAvg(), "pooled": fl.Pooled()}
    result = fl.run(federation([9, 8, 7]), fl.Task(Dense), algorithms, rounds=4, evaluate=evaluate,
                    out=tmp_path, backend="serial", cohort=fl.Sampling(count=2))  # fmt: skip
    text = report.write(result.folder, files=False).read_text()
    Page(text)
    assert "fedavg" in text
    assert "pooled" in text


def test_a_regression_and_a_metric_that_is_no_mean_have_reports(tmp_path: Path) -> None:
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


def test_cautions_find_overfitting_and_clients_left_behind(comparison: Path, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    shutil.copytree(comparison, folder)
    with Store(folder) as store, store._transaction() as database:
        last = "round = 5 AND metric = 'accuracy' AND cell IN (SELECT id FROM cells WHERE label = 'fedavg')"
        for phase, split, value in (
            ("pre_fit", "train", 0.5), ("post_fit", "train", 0.9), ("pre_fit", "test", 0.8), ("post_fit", "test", 0.7)
        ):  # fmt: skip
            database.execute(
                f"UPDATE client_metrics SET value = ? WHERE {last} AND phase = ? AND split = ?", (value, phase, split)
            )
        database.execute(
            "UPDATE client_metrics SET value = client * 1e-3 + 0.9 WHERE phase = 'final' AND metric = 'accuracy'"
        )
    found = " ".join(cautions(RunData.read(folder)))
    assert "fedavg overfits at its clients: in the last round local training improved accuracy by 40 points" in found
    assert "Left behind" not in found
    with Store(folder) as store, store._transaction() as database:
        for client in range(4, 24):  # many more that fare as well as the rest, and one that does not
            database.execute("INSERT INTO clients VALUES (?, ?, 5, 5, 50)", (client, f"client-{client}"))
            rows = "SELECT cell, round, ?, phase, split, metric, ?, examples FROM client_metrics WHERE client = 0"
            value = 0.1 if client == 7 else 0.7
            database.execute(f"INSERT INTO client_metrics {rows} AND {last} AND phase = 'post_fit'", (client, value))
    text = " ".join(cautions(RunData.read(folder)))
    assert re.search(r"Left behind with fedavg[^:]*: client-7 \(10.00 %\)\.", text)


def test_page_and_paper_have_the_same_numbers(written: Path) -> None:
    """What is drawn and what is tabulated comes from the same series."""
    view = RunData.read(written)
    drawn = figures.comparison(view, "accuracy")
    assert drawn is not None
    (line,) = (line for line in drawn.figure.axes[1].lines if line.get_color() == figures.looks(view)["local"]["color"])
    stats = [view.client_values("local", seed, "post_fit", "accuracy").by_round().mean for seed in (1, 2)]
    assert np.asarray(line.get_ydata()) == pytest.approx(np.mean(stats, axis=0))
    assert len(view.clients) < report.MOST_ROWS
