"""Strangers that keep a port busy: `python -m tests.network.flood PORT COUNT KIND` until its standard input ends.

It keeps COUNT connections open, and opens another whenever the coordinator closes one. It prints a line when all have
been opened once, and the number of connections at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import ssl
import subprocess
import sys
from pathlib import Path

KINDS = {  # how a connection begins, with TLS or before it, and what it sends twice a second
    "silent": (b"", False, b""),
    "half a handshake": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", False, b""),
    "half a header": (b"GET /v1/status HTTP/1.1\r\nhost: a\r\n", True, b""),
    "slow header": (b"GET /v1/status HTTP/1.1\r\nhost: a\r\nx: ", True, b"x"),
    "slow body": (b"POST /v1/enrol HTTP/1.1\r\nhost: a\r\ncontent-length: 9000\r\n\r\n", True, b"x"),
}


class Flood:
    """Connections of one kind."""

    def __init__(self, port: int, count: int, kind: str) -> None:
        self.port, self.count = port, count
        self.begin, tls, self.more = KINDS[kind]
        self.context: ssl.SSLContext | None = None
        if tls:
            self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            self.context.check_hostname, self.context.verify_mode = False, ssl.CERT_NONE
        self.opened = 0

    async def _hold(self) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, ssl=self.context)
        try:
            writer.write(self.begin)
            self.opened += 1
            if self.opened == self.count:
                print("all were opened", flush=True)
            while True:
                try:
                    if not await asyncio.wait_for(reader.read(1000), 0.5):
                        return
                except asyncio.TimeoutError:
                    writer.write(self.more)
        finally:
            writer.close()

    async def _keep(self) -> None:
        while True:
            with contextlib.suppress(OSError, EOFError):
                await self._hold()
            await asyncio.sleep(1.0)

    async def run(self) -> None:
        self.tasks = [asyncio.ensure_future(self._keep()) for _ in range(self.count)]
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        print(self.opened, flush=True)
        os._exit(0)  # closing thousands of connections one by one would take a while


def flood(port: int, count: int, kind: str) -> subprocess.Popen[str]:
    """Start a flood in another process; return when all of its connections have been opened once."""
    command = [sys.executable, "-m", "tests.network.flood", str(port), str(count), kind]
    root = Path(__file__).parents[2]
    process = subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "all were opened\n"
    return process


def end_flood(process: subprocess.Popen[str]) -> int:
    """End a flood; return how many connections it opened."""
    opened, _ = process.communicate(timeout=60)
    return int(opened.split()[-1])


if __name__ == "__main__":
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    asyncio.run(Flood(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]).run())
