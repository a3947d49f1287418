"""Tables and figures of audits, from the numbers alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedloom.errors import StoreError
from fedloom.experiment.description import identity
from fedloom.results import audit_findings, report
from fedloom.results.run_data import RunData

SHARE = {"value": 0.5, "low": 0.4, "high": 0.6}
BOUND = {"epsilon": 1.5, "guesses": 60, "correct": 55, "confidence": 0.95}
PRIVATE = {"claimed": 2.0, "delta": 1e-5, "adjacency": "add or remove one client", "canaries": 100}
VIEWS = ("update", "secure aggregation", "differential privacy")
FOUND: dict[str, Any] = {
    "epsilon": {
        "sound": {**PRIVATE, "bound": BOUND, "estimate": 2.2, "refuted": False},
        "broken": {**PRIVATE, "bound": {**BOUND, "epsilon": 4.0}, "estimate": None, "refuted": True},
    },
    "membership": {"sound": {"loss": {"auc": SHARE, "found": SHARE, "members": 10, "others": 10}}},
    "reconstruction": {
        "pictures": {view: [[[0.0, 1.0], [1.0, 0.0]]] for view in ("original", *VIEWS)},
        "similarity": {"original": 1.0, **dict.fromkeys(VIEWS, 0.25), "chance": 0.1},
        "labels": dict.fromkeys(VIEWS, SHARE),
        "guessing": 0.3,
        "cohort": 10,
        "noise_multiplier": 1.0,
    },
    "poisoning": {
        "accuracy": {"IID": {"mean": {"none": 0.9, "sign flip": 0.2}, "krum": {"none": 0.8, "sign flip": 0.7}}},
        "clients": 20,
        "attackers": 4,
        "rounds": 5,
    },
}


def test_a_bound_above_the_claim_refutes_it() -> None:
    table = next(audit_findings.tables(FOUND))
    assert table.shown(table.rows[0]) == [
        *("sound", "2.00", "1.50", "2.20", "1e-05", "add or remove one client", "55 of 60", "not refuted")
    ]
    assert table.shown(table.rows[1])[2:4] == ["4.00", "–"]
    assert table.rows[1][-1] == "refuted"


def test_shares_are_shown_with_their_intervals() -> None:
    _, membership, reconstruction = audit_findings.tables(FOUND)
    assert membership.shown(membership.rows[0]) == [
        *("sound", "loss", "0.50", "0.40", "0.60", "50.00 %", "40.00 %", "60.00 %")
    ]
    shown = [reconstruction.shown(row) for row in reconstruction.rows]
    assert shown[0] == ["from the update", "50.00 %", "40.00 %", "60.00 %", "0.25"]
    assert shown[-1] == ["nothing: guessing", "30.00 %", "–", "–", "0.10"]


def test_a_reconstruction_names_the_protections_that_it_did_without() -> None:
    for names, said in ([[], False], [["secure_aggregation", "example_dp"], True]):
        found = {"reconstruction": {**FOUND["reconstruction"], "not_applied": names}}
        (table,), figure = audit_findings.tables(found), audit_findings.reconstruction(found)
        assert figure is not None
        for text in (table.note, figure.caption):
            assert ("(secure_aggregation, example_dp) were not applied to these updates" in text) == said
            assert ("not applied" in text) == said


def test_an_audit_that_was_left_out_has_no_table_and_no_figure() -> None:
    nothing = {name: {"left_out": "it does not apply"} for name in FOUND}
    assert list(audit_findings.tables(nothing)) == []
    assert audit_findings.reconstruction(nothing) is audit_findings.poisoning(nothing) is None


def test_the_pictures_of_a_victim_are_one_row() -> None:
    drawn = audit_findings.reconstruction(FOUND)
    assert drawn is not None
    titles = [axes.get_title() for axes in drawn.figure.axes]
    assert titles == ["original", "from the update", "from the mean of 10", "with noise, z = 1"]


def test_the_noise_multiplier_is_rounded_and_explained() -> None:
    found = {"reconstruction": {**FOUND["reconstruction"], "noise_multiplier": 2.68431}}
    drawn, (table,) = audit_findings.reconstruction(found), audit_findings.tables(found)
    assert drawn is not None
    assert drawn.figure.axes[3].get_title() == table.rows[2][0] == "with noise, z = 2.68"
    for text in (drawn.caption, table.note):
        assert "noise multiplier: the standard deviation of the noise divided by the clip" in text
        assert "2.68431" not in text


def test_findings_of_earlier_versions_have_no_level_of_guessing() -> None:
    found = {key: value for key, value in FOUND["reconstruction"].items() if key != "guessing"}
    (table,) = audit_findings.tables({"reconstruction": found})
    assert table.shown(table.rows[-1])[1] == "–"


def of_columns(count: int) -> dict[str, Any]:
    values = {view: [[float(place) for place in range(count)]] * 3 for view in ("original", *VIEWS)}
    columns = [f"column {place}" for place in range(count)]
    return {"reconstruction": {**FOUND["reconstruction"], "pictures": {}, "values": values, "columns": columns}}


def test_the_values_of_a_table_are_drawn_with_the_names_of_its_columns() -> None:
    drawn = audit_findings.reconstruction(of_columns(4))
    assert drawn is not None
    assert [axes.get_title(loc="left") for axes in drawn.figure.axes] == ["client 1", "client 2", "client 3"]
    named = [label.get_text() for label in drawn.figure.axes[0].get_yticklabels()]
    assert named == ["column 0", "column 1", "column 2", "column 3"]
    assert [bar.get_width() for bar in drawn.figure.axes[0].patches] == [0, 1, 2, 3]
    assert drawn.caption.startswith("Each panel is a client")
    assert "columns are shown" not in drawn.caption
    (table,) = audit_findings.tables(of_columns(4))
    assert table.columns[-1] == "similarity of values"
    assert "values are searched for" in table.note
    assert "picture" not in table.note + drawn.caption


def test_of_many_columns_the_first_are_drawn() -> None:
    drawn = audit_findings.reconstruction(of_columns(20))
    assert drawn is not None
    assert len(drawn.figure.axes[0].patches) == 15
    assert drawn.caption.endswith("The first 15 of 20 columns are shown.")


def test_the_heat_map_has_a_number_for_every_rule_and_attack() -> None:
    drawn = audit_findings.poisoning(FOUND)
    assert drawn is not None
    axes, bar = drawn.figure.axes
    assert [text.get_text() for text in axes.texts] == ["90", "20", "80", "70"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["mean", "krum"]
    assert bar.get_ylabel() == "Test accuracy"
    assert "4 attackers among 20 clients" in drawn.caption


def test_the_report_has_a_chapter_about_the_audit_of_its_run(comparison: Path, run: RunData) -> None:
    assert "Audit" not in report.html(run, [], [])
    path = comparison / "audit.json"
    path.write_text(json.dumps({**FOUND, "experiment": {"identity": "of another experiment"}}))
    assert RunData.read(comparison).audit == {}
    path.write_text(json.dumps({**FOUND, "experiment": {"identity": identity(run.description)}}))
    try:
        page = report.write(comparison, files=False).read_text()
    finally:
        path.unlink()
    assert '<section id="audit">' in page
    for title in ("The claimed ε against an attacker", "Attackers against robust rules", "refuted"):
        assert title in page


def test_a_damaged_file_is_named(comparison: Path) -> None:
    path = comparison / "audit.json"
    path.write_text("{")
    try:
        with pytest.raises(StoreError, match=r"audit\.json is damaged .* Delete it"):
            _ = RunData.read(comparison).audit
    finally:
        path.unlink()
