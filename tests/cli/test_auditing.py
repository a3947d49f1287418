"""`fedloom audit FILE`."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import typer

from fedloom.audits import audit as auditing
from fedloom.cli import app
from tests.cli.commands import fedloom

PRIVATE = """
rounds = 1
[data]
source = "digits"
partition = { name = "iid", clients = 10 }
[privacy]
dp = { noise_multiplier = 1.0, clip = 0.5 }
[algorithm]
fedavg = { weights = "uniform" }
"""


@pytest.fixture
def private(tmp_path: Path) -> Path:
    (tmp_path / "private.toml").write_text(PRIVATE)
    return tmp_path


def test_an_audit_prints_its_findings_and_keeps_them(private: Path) -> None:
    done = fedloom("audit", "private.toml", "--only", "epsilon", "--canaries", "200", folder=private)
    assert "The claimed ε against an attacker" in done.stdout
    assert "not refuted" in done.stdout
    assert "Findings: runs/private/audit.json" in done.stdout
    assert "epsilon: round 1 of 1" in done.stderr
    assert json.loads((private / "runs/private/audit.json").read_text())["epsilon"]["fedavg"]["canaries"] == 200


def test_json_is_on_stdout_alone_with_or_without_the_name_of_the_command(private: Path) -> None:
    for command in (["audit", "--json", "private.toml"], ["audit", "privacy", "private.toml", "--json"]):
        done = fedloom(*command, "--only", "epsilon", "--canaries", "100", "-q", folder=private)
        assert json.loads(done.stdout)["epsilon"]["fedavg"]["delta"] == 1e-5


def run_in_process(*arguments: str) -> int:
    try:
        code = typer.main.get_command(app)(list(arguments), standalone_mode=False)
    except typer.Exit as end:
        code = end.exit_code
    return int(code or 0)


def test_a_refuted_claim_is_an_exit_code_of_its_own(
    private: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bound = {"epsilon": 5.0, "guesses": 60, "correct": 60, "confidence": 0.95}
    wrong = {"claimed": 1.0, "delta": 1e-5, "adjacency": "add or remove one client", "canaries": 100, "estimate": 5.0}
    found = {**wrong, "bound": bound, "refuted": True}
    monkeypatch.setattr(auditing, "canary_run", lambda *given: found)
    monkeypatch.chdir(private)
    assert run_in_process("audit", "private.toml", "--only", "epsilon", "-q") == 5
    assert "The claimed ε of fedavg is wrong" in capsys.readouterr().err


@pytest.mark.slow
def test_pictures_are_written_beside_the_findings(private: Path) -> None:
    done = fedloom("audit", "private.toml", "--only", "reconstruction", folder=private)
    assert "Picture: runs/private/reconstruction.png" in done.stdout
    assert (private / "runs/private/reconstruction.png").stat().st_size > 10_000
    later = fedloom("audit", "private.toml", "--only", "epsilon", "--canaries", "100", folder=private)
    assert "econstruct" not in later.stdout, "it is of an earlier audit"
    assert {"epsilon", "reconstruction"} <= json.loads((private / "runs/private/audit.json").read_text()).keys()


def test_what_does_not_exist_is_an_error(private: Path) -> None:
    assert "There is no experiment file missing.toml" in fedloom("audit", "missing.toml", folder=private, code=2).stderr
    assert "No such command 'verfy'" in fedloom("audit", "verfy", "state", folder=private, code=2).stderr
    (private / "runs/plain").mkdir(parents=True)
    for folder in ("runs/plain", "runs/none", "runs"):
        done = fedloom("audit", folder, folder=private, code=2)
        assert f"{folder} is not an experiment file. `fedloom audit` takes the file that was run" in done.stderr
    assert "There is no audit 'x'" in fedloom("audit", "private.toml", "--only", "x", folder=private, code=2).stderr


def test_an_attack_on_the_final_model_says_how_to_make_the_run(private: Path) -> None:
    for options in ((), ("--set", "rounds=2", "--out", "my run")):
        done = fedloom("audit", "private.toml", "--only", "membership", *options, folder=private, code=2)
        command = shlex.join(["fedloom", "run", "private.toml", *options])
        assert f"Run the experiment first: `{command}`" in " ".join(done.stderr.split())


def test_if_no_audit_could_be_done_that_is_an_error_and_there_are_no_findings(tmp_path: Path) -> None:
    lost = '[data]\nsource = "csv"\npath = "loans.csv"\nlabel = "default"\npartition = { name = "iid", clients = 3 }\n'
    (tmp_path / "lost.toml").write_text(f'rounds = 1\n{lost}[task]\nmodel = "logistic"\n[algorithm]\nfedavg = {{}}\n')
    done = fedloom("audit", "lost.toml", "-q", folder=tmp_path, code=2)
    assert "No audit of reconstruction: " in done.stderr
    assert "loans.csv" in done.stderr
    assert "Findings" not in done.stdout + done.stderr
    assert not (tmp_path / "runs").exists()
