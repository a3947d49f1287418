"""The next-word reproductions: their rows are the document's, and they run on one's own texts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedloom.papers import published
from fedloom.papers.reproduce import Rerun
from fedloom.results.run_data import RunData


def told(name: str) -> dict[str, dict[str, float]]:
    rows = published.load(name).row
    return {row.name: dict(row.published["thesis"]) for row in rows if row.published}  # type: ignore[arg-type]


def test_the_rows_are_those_of_the_tables() -> None:
    six = told("next-word")
    assert [row["accuracy"] for row in six.values()] == [0.2176, 0.2316, 0.2338, 0.2338, 0.2185, 0.231, 0.2108]
    assert six["FedYogi"]["loss"] == 5.5615
    assert told("next-word-mu")["mu 0.1"] == {"accuracy": 0.2366, "loss": 6.1783}
    assert [row["loss"] for row in told("next-word-dropout").values()] == [6.7723, 6.8241, 6.7387, 6.7256]
    scan = told("next-word-scan")
    assert len(scan) == 18
    assert scan["64 units, lr 0.01, embedding 16"] == {"accuracy": 0.2376, "loss": 6.1452}
    assert scan["128 units, lr 0.1, embedding 16"] == {"accuracy": 0.2887, "loss": 6.3851}


def test_every_row_means_what_its_name_says() -> None:
    def planned(name: str) -> dict[str, dict[str, object]]:
        return {row.name: row.set for row in published.load(name).row}

    normalised = {"layer_norm": True, "recurrent_dropout": 0.6}
    six = planned("next-word")
    assert six == planned("next-word-20")
    assert six["FedBN as written: normalisation stays local"] == {"algorithm": {"fedbn": {}}, "task.args": normalised}
    assert six["FedBN as coded: everything is averaged"] == {"algorithm": {"fedavg": {}}, "task.args": normalised}
    for name, settings in planned("next-word-scan").items():
        units, rate, embedding = (float(part.split()[i]) for part, i in zip(name.split(", "), (0, 1, 1), strict=True))
        assert settings == {"train.lr": rate, "task.args": {"units": units, "embedding": embedding}}
    for name, settings in planned("next-word-mu").items():
        assert settings == {"algorithm.fedprox.mu": float(name.removeprefix("mu "))}


@pytest.mark.slow
def test_it_runs_on_ones_own_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        {"user": user, "comments": ["a little more than kin", "and less than kind"] * 3} for user in ("ham", "cla")
    ]
    (tmp_path / "reddit.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.chdir(tmp_path)
    found = published.load("next-word")
    changes = {"seeds": [1], "run.backend": "serial"}
    rerun = Rerun(found, quick=True, changes=changes)
    planned = rerun.plan(["FedBN as written*", "FedAdam"])
    table = rerun.run(planned, tmp_path / "out")
    assert table is not None
    for one in planned:
        assert [len(values) for values in one.ours.values()] == [1, 1, 1, 1]
        accuracy, _, peak, at = (values[0] for values in one.ours.values())
        assert accuracy is not None
        assert peak is not None
        assert 0 <= accuracy <= peak <= 1
        assert at in (1, 2, 3)
    views = {
        one.row.name: RunData.read(tmp_path / "out" / "rows" / one.row.name.replace(" ", "_").replace(":", "_"))
        for one in planned
    }
    assert {view.client_name(number) for view in views.values() for number in (0, 1)} == {"ham", "cla"}
