"""The commands that train."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedloom import cli
from tests.cli.commands import EXPERIMENT, fedloom, in_this_process, shas, wait_for


@pytest.mark.slow
def test_the_same_bits_with_other_workers_and_after_kill_9(folder: Path) -> None:
    serial = ("--set", "run.backend=serial")
    expected = shas(fedloom("run", "small.toml", "--json", "-q", *serial, "--out", "one", folder=folder).stdout)
    two = fedloom("run", "small.toml", "--json", "-q", "--workers", "2", "--out", "two", folder=folder)
    assert two.stderr == "", "-q --json prints the result and nothing else"
    assert shas(two.stdout) == expected
    command = [sys.executable, "-m", "fedloom.cli", "run", "small.toml", "--json", "-q", "--out", "killed"]
    killed = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: list((folder / "killed").glob("cells/fedavg-1/round-000002.json")), killed)
    killed.kill()
    killed.wait()
    assert shas(fedloom("run", "small.toml", "--json", "-q", "--out", "killed", folder=folder).stdout) == expected


ASYNC = """
[cohort]
count = 4
mode = "async"
buffer = 2
[system]
step = 1.0
speed = { name = "lognormal", sigma = 1.0 }
vanish = 0.1
"""
COMPRESSED = """
[cohort]
count = 5
[compress]
up = { name = "topk", keep = 0.05 }
down = "bfloat16"
"""


@pytest.mark.slow
@pytest.mark.parametrize("tables", [ASYNC, COMPRESSED], ids=["asynchronous", "compressed"])
def test_the_same_bits_with_any_number_of_workers_and_after_kill_9(folder: Path, tables: str) -> None:
    (folder / "other.toml").write_text(EXPERIMENT.replace("[cohort]\ncount = 5\n", tables))
    common = ("run", "other.toml", "--json", "-q", "--set", "rounds=40")
    expected = shas(fedloom(*common, "--set", "run.backend=serial", "--out", "one", folder=folder).stdout)
    for workers in ("1", "2", "8"):
        found = fedloom(*common, "--workers", workers, "--out", f"with-{workers}", folder=folder)
        assert shas(found.stdout) == expected
    command = [sys.executable, "-m", "fedloom.cli", *common, "--out", "killed"]
    killed = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: list((folder / "killed").glob("cells/fedavg-1/round-000005.json")), killed)
    killed.kill()
    killed.wait()
    assert shas(fedloom(*common, "--out", "killed", folder=folder).stdout) == expected


@pytest.mark.slow
def test_interrupting_stops_after_a_checkpoint_and_says_how_to_go_on(folder: Path) -> None:
    serial = ("--set", "run.backend=serial", "--set", "rounds=15")
    expected = shas(fedloom("run", "small.toml", "--json", "-q", *serial, "--out", "whole", folder=folder).stdout)
    command = [sys.executable, "-m", "fedloom.cli", "run", "small.toml", "--out", "parts", "--set", "rounds=15"]
    running = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: list((folder / "parts").glob("cells/fedavg-1/round-*.json")), running)
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "Continue with: fedloom run small.toml --out parts --set rounds=15" in err
    again = fedloom("run", "small.toml", "--json", "-q", "--out", "parts", "--set", "rounds=15", folder=folder)
    assert shas(again.stdout) == expected


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_sigterm_ends_a_run_and_leaves_nothing_in_memory(folder: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "fedloom.cli",
        "run",
        "small.toml",
        "--set",
        "rounds=500",
        "--set",
        "run.workers=2",
        "--fresh",
    ]
    running = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: any(folder.glob("runs/small/cells/*/round-*.json")), running)
    opened = [os.readlink(file) for file in Path(f"/proc/{running.pid}/fd").iterdir()]
    shared = [Path(name) for name in opened if name.endswith(".shared")]
    assert shared
    assert all(path.exists() for path in shared)
    running.terminate()
    assert "Stopped by SIGTERM. The same command continues, without --fresh." in running.communicate(timeout=60)[1]
    assert running.returncode == 143
    assert not any(path.exists() for path in shared)
    assert (folder / "runs" / "small").stat().st_mode & 0o777 == 0o700


@pytest.mark.slow
def test_a_changed_experiment_is_refused_and_fresh_keeps_the_old_one(folder: Path) -> None:
    serial = ("--set", "run.backend=serial", "--set", "rounds=1")
    fedloom("run", "small.toml", "-q", *serial, folder=folder)
    refused = fedloom("run", "small.toml", "-q", *serial, "--set", "train.lr=0.2", folder=folder, code=2)
    assert "train.lr: 0.3 → 0.2" in refused.stderr
    assert refused.stdout == ""
    fedloom("run", "small.toml", "-q", *serial, "--set", "train.lr=0.2", "--fresh", folder=folder)
    assert len(list((folder / "runs").iterdir())) == 2


@pytest.mark.parametrize("quiet", [[], ["-q"]], ids=["with progress", "quiet"])
def test_each_caution_about_the_data_is_printed_once(folder: Path, quiet: list[str]) -> None:
    rows = [f"{who},{number / 20},{int(number >= 10)}" for who in "ab" for number in range(20)]
    (folder / "mine.csv").write_text("\n".join(["who,x,y", *rows]))
    data = "data={source='csv', path='mine.csv', client='who', label='y'}"
    changes = ("--set", data, "--set", "cohort={}", "--set", "task.model=logistic", "--set", "rounds=1")
    said = fedloom("run", "small.toml", "--no-report", *quiet, *changes, folder=folder).stderr
    assert said.count("x alone gives the label away") == 1


def test_the_terminal_says_if_algorithms_computed_the_same_or_a_metric_is_undefined(folder: Path) -> None:
    (folder / "mine.py").write_text("def nothing(outputs, labels):\n    return float('nan')\n")
    tables = ("rounds=1", "algorithm={fedavg={}, again={name='fedavg'}}", "task.metrics=['mine.py:nothing','accuracy']")
    changes = [part for table in tables for part in ("--set", table)]
    said = fedloom("run", "small.toml", "--no-report", "-q", *changes, folder=folder).stderr
    assert "Caution: fedavg and again ended with the same weights in every seed: they computed the same." in said
    assert "Caution: nothing is undefined at every client" in said


def test_a_diverging_run_fails_with_exit_code_1(folder: Path) -> None:
    done = fedloom("run", "small.toml", "-q", "--set", "train.lr=1e30", folder=folder, code=1)
    assert re.search(r"error: fedavg \(seed 1\): Round \d+, client '\d+'.*the loss is (nan|inf)", done.stderr)
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_run_with_abandoned_rounds_is_no_success(folder: Path) -> None:
    poisson = EXPERIMENT.replace("count = 5", 'sampling = "poisson"\nfraction = 0.5\nquorum = 1.0')
    (folder / "poisson.toml").write_text(poisson)
    done = fedloom("run", "poisson.toml", "--json", "--set", "rounds=6", folder=folder, code=4)
    result = json.loads(done.stdout)
    lost = [run["abandoned"] for run in result["runs"]]
    assert result["status"] == "degraded"
    assert 0 < lost[0] < 6
    assert f"{sum(lost)} of 12 rounds did not count" in done.stderr
    assert f"abandoned {lost[0]}" in done.stderr  # in the progress
    shown = fedloom("show", "runs/small", folder=folder)
    assert f"6 ({lost[0]} abandoned)" in shown.stdout
    ended = fedloom("run", "poisson.toml", "--fresh", "--set", "cohort.max_abandoned=0", folder=folder, code=3)
    assert "cohort.max_abandoned = 0" in ended.stderr


def test_a_run_without_anything_to_draw_is_still_a_success(folder: Path) -> None:
    done = fedloom("run", "small.toml", "--set", "data.split=[1.0,0.0,0.0]", "--set", "rounds=1", folder=folder)
    assert "No picture" in done.stderr
    assert "Results: runs/small" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "nothing.toml"], "no experiment file nothing.toml"),
        (["run", "small.toml", "--set", "train.lrr=1"], "Did you mean 'lr'?"),
        (["run", "small.toml", "--set", "train.lr"], "table.key=value"),
        (["run", "small.toml", "--set", "train.lr", "0.3"], "train.lr 0.3: write it in one word, --set train.lr=0.3."),
        (["run", "small.toml", "--set", "train.lr", "=", "0.3"], "in one word, --set train.lr=VALUE."),
        (["run", "small.toml", "more.toml"], "error: Got unexpected extra argument"),
        (["run", "small.toml", "--live"], "no option --live here: `fedloom watch RUN` shows a run in the browser."),
        (["run", "small.toml", "--set", "train.lr=[1"], "not a valid TOML value"),
        (["run", "small.toml", "--set", "cohort.count=11"], "only 10 clients"),
        (["run", "small.toml", "--set", "cohort.quorum=50"], "can never be met"),
        (["run", "small.toml", "--set", "task.model=digit_mlp"], "digits_mlp"),
        (["run", "small.toml", "--set", "task.loss=mse"], "mse"),
        (["run", "small.toml", "--set", "task.args={classes=5}"], "classes"),
        (["run", "small.toml", "--set", "data.server=test"], "test"),
        (["export", "small.toml"], "--csv"),
        (["export", "small.toml", "--csv", "--client", "a"], "--model"),
        (["frobnicate"], "frobnicate"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(
    arguments: list[str], words: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # in this process: a dozen fresh ones would spend a minute on loading torch
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["fedloom", *arguments])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    said = capsys.readouterr()
    assert stopped.value.code == 2, said.err
    assert words in said.err
    assert "Traceback" not in said.err
    assert said.out == ""


QUICK = ["rounds=1", "run.backend=serial", "algorithm={fedavg={}}", "data.partition={name='iid', clients=6}"]


def sweep_quickly(over: str, monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    given = [*options, *(word for change in QUICK for word in ("--set", change))]
    in_this_process("sweep", "small.toml", "-q", "--over", over, *given, monkeypatch=monkeypatch)


def test_what_a_sweep_suggests_repeats_its_changes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    sweep_quickly("train.lr=0.1,0.3", monkeypatch, "--workers", "1")
    told = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("train.lr = 0.") and "that was tried:" in line for line in told) == 1
    (suggested,) = (line for line in told if line.startswith("  fedloom run "))
    _, *command = shlex.split(suggested)
    assert [word for word in command if "=" in word][:-1] == [*QUICK, "run.workers=1"]
    in_this_process(*command, "-q", "--no-report", monkeypatch=monkeypatch)
    assert (folder / "runs/small-sweep/best-fedavg/run.db").is_file()


def test_a_sweep_suggests_to_measure_each_algorithm_alone_as_it_is_printed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    partitions = "data.partition={name = 'iid', clients = 3},{name = 'iid', clients = 4}"
    quick = ("--set", "rounds=1", "--set", "cohort.count=2", "--set", "run.backend=serial")
    in_this_process("sweep", "small.toml", "-q", "--over", partitions, *quick, monkeypatch=monkeypatch)
    suggested = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  fedloom run ")]
    assert len(suggested) == 2
    for label, line in zip(("fedavg", "local"), sorted(suggested), strict=True):
        _, *command = shlex.split(line)
        in_this_process(*command, "-q", "--no-report", "--json", monkeypatch=monkeypatch)
        done = json.loads(capsys.readouterr().out)
        assert {cell["algorithm"] for cell in done["runs"]} == {label}


def test_seeds_are_added_to_a_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    quick = ("-q", "--json", "--set", "rounds=1", "--set", "run.backend=serial")
    found = []
    for seeds in ("[2]", "[2,1]"):
        in_this_process("run", "small.toml", *quick, "--set", f"seeds={seeds}", monkeypatch=monkeypatch)
        found.append(json.loads(capsys.readouterr().out)["runs"])
    assert [(cell["algorithm"], cell["seed"]) for cell in found[1]] == [
        *(("fedavg", 2), ("local", 2)),
        *(("fedavg", 1), ("local", 1)),
    ]
    assert found[1][:2] == found[0]
    assert "2 seeds" in (folder / "runs" / "small" / "report.html").read_text()
    in_this_process("run", "small.toml", *quick, monkeypatch=monkeypatch, code=2)  # seeds = [1]
    assert "more can follow them: seeds = [2, 1, …]" in capsys.readouterr().err


def test_only_some_algorithms_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    quick = ("-q", "--json", "--no-report", "--set", "rounds=1", "--set", "run.backend=serial")
    in_this_process("run", "small.toml", "--only", "fed*", *quick, monkeypatch=monkeypatch)
    assert [cell["algorithm"] for cell in json.loads(capsys.readouterr().out)["runs"]] == ["fedavg"]
    in_this_process("run", "small.toml", "--only", "fedavgg", *quick, monkeypatch=monkeypatch, code=2)
    assert "Known: fedavg, local. Did you mean 'fedavg'?" in capsys.readouterr().err


def test_the_demo_says_where_the_seven_ways_are_explained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fedloom.cli.running._run", lambda *_, **__: None)  # it takes minutes
    in_this_process("demo", monkeypatch=monkeypatch)
    assert "docs/explanation/seven-ways.md" in capsys.readouterr().err
    assert (Path(__file__).parents[2] / "docs" / "explanation" / "seven-ways.md").is_file()
    in_this_process("demo", "-q", monkeypatch=monkeypatch)
    assert capsys.readouterr().err == ""


class Stopped:
    finished = False


@pytest.mark.parametrize("live", [(), ("--live",)])
def test_the_demo_can_start_over(live: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr("fedloom.cli.watching.opened", lambda *_, **__: nullcontext())
    monkeypatch.setattr("fedloom.experiment.run.run_plan", lambda *_, fresh, **__: asked.append(fresh) or Stopped)
    in_this_process("demo", *live, monkeypatch=monkeypatch, code=130)
    in_this_process("demo", *live, "--fresh", monkeypatch=monkeypatch, code=130)
    assert asked == [False, True]


def test_a_live_demo_that_is_done_ends_quietly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted:
        def wait(self) -> None:
            raise KeyboardInterrupt

    opened: list[bool] = []
    monkeypatch.setattr("fedloom.cli.watching.opened", lambda *_, browser: opened.append(browser) or nullcontext())
    monkeypatch.setattr("fedloom.cli.running._run", lambda *_, **__: None)
    monkeypatch.setattr("fedloom.cli.running.threading", SimpleNamespace(Event=Interrupted))
    in_this_process("demo", "--live", "--fresh", monkeypatch=monkeypatch)
    assert capsys.readouterr().err == "The page stays open. Ctrl-C ends it.\n"
    in_this_process("demo", "--live", "--no-browser", monkeypatch=monkeypatch)
    assert opened == [True, False]


@pytest.mark.parametrize("options", [(), ("--live",), ("--live", "--out", "my run")])
def test_a_demo_that_was_stopped_is_continued_as_a_demo(
    options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fedloom.cli.watching.opened", lambda *_, **__: nullcontext())
    monkeypatch.setattr("fedloom.experiment.run.run_plan", lambda *_, **__: Stopped)
    in_this_process("demo", *options, monkeypatch=monkeypatch, code=130)
    assert capsys.readouterr().err.endswith(f"Continue with: {shlex.join(['fedloom', 'demo', *options])}\n")


def test_a_sweep_says_which_settings_tie(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    sweep_quickly("run.workers=1,2", monkeypatch)
    told = capsys.readouterr().out
    assert "2 settings tie on validation data: run.workers=1; run.workers=2 (fedavg). Measure one on test data" in told
    assert "Best" not in told.replace("The best of many", "")
