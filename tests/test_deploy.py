"""The files of deploy/ agree with each other and with fedloom: commands, paths, ports, versions, hashes."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import shutil
import subprocess
import sys
from configparser import RawConfigParser
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import fedloom
from fedloom.cli import app
from fedloom.experiment import experiment_file
from fedloom.files import tomllib
from fedloom.network.agent.policy import load_site
from tests.forked import run_forked
from tests.network.conftest import free_port, start, wait_for, write_toml

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
KUBERNETES = [
    manifest
    for name in ("coordinator", "agent")
    for manifest in yaml.safe_load_all((DEPLOY / "kubernetes" / f"{name}.yaml").read_text(encoding="utf-8"))
]
LOCKED = dict(re.findall(r"^([\w.-]+)==(\S+) \\$", (DEPLOY / "requirements.lock").read_text(), re.MULTILINE))


def instruction(name: str) -> list[str]:
    """The last exec form of an instruction of the Dockerfile."""
    return list(json.loads(re.findall(rf"^(?:    )?{name} (\[.*\])$", DOCKERFILE, re.MULTILINE)[-1]))


def unit(name: str) -> dict[str, str]:
    parser = RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(DEPLOY / "systemd" / f"fedloom-{name}.service")
    return dict(parser["Service"])


def manifest(kind: str, name: str) -> Any:
    (found,) = (one for one in KUBERNETES if (one["kind"], one["metadata"]["name"]) == (kind, name))
    return found


def pod(name: str) -> Any:
    return manifest("StatefulSet", name)["spec"]["template"]["spec"]


HEALTH = re.search(r"HEALTHCHECK .*\\\n    CMD (\[.*\])", DOCKERFILE)
assert HEALTH is not None
PROBE = pod("coordinator")["containers"][0]["readinessProbe"]["exec"]["command"]
COMMANDS = {
    "image": [*instruction("ENTRYPOINT"), *instruction("CMD")],
    "image's health": json.loads(HEALTH[1]),
    **{f"compose {name}": ["fedloom", *service["command"]] for name, service in COMPOSE["services"].items()},
    **{f"pod {name}": ["fedloom", *pod(name)["containers"][0]["args"]] for name in ("coordinator", "agent")},
    "pod's health": PROBE,
    **{f"unit {name}": shlex.split(unit(name)["ExecStart"]) for name in ("coordinator", "agent")},
}


def parsed(command: list[str]) -> tuple[str, dict[str, Any]]:
    """A command and its options, as the command line itself reads them; nothing is run."""
    program, *arguments = command
    assert program in ("fedloom", "/opt/fedloom/bin/fedloom")
    group: Any = typer.main.get_command(app)
    outer = group.make_context("fedloom", arguments, allow_interspersed_args=False)
    name, found, rest = group.resolve_command(outer, [*outer._protected_args, *outer.args])
    return name, found.make_context(name, rest, parent=outer).params


@pytest.mark.parametrize("where", COMMANDS)
def test_every_command_is_one_that_fedloom_has(where: str) -> None:
    name, options = parsed(COMMANDS[where])
    expected = {
        "serve": {"file": "/etc/fedloom/experiment.toml", "listen": "0.0.0.0:8443", "out": "/var/lib/fedloom/run"},
        "join": {"site": "/etc/fedloom/site.toml", "state": "/var/lib/fedloom/state", "wait": "True"},
        "status": {"url": "https://127.0.0.1:8443", "token_file": "/var/lib/fedloom/run/network/operator.token"},
    }[name]
    assert {key: str(options[key]) for key in expected} == expected
    if name == "join":
        assert re.fullmatch(r"https://coordinator(\.fedloom\.svc)?:8443", options["url"])
        assert str(options["token_file"]) in ("/run/secrets/token", "/run/secrets/fedloom/token", "%d/token")


def test_an_option_that_does_not_exist_is_noticed() -> None:
    with pytest.raises(Exception, match="No such option: --tokens"):
        parsed([*COMMANDS["image"], "--tokens"])


def test_paths_and_ports_of_commands_are_provided() -> None:
    assert "EXPOSE 8443\n" in DOCKERFILE
    assert instruction("VOLUME") == ["/var/lib/fedloom"]
    for name, service in COMPOSE["services"].items():
        places = [volume.split(":")[1] for volume in service["volumes"]]
        assert service["volumes"][0] == f"{name}:/var/lib/fedloom"
        assert places[1].startswith("/etc/fedloom")
        assert name in COMPOSE["volumes"]
        assert name == "coordinator" or service["secrets"] == [{"source": name, "target": "token"}]
    assert COMPOSE["services"]["coordinator"]["ports"] == ["8443:8443"]
    for name in ("coordinator", "agent"):
        (container,) = pod(name)["containers"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        volumes = {volume["name"] for volume in pod(name)["volumes"]}
        claims = manifest("StatefulSet", name)["spec"]["volumeClaimTemplates"]
        assert set(mounts) == volumes | {claim["metadata"]["name"] for claim in claims}
        assert {"/var/lib/fedloom", "/etc/fedloom", "/tmp"} <= set(mounts.values())
    assert pod("coordinator")["containers"][0]["ports"] == [{"name": "https", "containerPort": 8443}]
    for name in ("coordinator", "agent"):
        assert unit(name)["StateDirectory"] == unit(name)["ConfigurationDirectory"] == "fedloom"
    assert unit("agent")["LoadCredential"] == "token:/etc/fedloom/token"


def test_nothing_runs_as_root_or_writes_outside_its_state() -> None:
    assert re.findall(r"^USER (.*)$", DOCKERFILE, re.MULTILINE) == ["10001:10001"]
    for service in COMPOSE["services"].values():
        assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
        assert service["security_opt"] == ["no-new-privileges:true"]
    for name in ("coordinator", "agent"):
        assert pod(name)["securityContext"]["runAsUser"] == 10001
        assert pod(name)["securityContext"]["runAsNonRoot"] is True
        (container,) = pod(name)["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        settings = unit(name)
        assert settings["User"] == "fedloom"
        assert settings["CapabilityBoundingSet"] == ""
        assert {settings[key] for key in ("NoNewPrivileges", "ProtectHome", "PrivateTmp")} == {"yes"}
        assert (settings["ProtectSystem"], settings["UMask"]) == ("strict", "0077")
        assert (settings["Restart"], settings["KillSignal"]) == ("on-failure", "SIGTERM")


def test_images_have_this_version() -> None:
    image = f"fedloom:{fedloom.__version__}"
    assert f"-t {image} ." in DOCKERFILE
    assert {service["image"] for service in COMPOSE["services"].values()} == {image}
    assert {pod(name)["containers"][0]["image"] for name in ("coordinator", "agent")} == {image}
    assert len(set(re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE))) == 1


def test_the_experiment_and_the_site_in_the_manifests_are_valid(tmp_path: Path) -> None:
    for name, file in (("experiment", "experiment.toml"), ("site", "site.toml")):
        (tmp_path / file).write_text(manifest("ConfigMap", name)["data"][file])
    assert experiment_file.load(tmp_path / "experiment.toml").name == "clinics"
    assert load_site(tmp_path / "site.toml").name == "north"


@pytest.mark.slow
def test_the_containers_commands_run_a_federation(tmp_path: Path) -> None:
    """The commands of the image and of compose.yaml, with a folder and a port of this test instead of a container's."""
    port = free_port()
    for name in ("etc", "coordinator", "north", "south"):
        (tmp_path / name).mkdir()
    experiment = tomllib.loads(manifest("ConfigMap", "experiment")["data"]["experiment.toml"])
    write_toml(tmp_path / "etc" / "experiment.toml", {**experiment, "rounds": 1})

    def placed(where: str, state: str) -> list[str]:
        replaced = {
            "/etc/fedloom": str(tmp_path / ("etc" if state == "coordinator" else state)),
            "/var/lib/fedloom": str(tmp_path / state / "lib"),
            "/run/secrets": str(tmp_path / state),
            "https://coordinator:8443": f"https://127.0.0.1:{port}",
            "https://127.0.0.1:8443": f"https://127.0.0.1:{port}",
            "0.0.0.0:8443": f"127.0.0.1:{port}",
        }
        program, *arguments = COMMANDS[where]
        assert program == "fedloom"
        for old, new in replaced.items():
            arguments = [argument.replace(old, new) for argument in arguments]
        return arguments

    run = tmp_path / "coordinator" / "lib" / "run"

    def healthy() -> bool:
        return run_forked(*placed("image's health", "coordinator"), cwd=tmp_path).returncode == 0

    with contextlib.ExitStack() as processes:
        coordinator = start(*placed("image", "coordinator"), cwd=tmp_path)
        processes.callback(coordinator.kill)
        wait_for(lambda: len(list(run.glob("network/tokens/*.token"))) == 2)
        assert wait_for(healthy)
        for name, token in zip(("north", "south"), sorted(run.glob("network/tokens/*.token")), strict=True):
            data = {"source": "digits", "partition": {"name": "iid", "clients": 1}}
            write_toml(tmp_path / name / "site.toml", {"site": {"name": name}, "data": data})
            shutil.copy(token, tmp_path / name / "token")
            agent = start(*placed(f"compose {name}", name), cwd=tmp_path, log=f"{name}.txt")
            processes.callback(agent.kill)
        assert coordinator.wait(timeout=300) == 0, (tmp_path / "log.txt").read_text()
    assert (run / "report.html").is_file()
    assert not healthy()  # the port is closed


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("name", ["coordinator", "agent"])
def test_systemd_accepts_the_units(name: str, tmp_path: Path) -> None:
    source = (DEPLOY / "systemd" / f"fedloom-{name}.service").read_text()
    copy = tmp_path / f"fedloom-{name}.service"
    copy.write_text(source.replace("/opt/fedloom/bin/fedloom", sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", copy], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_lock_file_agrees_with_the_constraints_and_has_all_that_the_package_needs() -> None:
    assert len(LOCKED) > 40
    environment = {"python_version": "3.11", "sys_platform": "linux", "extra": ""}
    constraints = [
        Requirement(line.partition("#")[0])
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line.partition("#")[0].strip()
    ]
    for pinned in constraints:
        if (pinned.marker is None or pinned.marker.evaluate(environment)) and canonicalize_name(pinned.name) in LOCKED:
            assert pinned.specifier.contains(LOCKED[canonicalize_name(pinned.name)]), pinned
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for text in [*project["dependencies"], *project["optional-dependencies"]["network"], "setuptools"]:
        wanted = Requirement(text)
        if wanted.marker is None or wanted.marker.evaluate(environment):
            assert wanted.specifier.contains(LOCKED[canonicalize_name(wanted.name)]), wanted


def test_every_locked_package_has_hashes_and_the_file_names_no_place() -> None:
    text = (DEPLOY / "requirements.lock").read_text()
    body = "".join(line for line in text.splitlines(keepends=True) if not line.startswith("#"))
    package = r"[a-z0-9.-]+==[\w.+]+ \\\n(?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+"
    assert re.fullmatch(f"(?:{package})+", body)
    assert not re.search(r"https?:|file:|--find-links|--index|/tmp|/home|/opt", text)
