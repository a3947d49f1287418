"""Many agents at once: no update may be lost or counted twice, and the coordinator's memory must stay flat.

    python benchmarks/network_load.py real 50 20          # real agents: processes with torch, data and training
    python benchmarks/network_load.py protocol 1000 100   # agents that only speak the protocol, in a few processes

A protocol-only agent signs, polls, reads the assignment, and answers with a model-shaped update whose values identify
it, so the coordinator's mean shows whether every agent was counted exactly once.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import multiprocessing
import resource
import ssl
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import tomli_w
import torch

from fedloom.algorithm import Update
from fedloom.network.protocol.certificates import trusting
from fedloom.network.protocol.messages import Assignment, ClientAnswer, ClientFacts, Hello, write_answer
from fedloom.network.protocol.signatures import Signer
from fedloom.network.protocol.token import Token

LEAVES = {"out.weight": (2, 4), "out.bias": (2,)}


def experiment(folder: Path, agents: int, rounds: int) -> Path:
    rows = 4 * agents
    x = np.random.default_rng(0).normal(size=(rows, 4)).astype(np.float32)
    np.savez(folder / "data.npz", x=x, y=np.arange(rows) % 2)
    values = {
        "name": "load",
        "rounds": rounds,
        "data": {
            "source": "npz",
            "path": "data.npz",
            "partition": {"name": "iid", "clients": agents},
            "split": [1.0, 0, 0],
        },
        "task": {"model": "logistic", "args": {"features": 4, "classes": 2}},
        "train": {"batch_size": "full"},
        "cohort": {"start_when": agents, "deadline": "5m", "quorum": 1.0},
        "evaluate": {"every": 1_000_000, "splits": []},
        "algorithm": {"fedavg": {"weights": "uniform"}},
        "run": {"backend": "serial", "checkpoint_every": 10},
    }
    path = folder / "experiment.toml"
    path.write_text(tomli_w.dumps(values))
    return path


def memory(process: int) -> int:
    """Resident megabytes of a process."""
    text = Path(f"/proc/{process}/status").read_text()
    return int(next(line for line in text.splitlines() if line.startswith("VmRSS")).split()[1]) // 1024


class Speaker:
    """One protocol-only agent."""

    def __init__(self, url: str, state: Path, number: int, authority: bytes, agent: str) -> None:
        self.url, self.number = url, number
        self.signer = Signer(state / f"{number}.key")
        self.signer.agent = agent
        self.answers = self.again = 0
        self.context: ssl.SSLContext = trusting(authority)

    async def request(self, method: str, path: str, body: bytes = b"") -> httpx.Response:
        for _ in range(5):
            headers = self.signer.headers(method, path, hashlib.sha256(body).hexdigest())
            try:
                reply = await self.client.request(method, self.url + path, content=body or None, headers=headers)
            except httpx.TransportError:  # as real agents do: sent again, it is the same answer
                self.again += 1
                continue
            if reply.status_code == 401 and reply.json()["code"] in ("session", "clock"):
                self.signer.session = reply.json()["session"]
                continue
            return reply
        raise RuntimeError("never accepted")

    async def run(self) -> None:
        limits = httpx.Limits(max_connections=2, max_keepalive_connections=1)
        async with httpx.AsyncClient(verify=self.context, timeout=300.0, limits=limits) as self.client:
            hello = Hello(
                versions={},
                features=(4,),
                dtype="float32",
                classes=("0", "1"),
                clients=(ClientFacts(name=f"c{self.number}", number=self.number, train=4, validation=0, test=0),),
                data_mark=str(self.number),
                setup={"group": 1},
            )
            assert (await self.request("POST", "/v1/hello", hello.model_dump_json().encode())).status_code == 200
            while True:
                reply = await self.request("GET", "/v1/work")
                if reply.status_code == 204:
                    if reply.headers.get("fedloom-finished"):
                        return
                    continue
                assert reply.status_code == 200, reply.text
                size = int.from_bytes(reply.content[:4], "little")
                header = json.loads(reply.content[4 : 4 + size])
                header.pop("missing")
                await self.answer(Assignment.model_validate(header))

    async def answer(self, ask: Assignment) -> None:
        value = float(ask.clients[0].client + 1)
        groups = {"model": {name: torch.full((1, *shape), value) for name, shape in LEAVES.items()}}
        answer = ClientAnswer(ask.clients[0].client, Update(groups, {"model": torch.ones(1)}))
        reply = await self.request("POST", "/v1/answers", write_answer(ask.id, [answer]).whole)
        assert reply.json()["results"][0]["status"] == "accepted", reply.text
        self.answers += 1


def speakers(url: str, state: Path, authority: bytes, agents: list[tuple[int, str]], counts: Any) -> None:
    async def everybody() -> None:
        made = [Speaker(url, state, number, authority, agent) for number, agent in agents]
        await asyncio.gather(*(one.run() for one in made))
        for one in made:
            counts.put((one.number, (one.answers, one.again)))

    asyncio.run(everybody())


def protocol(count: int, rounds: int) -> dict[str, Any]:
    """Protocol-only agents against a coordinator's process."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary)
        from fedloom.network.coordinator.ledger import Ledger
        from fedloom.network.protocol.certificates import local_authority

        file, out = experiment(folder, count, rounds), folder / "run"
        network = out / "network"
        authority = local_authority(network)
        ledger = Ledger(network)
        state = folder / "keys"
        agents = []
        for number in range(count):
            token = Token.new(authority.fingerprint)
            ledger.invite(token.digest)
            agents.append(
                (number, ledger.enrol(token.digest, f"a{number:04d}", Signer(state / f"{number}.key").public))
            )
        ledger.close()
        command = [
            sys.executable,
            "-m",
            "fedloom",
            "serve",
            str(file),
            "--listen",
            "127.0.0.1:18443",
            "--out",
            str(out),
            "-q",
        ]
        with open(folder / "log.txt", "wb") as log:
            coordinator = subprocess.Popen(command, stdout=log, stderr=log)
        while b"Serving" not in (folder / "log.txt").read_bytes():
            time.sleep(0.1)
        context = multiprocessing.get_context("spawn")
        counts: Any = context.Queue()
        parts = [agents[part::2] for part in range(2)]
        workers = [
            context.Process(target=speakers, args=("https://127.0.0.1:18443", state, authority.authority, part, counts))
            for part in parts
        ]
        began = time.perf_counter()
        for worker in workers:
            worker.start()
        samples = []
        while coordinator.poll() is None:
            time.sleep(1.0)
            try:
                samples.append(memory(coordinator.pid))
            except (OSError, StopIteration):
                break
        seconds = time.perf_counter() - began
        answers = dict(counts.get(timeout=60) for _ in range(count))
        for worker in workers:
            worker.join()
        if coordinator.wait() != 0:
            raise RuntimeError((folder / "log.txt").read_text()[-3000:])
        from fedloom.results.result import Result

        model = Result.read(out).weights()["model"]["out.bias"]
        rows = Result.read(out).rows("rounds")
        third = len(samples) // 3
        return {
            "agents": count,
            "rounds": rounds,
            "seconds": round(seconds, 1),
            "answers_sent": sum(sent for sent, _ in answers.values()),
            "requests_sent_again": sum(again for _, again in answers.values()),
            "answers_counted": sum(row["participants"] for row in rows),
            "mean_is_right": bool(torch.allclose(model, torch.full((2,), (count + 1) / 2))),
            "each_agent_answered_every_round": {sent for sent, _ in answers.values()} == {rounds},
            "coordinator_megabytes": {
                "after_a_third": samples[third] if samples else None,
                "at_the_end": samples[-2] if len(samples) > 1 else None,
                "most": max(samples, default=None),
            },
        }


def real(count: int, rounds: int) -> dict[str, Any]:
    """Real agents, started by a rehearsal."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary)
        file = experiment(folder, count, rounds)
        sha = {}
        began = time.perf_counter()
        samples = []
        for kind, options in (("serial", ["run"]), ("network", ["serve", "--local", str(count)])):
            command, *more = options
            done = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "fedloom",
                    command,
                    str(file),
                    *more,
                    "--out",
                    str(folder / kind),
                    "--json",
                    "-q",
                ],
                stdout=subprocess.PIPE,
                text=True,
            )
            while kind == "network" and done.poll() is None:
                time.sleep(0.5)
                try:
                    samples.append(memory(done.pid))
                except (OSError, StopIteration):
                    break
            text, _ = done.communicate()
            if done.returncode:
                raise RuntimeError(f"{kind} ended with {done.returncode}")
            sha[kind] = json.loads(text)["weights_sha256"]
        from fedloom.results.result import Result

        rows = Result.read(folder / "network").rows("rounds")
        return {
            "agents": count,
            "rounds": rounds,
            "seconds": round(time.perf_counter() - began, 1),
            "same_sha256_as_serial": sha["serial"] == sha["network"],
            "participants_of_every_round": sorted({row["participants"] for row in rows}),
            "coordinator_megabytes": {"half_way": samples[len(samples) // 2], "at_the_end": samples[-2]},
        }


if __name__ == "__main__":
    kind, agents, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print(json.dumps({"protocol": protocol, "real": real}[kind](agents, rounds), indent=2))
