"""Whole commands, as a user types them: real processes, exit codes, stdout and stderr apart."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fedloom import cli

EXPERIMENT = """
name = "small"
rounds = 4
[data]
source = "digits"
partition = { name = "affinity", clients = 10, probability = 0.7 }
[train]
lr = 0.3
batch_size = 16
[cohort]
count = 5
[algorithm]
fedavg = {}
local = {}
[run]
workers = 1
"""


def fedloom(
    *arguments: str, folder: Path, code: int | None = 0, **environment: str
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "fedloom.cli", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, "COLUMNS": "80", **environment},
    )
    assert code is None or done.returncode == code, done.stdout + done.stderr
    return done


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "small.toml").write_text(EXPERIMENT)
    return tmp_path


def shas(text: str) -> list[str]:
    result = json.loads(text)
    assert result["status"] == "done"
    return [result["weights_sha256"], *(run["weights_sha256"] for run in result["runs"])]


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


def in_this_process(*arguments: str, monkeypatch: pytest.MonkeyPatch, code: int = 0) -> None:
    from fedloom import cli

    monkeypatch.setattr(sys, "argv", ["fedloom", *arguments])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == code


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
    assert "Of ditto only the server's model was written" in told.err
    assert "--client NAME" in told.err
    for client in ("3", "7"):
        in_this_process("export", "runs/small", "--model", "--client", client, monkeypatch=monkeypatch)
    told = capsys.readouterr()
    assert "only" not in told.err
    assert "runs/small/export/ditto-1-3.safetensors" in told.out.split()

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
    assert "be in the folder of the file that was run" in capsys.readouterr().err


def test_algorithms_are_listed_and_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from fedloom.algorithms import ALGORITHMS

    in_this_process("algorithms", monkeypatch=monkeypatch)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(ALGORITHMS)
    in_this_process("algorithms", "scaffold", monkeypatch=monkeypatch)
    shown = capsys.readouterr().out
    assert re.search(r"server_lr +number, more than 0 \(default 1.0\)", shown)
    assert "c_k ← c_k − c + (w − w_k) / (steps · lr)" in shown
    assert "Secure aggregation: yes: the server needs only sums (not with a rule). On a network: yes." in shown
    assert "Reference: Karimireddy et al." in shown
    in_this_process("algorithms", "scafold", monkeypatch=monkeypatch, code=2)
    assert "Did you mean 'scaffold'?" in capsys.readouterr().err


def test_the_graph_of_peers_is_drawn(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from PIL import Image

    monkeypatch.chdir(folder)
    ring = 'algorithm={ring={name="peer", topology="ring"}, gnp={name="peer", topology="erdos_renyi"}}'
    in_this_process("graph", "small.toml", "--set", ring, monkeypatch=monkeypatch)
    assert "Picture: small-graph.png" in capsys.readouterr().out
    with Image.open(folder / "small-graph.png") as picture:
        assert min(picture.size) > 100
        assert len(set(picture.convert("L").resize((64, 64)).tobytes())) > 2, "the picture is empty"
    in_this_process("graph", "small.toml", monkeypatch=monkeypatch, code=2)
    assert "has no peer-to-peer algorithm" in capsys.readouterr().err


def test_the_same_bits_with_other_workers_and_after_kill_9(folder: Path) -> None:
    expected = shas(fedloom("run", "small.toml", "--json", "-q", "--out", "one", folder=folder).stdout)
    assert (
        shas(fedloom("run", "small.toml", "--json", "-q", "--workers", "2", "--out", "two", folder=folder).stdout)
        == expected
    )
    serial = fedloom(
        "run", "small.toml", "--json", "-q", "--set", "run.backend=serial", "--out", "three", folder=folder
    )
    assert shas(serial.stdout) == expected
    command = [sys.executable, "-m", "fedloom.cli", "run", "small.toml", "--json", "-q", "--out", "killed"]
    killed = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: list((folder / "killed").glob("cells/fedavg-1/round-000002.json")), killed)
    killed.kill()
    killed.wait()
    assert shas(fedloom("run", "small.toml", "--json", "-q", "--out", "killed", folder=folder).stdout) == expected


def wait_for(condition: Any, process: subprocess.Popen[Any]) -> None:
    """Poll until something is on disk; the process that makes it must still be alive."""
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, "the process ended before it could be stopped"
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_interrupting_stops_after_a_checkpoint_and_says_how_to_go_on(folder: Path) -> None:
    expected = shas(
        fedloom("run", "small.toml", "--json", "-q", "--out", "whole", "--set", "rounds=15", folder=folder).stdout
    )
    command = [sys.executable, "-m", "fedloom.cli", "run", "small.toml", "--out", "parts", "--set", "rounds=15"]
    running = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: list((folder / "parts").glob("cells/fedavg-1/round-*.json")), running)
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "Go on with: fedloom run small.toml --out parts" in err
    again = fedloom("run", "small.toml", "--json", "-q", "--out", "parts", "--set", "rounds=15", folder=folder)
    assert shas(again.stdout) == expected


def test_a_changed_experiment_is_refused_and_fresh_keeps_the_old_one(folder: Path) -> None:
    serial = ("--set", "run.backend=serial", "--set", "rounds=1")
    fedloom("run", "small.toml", "-q", *serial, folder=folder)
    refused = fedloom("run", "small.toml", "-q", *serial, "--set", "train.lr=0.2", folder=folder, code=2)
    assert "train.lr: 0.3 → 0.2" in refused.stderr
    assert refused.stdout == ""
    fedloom("run", "small.toml", "-q", *serial, "--set", "train.lr=0.2", "--fresh", folder=folder)
    assert len(list((folder / "runs").iterdir())) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "nothing.toml"], "no experiment file nothing.toml"),
        (["run", "small.toml", "--set", "train.lrr=1"], "Did you mean 'lr'?"),
        (["run", "small.toml", "--set", "train.lr"], "table.key=value"),
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


def test_a_folder_that_is_no_run_is_an_error(folder: Path) -> None:
    assert "not a run folder" in fedloom("show", ".", folder=folder, code=1).stderr


def test_a_diverging_run_fails_with_exit_code_1(folder: Path) -> None:
    done = fedloom("run", "small.toml", "-q", "--set", "train.lr=1e30", folder=folder, code=1)
    assert re.search(r"Round \d+, client '\d+'.*the loss is (nan|inf)", done.stderr)
    assert "Traceback" not in done.stderr


def test_a_run_without_anything_to_draw_is_still_a_success(folder: Path) -> None:
    done = fedloom("run", "small.toml", "--set", "data.split=[1.0,0.0,0.0]", "--set", "rounds=1", folder=folder)
    assert "No picture" in done.stderr
    assert "Results: runs/small" in done.stdout


def test_a_damaged_run_does_not_hide_the_others(folder: Path) -> None:
    fedloom("run", "small.toml", "-q", "--set", "rounds=1", folder=folder)
    (folder / "runs/broken").mkdir()
    (folder / "runs/broken/run.db").write_text("no database")
    done = fedloom("list", folder=folder)
    assert "small" in done.stdout
    assert "broken" in done.stderr


def test_check_shows_the_resolved_file_and_the_cost_and_runs_nothing(folder: Path) -> None:
    done = fedloom("check", "small.toml", folder=folder)
    assert "optimizer_state" in done.stdout
    assert "# 10 clients with 1,797 examples" in done.stdout
    assert "# local sends nothing" in done.stdout
    assert re.search(r"# fedavg sends [\d.]+ kB up and [\d.]+ kB down a round", done.stdout)
    assert not (folder / "runs").exists()
    (folder / "resolved.toml").write_text(done.stdout)
    again = fedloom("check", "resolved.toml", "--json", folder=folder)
    assert json.loads(again.stdout)["experiment"]["train"]["lr"] == 0.3


def test_init_writes_a_file_that_checks_and_does_not_overwrite(folder: Path) -> None:
    fedloom("init", "mine.toml", folder=folder)
    fedloom("check", "mine.toml", folder=folder)
    assert "--force" in fedloom("init", "mine.toml", folder=folder, code=2).stderr


def test_the_template_shows_the_true_defaults() -> None:
    import fedloom
    from fedloom.experiment import experiment_file

    text = (Path(fedloom.__file__).parent / "experiment/templates/experiment.toml").read_text()
    shown = experiment_file.parse(experiment_file.tomllib.loads(text)).resolved()
    plain = experiment_file.parse(
        {"data": {"partition": shown["data"]["partition"]}, "algorithm": {"fedavg": {}, "local": {}, "pooled": {}}}
    )
    defaults = plain.resolved()
    assert {k: v for k, v in shown.items() if k not in ("name", "rounds")} == {
        k: v for k, v in defaults.items() if k not in ("name", "rounds")
    }


def test_data_describe_draws_who_holds_what(folder: Path) -> None:
    done = fedloom("data", "describe", "small.toml", folder=folder)
    assert "Picture: small-data.png" in done.stdout
    assert (folder / "small-data.png").is_file()
    assert max(len(line) for line in done.stdout.splitlines()) <= 80


def test_data_get_offline_names_what_to_fetch_by_hand(folder: Path) -> None:
    (folder / "bin").mkdir()
    done = fedloom("data", "get", "nonsense", folder=folder, code=2)
    assert "mnist" in done.stderr


def test_help_and_version_do_not_load_torch() -> None:
    script = "import sys, fedloom.cli\nprint([name for name in ('torch', 'pandas', 'numpy') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    version = subprocess.run(
        [sys.executable, "-m", "fedloom.cli", "--version"], capture_output=True, text=True, check=True
    )
    assert re.match(r"fedloom \d+\.\d+\.\d+ \(torch 2\.", version.stdout)


def test_no_colour_when_asked(folder: Path) -> None:
    fedloom("run", "small.toml", "-q", "--set", "run.backend=serial", "--set", "rounds=1", folder=folder)
    assert "\x1b[" not in fedloom("show", "runs/small", folder=folder, NO_COLOR="1", FORCE_COLOR="").stdout
