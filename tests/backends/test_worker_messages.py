"""Messages between processes arrive as they were sent."""

import importlib
import socket
import subprocess
import sys
from pathlib import Path
from threading import Lock, Thread

import numpy as np
import pytest
import torch
from torch import nn

import fedloom as fl
from fedloom import user_code
from fedloom.backends import worker_messages
from fedloom.errors import InputError
from fedloom.results.report_warnings import cautions
from fedloom.results.run_data import RunData
from fedloom.task import Task


def through_a_socket(payload: object) -> object:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = Thread(target=worker_messages.send, args=(ours, worker_messages.pack(payload)))
        sender.start()
        found = worker_messages.unpack(worker_messages.receive(theirs))
        sender.join()
    return found


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3).T,
        torch.tensor([1.5, -0.0], dtype=torch.bfloat16),
        torch.tensor([1 + 2j]),
        torch.tensor([True, False]),
        torch.zeros(0, 4),
        torch.tensor(3),
    ],
    ids=["not contiguous", "bfloat16", "complex", "bool", "empty", "scalar"],
)
def test_tensors_keep_kind_shape_and_values(tensor: torch.Tensor) -> None:
    found = through_a_socket({"a": tensor})["a"]  # type: ignore[index]
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(found, tensor)


def test_tensors_travel_beside_the_pickle() -> None:
    head, *beside = worker_messages.pack({"a": torch.zeros(1000), "b": np.ones(10)})
    assert sorted(memoryview(part).nbytes for part in beside) == [80, 4000]
    assert len(head) < 1000


def test_functions_of_a_script_can_be_sent() -> None:
    twice = lambda x: 2 * x  # noqa: E731
    assert through_a_socket(twice)(4) == 8  # type: ignore[operator]


def test_a_closed_connection_is_the_end() -> None:
    ours, theirs = socket.socketpair()
    ours.close()
    with theirs, pytest.raises(EOFError):
        worker_messages.receive(theirs)


def test_what_cannot_be_sent_is_named_by_the_way_that_leads_to_it() -> None:
    lock = Lock()

    def own_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with lock:
            return (output - target).square()

    task = Task(nn.Linear(2, 1), loss=own_loss)
    with pytest.raises(
        InputError,
        match=r"cannot have `loss\.lock`, a lock: cannot pickle .*Make it inside of the function.*backend = \"serial\"",
    ):
        worker_messages.pack(({"handle": 1}, task))
    around: dict[str, object] = {}
    around["self"] = around
    around["file"] = lock
    with pytest.raises(InputError, match="cannot have `self"):
        worker_messages.pack(around)


def two_clients() -> fl.Federation:
    x = np.random.default_rng(0).normal(size=(40, 4)).astype("float32")
    return fl.Federation.from_arrays(x, (x[:, 0] > 0).astype(int), clients=2)


@pytest.mark.slow
def test_workers_use_the_values_that_your_modules_have_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_value.py").write_text("K = 0.0\n")
    (tmp_path / "own_loss.py").write_text(
        "import own_value\nfrom torch.nn import functional as F\nK = 0.0\n"
        "def loss(o, t): return F.cross_entropy(o, t, label_smoothing=K + own_value.K)\n"
    )
    own = importlib.import_module("own_loss")
    data = two_clients()

    def weights() -> set[str | None]:
        task = fl.Task(nn.Linear, args={"in_features": 4, "out_features": 2}, loss=own.loss)
        found = [
            fl.run(data, task, fl.FedAvg(lr=0.1), rounds=1, name=f"{backend}{len(seen)}", **how)  # type: ignore[arg-type]
            for backend, how in {"serial": {"backend": "serial"}, "worker": {"workers": 1}}.items()
        ]
        return {one.weights_sha256 for one in found}

    seen: list[set[str | None]] = []
    for module, value in [(own, 0.0), (own, 0.3), (own.own_value, 0.2)]:
        module.K = value
        seen.append(weights())
    assert [len(one) for one in seen] == [1, 1, 1]
    assert len(set.union(*seen)) == 3
    del sys.modules["own_loss"], sys.modules["own_value"]


def test_a_module_that_cannot_be_sent_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_lock.py").write_text(
        "from threading import Lock\nLOCK = Lock()\ndef loss(o, t):\n    with LOCK: return o - t\n"
    )
    own = importlib.import_module("own_lock")
    worker_messages.imported_by_workers()
    for _ in range(2):
        assert through_a_socket(own.loss) is own.loss
        assert worker_messages.imported_by_workers() == {"own_lock": worker_messages.LOCKED}
    assert through_a_socket(1) == 1
    assert worker_messages.imported_by_workers() == {}
    del sys.modules["own_lock"]


def test_functions_of_a_file_that_remember_their_answers_can_be_sent(tmp_path: Path) -> None:
    (tmp_path / "cached.py").write_text(
        "import functools\n@functools.lru_cache(maxsize=3)\ndef k(x=0): return 2.0\ndef loss(o, t): return k()\n"
    )
    loss = user_code.code("cached.py:loss", tmp_path)
    there = "import sys, cloudpickle; print(cloudpickle.load(sys.stdin.buffer)(0, 0))"
    sent = worker_messages.pack(loss)[0]
    done = subprocess.run([sys.executable, "-c", there], input=sent, capture_output=True, check=True)
    assert done.stdout.strip() == b"2.0"


def test_a_module_that_a_function_imports_inside_of_itself_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_scale.py").write_text("SCALE = 1.0\n")
    (tmp_path / "own_late.py").write_text("def loss(o, t):\n    import json, own_scale\n    return own_scale.SCALE\n")
    own = importlib.import_module("own_late")
    worker_messages.imported_by_workers()
    through_a_socket(own.loss)
    assert worker_messages.imported_by_workers() == {"own_scale": worker_messages.LATE}
    del sys.modules["own_late"], sys.modules["own_scale"]


def test_a_run_says_that_workers_import_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_locked.py").write_text(
        "from threading import Lock\nfrom torch.nn import functional as F\nLOCK = Lock()\nSCALE = 1.0\n"
        "def loss(o, t):\n    with LOCK: return F.cross_entropy(o, t) * SCALE\n"
    )
    own = importlib.import_module("own_locked")
    data = two_clients()
    task = fl.Task(nn.Linear, args={"in_features": 4, "out_features": 2}, loss=own.loss)
    algorithms = {"a": fl.FedAvg(), "b": fl.FedAvg(lr=0.2)}
    result = fl.run(data, task, algorithms, rounds=2, workers=1, out=tmp_path / "run")
    said = [text for text in cautions(RunData.read(result.folder)) if "own_locked" in text]
    assert len(said) == 1
    assert "Values that your program sets in it later have no effect" in said[0]
    del sys.modules["own_locked"]


def test_what_is_made_inside_of_a_function_can_be_sent() -> None:
    def own_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with Lock():
            return (output - target).square()

    assert through_a_socket(own_loss)(torch.ones(1), torch.zeros(1)) == 1  # type: ignore[operator]
