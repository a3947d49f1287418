"""What secure aggregation costs, beside the same rounds without it. It needs no data: examples are drawn.

    python benchmarks/secure.py network      # 10 agents, the 2NN, equal weights, 32 bits: seconds and bytes of a round
    python benchmarks/secure.py server       # the server's work for 50 clients with 1 M parameters, 30 % of them lost
    python benchmarks/secure.py simulation   # 100 clients of the 2NN in one process

A client of the 2NN has 600 examples and trains for one epoch in batches of 10, as in McMahan et al. 2017.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

SECURE = {"threshold": 0.67, "min_clients": 3, "range": 4.0, "bits": 32}


def experiment(folder: Path, clients: int, rounds: int, secure: bool) -> Path:
    """Write an experiment with 600 drawn examples of 784 features for each client."""
    rows = 600 * clients
    draws = np.random.default_rng(0)
    np.savez(folder / "data.npz", x=draws.normal(size=(rows, 784)).astype(np.float32), y=draws.integers(0, 10, rows))
    values: dict[str, Any] = {
        "name": "secure-cost",
        "rounds": rounds,
        "data": {
            "source": "npz",
            "path": "data.npz",
            "partition": {"name": "iid", "clients": clients},
            "split": [1.0, 0.0, 0.0],
        },
        "task": {"model": "mnist_2nn"},
        "train": {"batch_size": 10, "epochs": 1, "lr": 0.01},
        "evaluate": {"every": 1_000_000, "splits": []},
        "algorithm": {"fedavg": {"weights": "uniform"}},
    }
    if secure:
        values["privacy"] = {"secure_aggregation": SECURE}
    path = folder / f"{'secure' if secure else 'plain'}.toml"
    path.write_text(tomli_w.dumps(values))
    return path


def measured(folder: Path, clients: int, rounds: int, secure: bool, *command: str) -> dict[str, Any]:
    """Run an experiment; return the median seconds of its rounds without the first, and the bytes of a round."""
    from fedloom.experiment.store import Store

    file = experiment(folder, clients, rounds, secure)
    out = folder / file.stem
    run = [sys.executable, "-m", "fedloom", command[0], str(file), *command[1:], "--out", str(out), "--json", "-q"]
    subprocess.run(run, check=True, capture_output=True, text=True)
    with Store(out, read_only=True) as store:
        seconds = [row["seconds"] for row in store.rows("rounds", 1)][1:]
        traffic = [row for row in store.rows("participants") if row["round"] == rounds]
    sent = sum(row["bytes_up"] + row["bytes_down"] for row in traffic)
    return {"median_seconds_a_round": round(float(np.median(seconds)), 3), "megabytes_a_round": round(sent / 1e6, 2)}


def compared(clients: int, rounds: int, *command: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as temporary:
        plain, secure = (measured(Path(temporary), clients, rounds, on, *command) for on in (False, True))
    return {
        "clients": clients,
        "plain": plain,
        "secure": secure,
        "ratios": {name: round(secure[name] / plain[name], 2) for name in plain},
    }


def server(clients: int = 50, parameters: int = 1_000_000, lost: float = 0.3) -> dict[str, Any]:
    """Measure the server's own work: the sets, the sum of masked values, and the removal of masks."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from fedloom.privacy.secure.client import SecureClient
    from fedloom.privacy.secure.masks import PairMasksOnce
    from fedloom.privacy.secure.server import SecureServer
    from fedloom.privacy.secure.session import Session, smallest_threshold

    session = Session("benchmark", 1, 0, 1, clients, smallest_threshold(0.67, clients), "ring")
    signers = {client: Ed25519PrivateKey.generate() for client in range(clients)}
    roster = {client: key.public_key().public_bytes_raw() for client, key in signers.items()}
    masks, spent = PairMasksOnce(), 0.0
    people = {n: SecureClient(session, n, key.sign, roster, masks=masks) for n, key in signers.items()}
    one = SecureServer(session)

    def timed(work: Any, *given: Any) -> Any:
        nonlocal spent
        began = time.perf_counter()
        found = work(*given)
        spent += time.perf_counter() - began
        return found

    timed(one.close_advertise, [person.advertise() for person in people.values()])
    keys = list(one.advertised.values())
    timed(one.close_share, {number: person.share(keys) for number, person in people.items()})
    gone = range(int(lost * clients))
    value = np.ones(parameters, np.uint32)
    for number in [number for number in people if number not in gone]:
        for_it = timed(one.ciphertexts_for, number)
        timed(one.add_masked, number, people[number].mask(value, one.sharers, for_it))
    timed(one.close_mask)
    timed(one.close_confirm, {number: people[number].confirm(one.survivors) for number in one.survivors})
    total = timed(one.total, {number: people[number].unmask(one.signatures) for number in one.signatures})
    assert set(total.tolist()) == {len(one.survivors)}
    return {"clients": clients, "parameters": parameters, "lost": len(gone), "server_seconds": round(spent, 2)}


def main(part: str) -> None:
    parts = {
        "network": lambda: compared(10, 8, "serve", "--local", "10"),
        "simulation": lambda: compared(100, 4, "run"),
        "server": server,
    }
    print(json.dumps({part: parts[part]()}, indent=2))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "server")
