"""The tutorial about deploying, as two hospitals and an operator would follow it, with real processes."""

from __future__ import annotations

import csv
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.network.conftest import free_port, start, wait_for
from tests.test_docs import ROOT, blocks, write_files

PAGE = ROOT / "docs" / "tutorials" / "deploy.md"


@pytest.mark.slow
def test_two_hospitals_agree_train_and_predict_by_the_tutorial(tmp_path: Path) -> None:
    def fedloom(*arguments: str, status: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "fedloom", *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout

    def typed(beginning: str) -> list[str]:
        """The arguments of the first command on the page that begins so."""
        line = re.search(rf"^(?:\w+\$ )?fedloom ({beginning}.*)$", "\n".join(blocks(PAGE, "console")), re.MULTILINE)
        assert line is not None, beginning
        return shlex.split(line[1].replace("coordinator:8443", where).replace("0.0.0.0:8443", where))

    where = f"127.0.0.1:{free_port()}"
    write_files(PAGE, tmp_path)
    subprocess.run([sys.executable, "make_patients.py"], cwd=tmp_path, check=True)
    (north,) = blocks(PAGE, "ini")
    sites = {"north": north, "south": north.replace("north", "south")}
    for name, text in sites.items():
        (tmp_path / f"{name}.toml").write_text(text)
        fedloom(*(part.replace("north", name) for part in typed("data summarize north")))
    fedloom(*typed("data agree"))
    for name, text in sites.items():
        (tmp_path / f"{name}.toml").write_text(text.replace("# preprocessing", "preprocessing"))
    assert "fedavg" in fedloom("check", "hospitals.toml")
    coordinator = start(*typed("serve"), cwd=tmp_path)
    pattern = r"--token (\S+) --site SITE.toml"
    log = tmp_path / "log.txt"
    tokens = wait_for(lambda: found if log.exists() and len(found := re.findall(pattern, log.read_text())) == 2 else [])
    agents = []
    for name, token in zip(sites, tokens, strict=True):
        fedloom(*(part.replace("north", name) for part in typed("join .*--dry-run")))
        join = [part.replace("north", name).replace("fl1-…", token) for part in typed("join .*--token")]
        agents.append(start(*join, cwd=tmp_path, log=f"{name}.txt"))
    assert coordinator.wait(timeout=300) == 0, log.read_text()
    assert [agent.wait(timeout=60) for agent in agents] == [0, 0]

    for where_it_is in ("runs/hospitals", "moved"):  # the folder has all that is needed
        answers = list(csv.DictReader(fedloom(*typed("predict")[:1], where_it_is, "new.csv").splitlines()))
        assert [answer["prediction"] in ("alive", "died") for answer in answers] == [True] * 3
        if where_it_is != "moved":
            (tmp_path / "runs" / "hospitals").rename(tmp_path / "moved")
            (tmp_path / "agreed.json").unlink()
    written = (tmp_path / "moved" / "experiment.toml").read_text()
    assert "digits" not in written
    assert 'preprocessing = "agreed.json"' in written
    page = (tmp_path / "moved" / "report.html").read_text()
    assert "<code>fedloom serve FILE</code>" in page
    fedloom("export", "moved", "--onnx", "--to", "exported")
