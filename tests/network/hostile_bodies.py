"""Bodies of answers that once took minutes or gigabytes to read, and the memory that a coordinator needs for them now.

`python -m tests.network.hostile_bodies` prints the memory before them and the most during them, in kB (on Linux).
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from fedloom.network.protocol.tensors import compressed
from tests.network.conftest import Speaker, World


def described(header: Any, names: list[str]) -> bytes:
    """A parcel of tensors without a value, however many names there are."""
    listed: dict[str, Any] = {"__metadata__": {"header": json.dumps(header), "order": json.dumps(names)}}
    empty = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    text = json.dumps({**listed, **dict.fromkeys(names, empty)}).encode()
    return len(text).to_bytes(8, "little") + text


def many_clients(clients: int, tensors: int) -> bytes:
    """An answer about many clients, whose tensors were once searched for each of them."""
    names = [f"{number}/update/model/w" for number in range(tensors)]
    return described({"ask": "ask", "results": [{"client": number} for number in range(clients)]}, names)


def empty_tensors(count: int) -> bytes:
    """An answer of one awaited client with very many tensors."""
    return described({"ask": "ask", "results": [{"client": 0}]}, [f"0/public/{number}" for number in range(count)])


def nested(depth: int) -> bytes:
    """A description of lists in lists."""
    text = b'{"__metadata__":' + b"[" * depth + b"]" * depth + b"}"
    return len(text).to_bytes(8, "little") + text


def send(agent: Speaker, body: bytes) -> Any:
    """Send a body compressed, as a hostile agent would: these shrink to a hundredth."""
    packed = b"".join(compressed([body]))
    return agent.send("POST", "/v1/answers", packed, signs=body, **{"content-encoding": "zstd"})


def memory(field: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(next(line for line in text.splitlines() if line.startswith(field)).split()[1])


def main() -> None:
    bodies = [many_clients(200_000, 60_000), empty_tensors(620_000), nested(4_000_000)]
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder))
        agent = world.speaker()
        agent.hello()
        world.open_call(agent, seconds=3600.0)
        agent.send("POST", "/v1/answers", b"nonsense")
        Path("/proc/self/clear_refs").write_text("5")  # from here on, VmHWM is the most memory
        before = memory("VmRSS")
        for body in bodies * 3:
            assert send(agent, body).status_code == 422
        most = memory("VmHWM")
        accepted = agent.send("POST", "/v1/answers", agent.answer().whole).json()["results"][0]["status"] == "accepted"
        world.client.close()
        world.ledger.close()
    print(json.dumps({"before": before, "most": most, "accepted": accepted, "bytes": [len(body) for body in bodies]}))


if __name__ == "__main__":
    main()
