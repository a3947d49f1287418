"""Flower's programs on this machine, and a Grid whose nodes are in the test's process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import tomli_w

from fedloom.experiment.experiment_file import load
from fedloom.flower.app import write_app
from tests.network.conftest import free_port, wait_for, write_toml

if TYPE_CHECKING:
    from fedloom.flower.messages import Payload  # needs Flower, which need not be installed

VALUES: dict[str, Any] = {
    "name": "digits",
    "rounds": 2,
    "data": {"source": "digits", "partition": {"name": "iid", "clients": 4}},
    "task": {"model": "digits_mlp"},
    "cohort": {"deadline": "5m"},
    "evaluate": {"splits": []},
    "algorithm": {"fedavg": {}},
}
THREE = {"fedavg": {}, "scaffold": {}, "peer": {"weights": "score", "topology": "ring"}}


def app_of(folder: Path, values: dict[str, Any]) -> Path:
    """The experiment as a Flower app."""
    write_app(load(write_toml(folder / "experiment.toml", values)), folder / "app")
    return folder / "app"


class FakeGrid:
    """A Grid whose nodes answer at once."""

    def __init__(self) -> None:
        self.nodes: dict[int, Callable[[Payload], Payload]] = {}
        self.waiting: dict[str, Any] = {}
        self.payloads: list[tuple[int, Payload]] = []

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Any]) -> list[str]:
        from fedloom.flower.messages import Payload

        made = []
        for message in messages:
            number, node = f"message {len(self.payloads)}", message.metadata.dst_node_id
            payload = Payload.from_record(message.content)
            self.payloads.append((node, payload))
            made.append(number)
            if node in self.nodes:
                self.waiting[number] = (self.nodes[node], payload)
        return made

    def pull_messages(self, numbers: Iterable[str]) -> list[Any]:
        replies = []
        for number in [number for number in numbers if number in self.waiting]:
            answer, payload = self.waiting.pop(number)
            reply: Any = SimpleNamespace(metadata=SimpleNamespace(reply_to_message_id=number))
            try:
                found = answer(payload)
                if found is None:  # it never answers
                    continue
                reply.content, reply.has_error = found.to_record(), lambda: False
            except RuntimeError as error:  # as Flower tells about a ClientApp that failed
                reply.error, reply.has_error = SimpleNamespace(reason=str(error)), lambda: True
            replies.append(reply)
        return replies


Grids = Callable[..., tuple[FakeGrid, Path]]


@pytest.fixture(autouse=True)
def identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower's programs say who they are before they make messages."""
    if find_spec("flwr") is not None:
        from flwr.supercore.task_identity import TaskIdentity

        for name in ("_task_id", "_run_id", "_node_id"):
            monkeypatch.setattr(TaskIdentity, name, 1)


@pytest.fixture
def fake_grid(tmp_path: Path) -> Grids:
    """Two nodes in this process, and the app that they have."""
    from fedloom.flower.worker import Worker, site_for

    def make(values: dict[str, Any] = VALUES) -> tuple[FakeGrid, Path]:
        app, made = app_of(tmp_path, values), FakeGrid()
        for number in range(2):
            config = {"partition-id": number, "num-partitions": 2}
            made.nodes[number + 7] = Worker(
                site_for(app, config), tmp_path / f"state-{number}", lambda text: None
            ).answer
        return made, app

    return make


class FlowerProcesses:
    """A SuperLink and SuperNodes, as real processes."""

    def __init__(self, folder: Path, keys: bool = False) -> None:
        self.folder, self.keys = folder, keys
        self.home = folder / "flwr"
        self.home.mkdir(parents=True)
        self.port = free_port()
        self.bin = Path(sys.executable).parent
        root = str(Path(__file__).parents[2])
        self.env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])]),
            "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}",
            "FLWR_HOME": str(self.home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
        }
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        security: dict[str, Any] = {"insecure": True}
        if keys:
            from fedloom.network.protocol.certificates import local_authority

            local_authority(folder / "tls")
            security = {"root-certificates": str(folder / "tls" / "ca.pem")}
        link = {"superlink": {"default": "here", "here": {"address": f"127.0.0.1:{self.port}", **security}}}
        (self.home / "config.toml").write_text(tomli_w.dumps(link))

    def start(self, name: str, *command: str | Path) -> subprocess.Popen[bytes]:
        with open(self.folder / f"{name}.log", "ab") as log:
            self.processes[name] = subprocess.Popen(
                [self.bin / command[0], *map(str, command[1:])],
                cwd=self.folder,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return self.processes[name]

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def superlink(self) -> subprocess.Popen[bytes]:
        security: list[str | Path] = ["--insecure"]
        if self.keys:
            tls = self.folder / "tls"
            security = ["--ssl-ca-certfile", tls / "ca.pem", "--ssl-certfile", tls / "server.pem"]
            security += ["--ssl-keyfile", tls / "server.key", "--enable-supernode-auth"]
        before = self.log("superlink").count("Uvicorn running") if (self.folder / "superlink.log").exists() else 0
        started = self.start(
            "superlink", "flower-superlink", *security, "--port", str(self.port), "--database", "state.db",
            "--disable-runtime-dependency-installation",
        )  # fmt: skip
        wait_for(lambda: self.log("superlink").count("Uvicorn running") > before, 120)
        return started

    def supernode(self, number: int, config: str) -> None:
        security: list[str | Path] = ["--insecure"]
        if self.keys:
            key = self.folder / f"node-{number}"
            if not key.exists():
                subprocess.run(["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", key], check=True)
                self.flwr("supernode", "register", f"{key}.pub", "here")
            security = ["--root-certificates", self.folder / "tls" / "ca.pem"]
            security += ["--auth-supernode-private-key", key]
        link = f"127.0.0.1:{self.port}"
        self.start(
            f"node-{number}", "flower-supernode", *security, "--superlink", link, "--port", str(free_port()),
            "--node-config", config,
        )  # fmt: skip

    def flwr(self, *arguments: str | Path) -> str:
        done = subprocess.run(
            [self.bin / "flwr", *map(str, arguments)],
            cwd=self.folder,
            env=self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def stop(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                os.killpg(process.pid, 9)
            process.wait()


@pytest.fixture
def flower_processes(tmp_path: Path) -> Iterator[Callable[..., FlowerProcesses]]:
    made: list[FlowerProcesses] = []

    def make(keys: bool = False) -> FlowerProcesses:
        if keys and shutil.which("ssh-keygen") is None:
            pytest.skip("ssh-keygen, which makes the nodes' keys, is not installed")
        made.append(FlowerProcesses(tmp_path, keys))
        return made[-1]

    yield make
    for one in made:
        one.stop()
