"""The commands after a run."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from fedloom.experiment.run_folder import locked
from fedloom.experiment.store import Store
from fedloom.tuning import sweep_folder
from tests.cli.commands import fedloom, in_this_process
from tests.results.hospitals import hospitals


def test_run_show_list_and_export(folder: Path) -> None:
    done = fedloom("run", "small.toml", folder=folder)
    assert "fedavg" in done.stdout
    assert "Picture: runs/small/accuracy.png" in done.stdout
    assert "round 4 of 4" in done.stderr
    assert (folder / "runs/small/accuracy.png").is_file()
    assert 'name = "small"' in (folder / "runs/small/experiment.toml").read_text()
    shown = json.loads(fedloom("show", "runs/small", "--json", folder=folder).stdout)
    assert shown["status"] == "done"
    assert [(run["algorithm"], run["seed"], run["rounds"]) for run in shown["runs"]] == [
        ("fedavg", 1, 4),
        ("local", 1, 4),
    ]
    assert 0 < shown["runs"][0]["final"]["test_accuracy"] <= 1
    assert "fedavg" in fedloom("show", "runs/small", folder=folder).stdout
    assert "small" in fedloom("list", folder=folder).stdout
    exported = fedloom("export", "runs/small", "--csv", "--model", folder=folder).stdout.split()
    names = {Path(path).name for path in exported}
    assert {"clients.csv", "fedavg-1.safetensors", "fedavg-1.pt", "local-1-client-0.safetensors"} <= names
    assert all((folder / path).is_file() for path in exported)
    header = (folder / "runs/small/export/clients.csv").read_text().splitlines()[0]
    assert header == "algorithm,seed,round,client,phase,split,metric,value,examples"
    import torch

    loaded = torch.load(folder / "runs/small/export/fedavg-1.pt", weights_only=True)
    from fedloom.models import build

    build("digits_mlp").load_state_dict(loaded)


@pytest.mark.slow
def test_the_model_of_one_client_can_be_exported(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    monkeypatch.chdir(folder)
    (folder / "net.py").write_text("from fedloom.models.digits_mlp import DigitsMLP as Net\n")
    tables = ["rounds=2", "algorithm={ditto={}, fedavg={}}", "task.model=net.py:Net", "run.backend=serial"]
    changes = [part for table in tables for part in ("--set", table)]
    in_this_process("run", "small.toml", "-q", *changes, monkeypatch=monkeypatch)
    capsys.readouterr()
    in_this_process("export", "runs/small", "--model", monkeypatch=monkeypatch)
    told = capsys.readouterr()
    assert "For ditto, only the server's model was written" in told.err
    assert "--client NAME" in told.err
    for client in ("3", "7"):
        in_this_process("export", "runs/small", "--model", "--client", client, monkeypatch=monkeypatch)
    told = capsys.readouterr()
    assert "only" not in told.err
    assert "runs/small/export/ditto-1-3.safetensors" in told.out.split()

    in_this_process(
        *("export", "runs/small", "--model", "--algorithm", "ditto", "--seed", "1", "--to", "one"),
        monkeypatch=monkeypatch,
    )
    capsys.readouterr()
    assert {path.stem for path in (folder / "one").iterdir()} == {"ditto-1", "preprocessing-1", "MODEL_CARD"}
    in_this_process("export", "runs/small", "--model", "--seed", "9", monkeypatch=monkeypatch, code=2)
    assert "no run of any algorithm with seed 9. Known: " in capsys.readouterr().err
    in_this_process("export", "runs/small", "--csv", "--seed", "1", monkeypatch=monkeypatch, code=2)
    assert "--seed chooses models: use it with --model" in capsys.readouterr().err

    def exported(name: str) -> dict[str, torch.Tensor]:
        return torch.load(folder / f"runs/small/export/{name}.pt", weights_only=True)

    def same(one: str, other: str) -> bool:
        a, b = exported(one), exported(other)
        return all(torch.equal(a[name], b[name]) for name in a)

    assert same("fedavg-1", "fedavg-1-3")
    assert not same("ditto-1", "ditto-1-3")
    assert not same("ditto-1-7", "ditto-1-3")
    in_this_process("export", "runs/small", "--model", "--client", "x", monkeypatch=monkeypatch, code=2)
    assert "There is no client 'x'. Known: 0, 1, 2" in capsys.readouterr().err
    (folder / "net.py").unlink()
    in_this_process("export", "runs/small", "--model", "--client", "3", monkeypatch=monkeypatch, code=2)
    assert "change to the folder of the file that was run" in capsys.readouterr().err


@pytest.fixture
def runs(comparison: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder `runs` with two equal runs, in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    for name in ("one", "two"):
        shutil.copytree(comparison, tmp_path / "runs" / name)
    return tmp_path / "runs"


def command(*arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: int = 0) -> str:
    """Run a command in this process, and return all that it printed."""
    in_this_process(*arguments, monkeypatch=monkeypatch, code=code)
    told = capsys.readouterr()
    return told.out + told.err


def test_the_list_has_status_date_and_the_best_result(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Store(runs / "two") as store:
        store.set_status(store.cells()[0]["id"], "running")
    one, two = (
        line
        for line in command("list", monkeypatch=monkeypatch, capsys=capsys).splitlines()
        if line.strip().startswith(("one", "two"))
    )
    assert re.search(r"one +done +\d{4}-\d\d-\d\d \d\d:\d\d +6 +5 +(fedavg|local): \d\d\.\d\d % accuracy", one)
    assert re.search(r"two +interrupted +\d{4}-", two)
    listed = json.loads(command("list", "--json", monkeypatch=monkeypatch, capsys=capsys))
    assert [run["status"] for run in listed] == ["done", "interrupted"]
    assert listed[0]["started"] <= listed[0]["finished"]
    shown = command("show", "runs/two", monkeypatch=monkeypatch, capsys=capsys)
    assert "The run is interrupted: its process was stopped or died." in shown


def test_the_list_has_sweeps_below_the_runs(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    sweep = runs / "tune-sweep"
    with sweep_folder.running(sweep, ["train.lr", "algorithm.fedprox.mu"]):
        running = command("list", monkeypatch=monkeypatch, capsys=capsys)
    assert re.search(r"tune-sweep +running +\d{4}-\d\d-\d\d \d\d:\d\d +– +train\.lr", running)
    sweep_folder.finish(sweep, {"tried": [{}, {}]}, "fedprox, train.lr=0.3 algorithm.fedprox.mu=0.1: 93.33 % accuracy")
    done = command("list", monkeypatch=monkeypatch, capsys=capsys)
    assert re.search(r"tune-sweep +done +\d{4}-\d\d-\d\d \d\d:\d\d +2 +train\.lr,? .* fedprox,", done)
    assert all(len(line) <= 80 for line in (running + done).splitlines())
    listed = json.loads(command("list", "--json", monkeypatch=monkeypatch, capsys=capsys))
    assert [(one["kind"], one["name"]) for one in listed] == [("run", "one"), ("sweep", "tune-sweep"), ("run", "two")]
    assert listed[1]["over"] == ["train.lr", "algorithm.fedprox.mu"]


def test_a_sweep_is_shown_and_removed_as_a_run_is(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = runs / "tune-sweep"
    with sweep_folder.running(sweep, ["train.lr"]):
        told = command("show", "runs/tune-sweep", monkeypatch=monkeypatch, capsys=capsys, code=2)
        assert "is not finished" in told
    (sweep / "sweep.md").write_text("| rank | train.lr |\n| 1 | 0.3 |\n")
    (sweep / "settings" / "train.lr=0.3").mkdir(parents=True)
    (sweep / "best-fedavg").mkdir()
    assert "| 1 | 0.3 |" in command("show", "runs/tune-sweep", monkeypatch=monkeypatch, capsys=capsys)
    told = command("remove", "runs/tune-sweep", "-y", monkeypatch=monkeypatch, capsys=capsys)
    assert "Deleted runs/tune-sweep (interrupted" in told
    assert [path.name for path in sweep.iterdir()] == ["best-fedavg"]  # a run, which has results of its own


def test_a_run_that_failed_says_why(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Store(runs / "two") as store:
        for cell in store.cells():
            store.set_status(cell["id"], "failed", error="there is no file x.csv")
    shown = command("show", "runs/two", monkeypatch=monkeypatch, capsys=capsys)
    assert shown.count("The run failed. there is no file x.csv") == 1


def test_clients_that_were_left_out_are_named_beside_the_numbers(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Store(runs / "one") as store, store._transaction() as database:
        database.execute("INSERT INTO public_numbers VALUES (1, 1, 1, 'outlier', 1, 1.0)")
    in_this_process("show", "runs/one", monkeypatch=monkeypatch)
    assert "left out updates that were far too long" in capsys.readouterr().err
    in_this_process("show", "runs/one", "--json", monkeypatch=monkeypatch)
    (caution,) = (one for one in json.loads(capsys.readouterr().out)["cautions"] if "left out" in one)
    assert "left out updates that were far too long" in caution


def test_a_missing_folder_is_an_error_and_an_empty_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "no folder runs" in command("list", monkeypatch=monkeypatch, capsys=capsys, code=2)
    (tmp_path / "runs").mkdir()
    assert command("list", monkeypatch=monkeypatch, capsys=capsys) == "No runs in runs.\n"


def test_a_metric_can_be_shown(runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert "one: loss" in command("show", "runs/one", "--metric", "loss", monkeypatch=monkeypatch, capsys=capsys)
    told = command("show", "runs/one", "--metric", "los", monkeypatch=monkeypatch, capsys=capsys, code=2)
    assert "no metric 'los'. Measured: accuracy, loss. Did you mean 'loss'?" in told


def test_runs_are_compared_in_tables_and_pictures(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Store(runs / "two") as store:
        for cell in (cell for cell in store.cells() if cell["label"] == "fedavg"):
            store.set_status(cell["id"], "done", weights_sha256="other")
    told = command("compare", "runs/one", "runs/two", monkeypatch=monkeypatch, capsys=capsys)
    assert "fedavg (two)" in told
    assert "pooled is the same in runs/one and runs/two, with the same weights: it counts once." in told
    assert "Paired differences over the same seeds" in told
    folder = runs / "compare-one-two"
    assert {"differences.csv", "overview_accuracy.tex", "comparison.png", "headline.svg"} <= {
        path.name for path in folder.iterdir()
    }
    assert "replace those of an earlier comparison" not in told
    told = command("compare", "runs/one", "runs/two", "--only", "fedavg", monkeypatch=monkeypatch, capsys=capsys)
    assert "They replace those of an earlier comparison, and so do the pictures. To keep both" in told
    asked = ("compare", "runs/one", "runs/two", "--metric", "loss", "--out", "beside", "--json")
    in_this_process(*asked, monkeypatch=monkeypatch)
    found = json.loads(capsys.readouterr().out, parse_constant=lambda text: pytest.fail(f"{text} is no JSON"))
    overview = found["tables"][0]
    assert overview["name"] == "overview_loss"
    assert len(overview["columns"]) == len(overview["rows"][0])
    cells = [cell for row in overview["rows"] for cell in row[1:]]
    assert {type(cell) for cell in cells} <= {float, type(None)}
    assert any(cells)
    assert None in cells
    assert (runs.parent / "beside" / "differences.csv").is_file()
    few = ("--only", "fedavg", "--baseline", "fedavg (one)", "--out", "few")
    told = command("compare", "runs/one", "runs/two", *few, monkeypatch=monkeypatch, capsys=capsys)
    assert "fedavg (two) − fedavg (one)" in told
    assert "pooled" not in told
    told = command("compare", "runs/one", "--metric", "loss", monkeypatch=monkeypatch, capsys=capsys)
    assert "fedavg − pooled" in told or "pooled − fedavg" in told
    assert (runs / "compare-one-loss" / "differences.csv").is_file()


def test_a_run_is_removed_only_with_a_yes(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    told = command("remove", "runs/one", monkeypatch=monkeypatch, capsys=capsys, code=2)
    assert "say so with --yes" in told
    answers = io.StringIO("n\ny\n")
    answers.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdin", answers)
    told = command("remove", "runs/one", "runs/two", monkeypatch=monkeypatch, capsys=capsys)
    assert "Delete runs/one (done, " in told
    assert [path.name for path in runs.iterdir()] == ["one"]
    (runs / "one" / "notes.txt").touch()
    told = command("remove", "runs/one", "--yes", monkeypatch=monkeypatch, capsys=capsys)
    assert "Kept what fedloom did not write: notes.txt" in told


def test_what_is_not_a_finished_run_elsewhere_is_not_removed(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(folder: str) -> str:
        return command("remove", "runs/two", folder, "-y", monkeypatch=monkeypatch, capsys=capsys, code=code)

    code = 1
    assert "not a run folder" in refused("runs")
    code = 2
    with locked(runs / "one"):
        assert "A process is running in runs/one" in refused("runs/one")
    (runs / "link").symlink_to(runs / "one")
    assert "is a link" in refused("runs/link")
    (runs / "one" / "within").mkdir()
    monkeypatch.chdir(runs / "one" / "within")
    assert "change to another folder" in command(
        "remove", "..", "-y", monkeypatch=monkeypatch, capsys=capsys, code=code
    )
    assert (runs / "two" / "run.db").is_file()  # nothing is deleted if something is refused


def test_a_folder_that_is_not_a_run_is_an_error(folder: Path) -> None:
    assert "not a run folder" in fedloom("show", ".", folder=folder, code=1).stderr


@pytest.mark.slow
def test_a_damaged_run_does_not_hide_the_others(folder: Path) -> None:
    fedloom("run", "small.toml", "-q", "--set", "rounds=1", folder=folder)
    (folder / "runs/broken").mkdir()
    (folder / "runs/broken/run.db").write_text("no database")
    done = fedloom("list", folder=folder)
    assert "small" in done.stdout
    assert "broken" in done.stderr


def test_no_colour_when_asked(folder: Path) -> None:
    fedloom("run", "small.toml", "-q", "--set", "run.backend=serial", "--set", "rounds=1", folder=folder)
    assert "\x1b[" not in fedloom("show", "runs/small", folder=folder, NO_COLOR="1", FORCE_COLOR="").stdout


def test_predict_answers_for_new_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    hospitals(tmp_path)
    new = "age,ward,crp,id\n70,icu,3.5,a\n33,surgery,,b\n"
    (tmp_path / "new.csv").write_text(new)
    in_this_process("predict", "run", "new.csv", monkeypatch=monkeypatch)
    told = capsys.readouterr()
    header, *rows = (line.split(",") for line in told.out.splitlines())
    assert header == ["id", "prediction", "probability alive", "probability dead"]
    assert [row[0] for row in rows] == ["a", "b"]
    assert all(float(row[2]) + float(row[3]) == pytest.approx(1, abs=1e-5) for row in rows)
    assert told.err == "Model: fedavg, seed 1, after 2 rounds.\n"
    arguments = ["--algorithm", "local", "--client", "oslo", "--to", "out.csv"]
    in_this_process("predict", "run", "new.csv", *arguments, monkeypatch=monkeypatch)
    told = capsys.readouterr()
    assert (told.out, told.err) == ("out.csv\n", "Model: local, seed 1 of client oslo, after 2 rounds.\n")
    assert (tmp_path / "out.csv").read_text().startswith("id,prediction,")
    in_this_process("predict", "run", "new.csv", "--client", "oslo", monkeypatch=monkeypatch)
    same = "fedavg has one model for all clients: --client oslo has no effect.\n"
    assert capsys.readouterr().err == f"Model: fedavg, seed 1, after 2 rounds.\n{same}"
    in_this_process("export", "run", "--model", "--client", "oslo", monkeypatch=monkeypatch)
    same = "fedavg has one model for all clients: the file of client oslo holds that one.\n"
    assert capsys.readouterr().err == same
    (tmp_path / "new.csv").write_text(new + "old,icu,1,c\n")
    in_this_process("predict", "run", "new.csv", "--to", "out.csv", monkeypatch=monkeypatch, code=2)
    assert "out.csv exists already. Choose another name, or use --force" in capsys.readouterr().err
    in_this_process("predict", "run", "new.csv", "--to", "out.csv", "--force", monkeypatch=monkeypatch, code=2)
    assert "Line 4 of new.csv has 'old' in column 'age'" in capsys.readouterr().err
    assert "old" not in (tmp_path / "out.csv").read_text()
    (tmp_path / "new.csv").write_text(new + "71,icu,1,c\n")
    in_this_process("predict", "run", "new.csv", "--to", "out.csv", "--force", monkeypatch=monkeypatch)
    assert len((tmp_path / "out.csv").read_text().splitlines()) == 4


@pytest.mark.slow
def test_a_report_of_an_earlier_state_is_said_to_be_one(folder: Path) -> None:
    def said(*options: str) -> bool:
        done = fedloom("run", "small.toml", "-q", *options, folder=folder)
        return "report.html and the tables are of an earlier state of this run" in done.stderr

    assert not said("--no-report", "--set", "rounds=1"), "there is none"
    assert not said("--set", "rounds=1"), "it is written"
    assert not said("--no-report", "--set", "rounds=1"), "nothing was computed since"
    assert said("--no-report", "--set", "rounds=2")


@pytest.mark.parametrize(
    "command",
    [
        ("export", "runs/small", "--csv", "--to", "small.toml/x"),
        ("data", "describe", "small.toml", "--picture", "nowhere/x.png"),
    ],
)
def test_a_place_that_cannot_be_written_is_an_error_in_words(folder: Path, command: tuple[str, ...]) -> None:
    fedloom("run", "small.toml", "-q", "--no-report", "--set", "rounds=1", folder=folder)
    done = fedloom(*command, folder=folder, code=2)
    assert "cannot be read or written: N" in done.stderr  # no such file, or not a directory
    assert "Traceback" not in done.stderr
