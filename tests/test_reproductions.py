"""The page of all published numbers: it is what the stored results say, and it leaves nothing out."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "docs"))

from _generate import keep as keeping  # noqa: E402
from _generate import reproduction_figures, reproductions  # noqa: E402

FOLDER = ROOT / "docs" / "reproductions"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(FOLDER / "results", tmp_path / "results")
    shutil.copy(FOLDER / "reasons.toml", tmp_path)
    return tmp_path


def keep(folder: Path, rounds: list[float | None], changes: dict[str, str] | None = None) -> reproductions.Number:
    """Store a result of a row for which the paper has 34 rounds, and return its line."""
    record = {"row": "iid, E 1, B 10", "seeds": [1] * len(rounds), "changes": changes or {}, "ours": {"rounds": rounds}}
    path = folder / "results" / "mcmahan-table2.json"
    others = [one for one in json.loads(path.read_text(encoding="utf-8")) if one["row"] != record["row"]]
    path.write_text(json.dumps([*others, record]), encoding="utf-8")
    found = [one for one in reproductions.numbers(folder) if one.reproduction == "mcmahan-table2"]
    return next(one for one in found if (one.row, one.source) == ("iid, E 1, B 10", "paper"))


def test_the_page_is_what_the_stored_results_say() -> None:
    assert (FOLDER / "summary.md").read_text(encoding="utf-8") == reproductions.page()


def test_every_stored_result_belongs_to_a_row_and_has_the_hash_of_its_weights() -> None:
    for path in sorted((FOLDER / "results").glob("*.json")):
        rows = {row.name for row in reproductions.published.load(path.stem).row}
        for record in json.loads(path.read_text(encoding="utf-8")):
            assert record["row"] in rows
            assert record["weights_sha256"]


def test_the_page_about_a_result_names_its_weights() -> None:
    for path in sorted((FOLDER / "results").glob("*.json")):
        page = (FOLDER / reproductions.PAGES[path.stem]).read_text(encoding="utf-8")
        for record in json.loads(path.read_text(encoding="utf-8")):
            assert record["weights_sha256"][:12] in page, (path.name, record["row"], record["changes"])


def test_ours_is_shown_with_an_interval_over_seeds_and_the_ratio(folder: Path) -> None:
    found = keep(folder, [34.0, 35.0, 31.0])
    # the standard deviation is 2.0817, and t(0.975, 2) is 4.3027: 4.3027 × 2.0817 / √3 = 5.171
    assert (found.ours, found.ratio, found.seeds, found.verdict) == ("33.3 ± 5.2", "0.98", "3", "reproduced")
    assert keep(folder, [34.0]).ours == "34.0"


def test_only_the_published_settings_can_reproduce_a_number(folder: Path) -> None:
    assert keep(folder, [34.0], {"seeds": "[1]"}).verdict == "reproduced"
    changed = keep(folder, [34.0], {"train.clip": "1.0"})
    assert (changed.verdict, changed.how) == ("reproduced in direction", "train.clip = 1.0")


def test_a_number_that_differs_or_is_missing_needs_a_reason(folder: Path) -> None:
    (folder / "reasons.toml").write_text('[[reason]]\nreproductions = []\nverdict = "not run"\nbecause = ""\n')
    with pytest.raises(SystemExit, match="no reason for crosscheck, 'equal weights, optimiser kept'"):
        list(reproductions.numbers(folder))


def test_a_number_that_was_run_is_not_called_not_run(folder: Path) -> None:
    with pytest.raises(SystemExit, match=r"'not run'. Possible: reproduced in direction, not reproduced"):
        keep(folder, [68.0])
    with pytest.raises(SystemExit, match=r"'not run'. Possible"):
        keep(folder, [None])


def test_a_reason_can_be_about_one_changed_key(folder: Path) -> None:
    reasons = (folder / "reasons.toml").read_text(encoding="utf-8")
    about_clipping = """[[reason]]
reproductions = ["mcmahan-table2"]
changed = "train.clip"
verdict = "not reproduced"
because = "it was clipped"
"""
    (folder / "reasons.toml").write_text(about_clipping + reasons, encoding="utf-8")
    assert keep(folder, [66.0], {"train.clip": "1.0"}).because == "it was clipped"
    assert keep(folder, [66.0], {"train.lr": "1.0"}).because != "it was clipped"
    with_value = about_clipping.replace("train.clip", "train.clip = 1.0")
    (folder / "reasons.toml").write_text(with_value + reasons, encoding="utf-8")
    assert keep(folder, [66.0], {"train.clip": "1.0"}).because == "it was clipped"
    assert keep(folder, [66.0], {"train.clip": "2.0"}).because != "it was clipped"


def test_only_the_longest_runs_of_a_row_are_shown_with_the_fewest_changes_first(folder: Path) -> None:
    path, row = folder / "results" / "mcmahan-table2.json", "iid, E 1, B 10"
    (folder / "results" / "mcmahan-figure2.json").unlink()  # it has the row, too
    others = [one for one in json.loads(path.read_text(encoding="utf-8")) if one["row"] != row]
    longest = [{"train.clip": "1.0", "rounds": "30"}, {"rounds": "30"}]
    shorter = [{"rounds": "10"}, {"rounds": "30", "train.epochs": "1"}]
    ways = [longest[0], *shorter, longest[1]]
    made = [{"row": row, "seeds": [1], "changes": changes, "ours": {"rounds": [9.0]}} for changes in ways]
    path.write_text(json.dumps([*others, *made]), encoding="utf-8")
    found = [one for one in reproductions.numbers(folder) if (one.reproduction, one.row) == ("mcmahan-table2", row)]
    assert [one.how for one in found if one.source == "paper"] == ["rounds = 30", "train.clip = 1.0, rounds = 30"]


def test_a_row_that_was_not_run_says_how_many_hours_it_takes(folder: Path) -> None:
    tables = ["mcmahan-table1-cnn", "mcmahan-table2"]
    for name in (*tables, "mcmahan-figure2"):
        (folder / "results" / f"{name}.json").unlink()
    reasons = (folder / "reasons.toml").read_text(encoding="utf-8")
    later = f'[[reason]]\nreproductions = {json.dumps(tables)}\nverdict = "not run"\nbecause = "later"\n'
    (folder / "reasons.toml").write_text(later + reasons, encoding="utf-8")
    found = {(one.reproduction, one.row, one.source): one.hours for one in reproductions.numbers(folder)}
    # 29 rounds of 10 clients with 600 images, 5 epochs of 0.29 ms an image, and a test of 0.93 s
    few = found["mcmahan-table2", "iid, E 5, B 50", "paper"]
    assert few == pytest.approx(29 * (10 * 600 * 5 * 0.29e-3 + 0.93) / 3600)
    assert "| iid, E 5, B 50 | paper | 29 | – |  |  | not run: 0.1 h (1) |" in reproductions.page(folder)
    # no number was published, so all 1,000 rounds that the file allows
    all_rounds = found["mcmahan-table1-cnn", "non-iid, B ∞, C 1", "slides"]
    assert all_rounds == pytest.approx(1000 * (100 * 600 * 5 * 0.36e-3 + 0.93) / 3600)


def test_a_row_that_was_run_in_several_ways_says_which_way_a_number_is_from() -> None:
    lines = reproductions.page().splitlines()
    assert any(line.startswith("| iid, E 1, B 10 | paper | 34 | 33.3 ± 5.2 |") for line in lines)
    assert any(line.startswith("| iid, E 1, B 10 (train.clip = 1.0) | paper | 34 | 66.0 |") for line in lines)


def test_a_run_of_the_figure_counts_for_the_rows_of_tables_with_the_same_settings(folder: Path) -> None:
    tables = ["mcmahan-table1-cnn", "mcmahan-table2"]
    for name in (*tables, "mcmahan-figure2"):
        (folder / "results" / f"{name}.json").write_text("[]", encoding="utf-8")
    first = "".join(
        f'[[reason]]\nreproductions = {json.dumps(tables)}\nchanged = {changed}\nverdict = "{verdict}"\nbecause = ""\n'
        for changed, verdict in (("true", "not reproduced"), ("false", "not run"))
    )
    reasons = (folder / "reasons.toml").read_text(encoding="utf-8")
    (folder / "reasons.toml").write_text(first + reasons, encoding="utf-8")

    def ours(*accuracy: float) -> dict[tuple[str, str], tuple[str, str]]:
        record = {
            "row": "non-iid, E 5, B 10",
            "seeds": [1],
            "changes": {"rounds": "4", "train.lr": "0.1"},
            "ours": {"best accuracy": [99.5]},
            "curves": [[[1, 2, 3, 4], accuracy]],
        }
        (folder / "results" / "mcmahan-figure2.json").write_text(json.dumps([record]), encoding="utf-8")
        found = [one for one in reproductions.numbers(folder) if one.reproduction in tables and one.ours]
        return {(one.row, one.source): (one.ours, one.how) for one in found}

    rows = {("non-iid, E 5, B 10", "paper"), ("non-iid, B 10, C 0.1", "paper"), ("non-iid, B 10, C 0.1", "slides")}
    # the figure's run went on after it reached 99 %; the table's would have stopped
    assert ours(0.9, 0.98, 0.995, 0.97) == dict.fromkeys(rows, ("3.0", "train.lr = 0.1"))
    # a run that ended before it got there says how long it was
    assert ours(0.9, 0.91, 0.92, 0.93) == dict.fromkeys(rows, ("not reached", "rounds = 4, train.lr = 0.1"))


def test_the_page_and_its_picture_change_with_a_stored_number(folder: Path) -> None:
    before = reproductions.page(folder)
    drawn = reproduction_figures.places_of(list(reproductions.numbers(folder)), "rounds")
    keep(folder, [30.0])
    assert reproductions.page(folder) != before
    after = reproduction_figures.places_of(list(reproductions.numbers(folder)), "rounds")
    assert (34.0, 30.0, "reproduced") in after
    assert (34.0, 30.0, "reproduced") not in drawn


def test_the_pictures_show_what_was_stored(folder: Path) -> None:
    numbers = list(reproductions.numbers(folder))
    figure = reproduction_figures.beside(numbers, reproductions.ROUNDS, reproductions.POINTS)
    shown = sum(len(dots.get_offsets()) for axes in figure.axes for dots in axes.collections[:3])
    kinds = ("rounds", "accuracy", "percent")
    assert shown == len(reproduction_figures.places_of(numbers, *kinds)) > 100
    above, _ = reproduction_figures.curves(folder).axes
    ends = [line.get_xdata()[-1] for line in above.lines if len(line.get_xdata()) > 2]
    assert ends[:3] == [34, 35, 31]  # the rounds of the three seeds of the first row
    assert 20 in ends  # a row that was run with one seed instead of three


def test_a_kept_result_replaces_the_same_row_run_in_the_same_way(tmp_path: Path) -> None:
    def run_again(seeds: list[int], rounds: list[float], **changes: str) -> list[dict[str, Any]]:
        changes = {"data.path": "somewhere", "seeds": str(seeds), **changes}
        record = {"row": "iid", "seeds": seeds, "changes": changes, "ours": {"rounds": rounds}, "curves": []}
        (tmp_path / "reproduction.json").write_text(json.dumps([record]), encoding="utf-8")
        keeping.keep("table", tmp_path, results=tmp_path)
        return json.loads((tmp_path / "table.json").read_text(encoding="utf-8"))

    run_again([1], [34.0])
    run_again([1], [66.0], **{"train.clip": "1.0"})
    first, clipped = run_again([1, 2], [34.0, 35.123456])
    assert first["ours"] == {"rounds": [34.0, 35.1235]}
    assert first["changes"] == {"seeds": "[1, 2]"}
    assert clipped["ours"] == {"rounds": [66.0]}


def test_a_kept_result_says_in_words_which_data_it_was(tmp_path: Path) -> None:
    changes = {"data.source": "npz", "data.partition.clients": "73", "rounds": "10"}
    record = {"row": "neuroevolution", "changes": changes, "ours": {"fitness": [-0.3]}}
    (tmp_path / "reproduction.json").write_text(json.dumps([record]), encoding="utf-8")
    keeping.keep("eeg", tmp_path, "16 people", tmp_path)
    (kept,) = json.loads((tmp_path / "eeg.json").read_text(encoding="utf-8"))
    assert kept["changes"] == {"rounds": "10", "data": "16 people"}
