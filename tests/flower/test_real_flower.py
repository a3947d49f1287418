"""A real SuperLink with two SuperNodes on this machine: plain, with a worker, with TLS and keys, killed, restarted."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedloom[flower]'")

from fedloom.errors import StoreError
from fedloom.experiment.run_folder import locked
from tests.flower.conftest import THREE, VALUES, FlowerProcesses, app_of
from tests.network.conftest import serial_weights, wait_for, weights

PROJECT = """
[project]
name = "quickstart"
version = "1.0.0"
[tool.flwr.app]
publisher = "somebody"
[tool.flwr.app.components]
serverapp = "quick_server:app"
clientapp = "quick_client:app"
[tool.flwr.app.config]
out = ""
"""
SERVER = """
import numpy as np
import torch
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp

import fedloom
from fedloom.flower import strategy
from quick_client import net

app = ServerApp()

@app.main()
def main(grid, context):
    made = strategy(fedloom.FedAvgM(server_lr=1.0, server_momentum=0.5), net(), quorum=1.0)
    result = made.start(grid, ArrayRecord(net().state_dict()), num_rounds=2, timeout=300)
    np.savez(context.run_config["out"], **{name: array.numpy() for name, array in result.arrays.items()})
"""
CLIENT = '''
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()

def net():
    torch.manual_seed(0)
    return torch.nn.Linear(4, 2)

def fit(model, part):
    """Three steps on this client's data; part 1 has twice as much of it."""
    generator = torch.Generator().manual_seed(part)
    x = torch.randn(16 * (part + 1), 4, generator=generator)
    y = (x.sum(1) > part).long()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    return len(x), float(loss.detach())

@app.train()
def train(message, context):
    model = net()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    examples, loss = fit(model, context.node_config["partition-id"])
    metrics = MetricRecord({"num-examples": examples, "loss": loss})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)

@app.evaluate()
def evaluate(message, context):
    metrics = MetricRecord({"num-examples": 1, "loss": 0.0})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)
'''


def test_two_supernodes_give_the_bits_of_the_serial_backend_and_run_a_strategy(
    flower_processes: Callable[..., FlowerProcesses], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {**VALUES, "algorithm": THREE}
    app, flower = app_of(tmp_path, values), flower_processes()
    flower.superlink()
    for number in range(2):
        flower.supernode(number, f"partition-id={number} num-partitions=2")
    # one node has a worker beside it, the other one does everything in the processes that Flower starts
    flower.start("worker", "fedloom", "flower", "worker", app, "--partition-id", "0", "--num-partitions", "2")
    wait_for(lambda: "Ready for the SuperNode" in flower.log("worker"), 300)
    out = tmp_path / "run"
    said = flower.flwr("run", app, "here", "--stream", "--run-config", f"out='{out}'")
    assert "partition-1 is ready, with 2 client(s)" in said, said + flower.log("node-1")
    assert weights(out) == serial_weights(values, tmp_path / "serial"), said
    assert "Ready: 2 client(s)" in flower.log("worker")
    assert "Ready: 2 client(s)" in flower.log("node-1")
    assert "Ready: 2 client(s)" not in flower.log("node-0")
    _run_a_strategy(flower, tmp_path, monkeypatch)


def _run_a_strategy(flower: FlowerProcesses, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other way round: a quick-start app with a strategy of ours, against the same computed here."""
    app = folder / "quick"
    app.mkdir()
    for name, text in (("pyproject.toml", PROJECT), ("quick_server.py", SERVER), ("quick_client.py", CLIENT)):
        (app / name).write_text(text)
    said = flower.flwr("run", app, "here", "--stream", "--run-config", f"out='{folder / 'quick.npz'}'")
    assert (folder / "quick.npz").is_file(), said
    monkeypatch.syspath_prepend(str(app))
    import quick_client  # type: ignore[import-not-found]
    import torch

    now = {name: leaf.double() for name, leaf in quick_client.net().state_dict().items()}
    velocity = {name: torch.zeros_like(leaf) for name, leaf in now.items()}
    for _ in range(2):
        sent = []
        for part in range(2):
            model = quick_client.net()
            model.load_state_dict({name: leaf.float() for name, leaf in now.items()})
            examples, _ = quick_client.fit(model, part)
            sent.append((examples, {name: leaf.double() for name, leaf in model.state_dict().items()}))
        total = sum(examples for examples, _ in sent)
        for name in now:
            mean = sum(examples * leaves[name] for examples, leaves in sent) / total
            velocity[name] = 0.5 * velocity[name] + (mean - now[name])
            now[name] = now[name] + velocity[name]
    found = np.load(folder / "quick.npz")
    assert sorted(found) == sorted(now)
    for name in now:
        assert np.allclose(found[name], now[name].numpy(), atol=1e-5)
    sys.modules.pop("quick_client")


def test_a_killed_superlink_and_worker_lose_nothing_with_tls_and_node_keys(
    flower_processes: Callable[..., FlowerProcesses], tmp_path: Path
) -> None:
    values = {**VALUES, "rounds": 3, "algorithm": {"scaffold": {}}}
    app, flower = app_of(tmp_path, values), flower_processes(keys=True)
    link, out = flower.superlink(), tmp_path / "run"
    for number in range(2):
        flower.supernode(number, f"partition-id={number} num-partitions=2")
        part = ("--partition-id", str(number), "--num-partitions", "2")
        flower.start(f"worker-{number}", "fedloom", "flower", "worker", app, *part)
        wait_for(lambda number=number: "Ready for the SuperNode" in flower.log(f"worker-{number}"), 300)
    flower.flwr("run", app, "here", "--run-config", f"out='{out}'")
    wait_for(lambda: list(out.glob("cells/*/round-000001.json")), 300)
    for killed in (link, flower.processes["worker-0"]):  # its node now does what it is asked by itself
        os.kill(killed.pid, 9)
        killed.wait()
    flower.superlink()
    wait_for(lambda: unlocked(out / "network"), 300)  # a ServerApp outlives its SuperLink for a while
    said = flower.flwr("run", app, "here", "--stream", "--run-config", f"out='{out}'")
    assert weights(out) == serial_weights(values, tmp_path / "serial"), said
    assert "Ready: 2 client(s)" in flower.log("node-0")


def unlocked(folder: Path) -> bool:
    """Whether no process holds a folder."""
    try:
        with locked(folder):
            return True
    except StoreError:
        return False
