"""The commands after a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.commands import fedloom, in_this_process


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


def test_a_folder_that_is_not_a_run_is_an_error(folder: Path) -> None:
    assert "not a run folder" in fedloom("show", ".", folder=folder, code=1).stderr


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
