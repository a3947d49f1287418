"""A proxy between agents and a coordinator that delays, drops, truncates, corrupts and cuts what passes through it."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time


class Proxy:
    """Forwards TCP connections to a port on this machine, with faults that a seed decides."""

    def __init__(
        self,
        target: int,
        *,
        seed: int = 0,
        delay: float = 0.0,
        drop: float = 0.0,
        truncate: float = 0.0,
        corrupt: float = 0.0,
        replay: float = 0.0,
    ) -> None:
        self.target, self.delay = target, delay
        self.drop, self.truncate, self.corrupt, self.replay = drop, truncate, corrupt, replay
        self._draws = random.Random(seed)
        self._cut_until = 0.0
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = int(self._listener.getsockname()[1])
        self.faults = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self, seconds: float) -> None:
        """Nothing passes for a while, and what is connected is torn apart."""
        self._cut_until = time.monotonic() + seconds
        for one in list(self._open):
            self._close(one)

    def close(self) -> None:
        self._listener.close()
        for one in list(self._open):
            self._close(one)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if time.monotonic() < self._cut_until or self._draws.random() < self.drop:
                self.faults += 1
                near.close()
                continue
            try:
                far = socket.create_connection(("127.0.0.1", self.target), timeout=10)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            self._open |= {near, far}
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(one, other, other is far), daemon=True).start()

    def _play_again(self, recorded: list[bytes]) -> None:
        """What an agent sent, sent once more by somebody else."""
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.target), timeout=2) as far:
            for piece in recorded:
                far.sendall(piece)
            far.recv(1 << 16)

    def _pump(self, one: socket.socket, other: socket.socket, upwards: bool) -> None:
        recorded: list[bytes] = []
        try:
            while piece := one.recv(1 << 16):
                if self.replay and upwards:
                    recorded.append(piece)
                    if self._draws.random() < self.replay:
                        self.faults += 1
                        self._play_again(recorded)
                if self.delay:
                    time.sleep(self.delay)
                chance = self._draws.random()
                if chance < self.drop / 4:
                    self.faults += 1
                    break
                if chance < self.truncate:
                    self.faults += 1
                    other.sendall(piece[: len(piece) // 2])
                    break
                if chance < self.corrupt:
                    self.faults += 1
                    place = self._draws.randrange(len(piece))
                    piece = piece[:place] + bytes([piece[place] ^ 0x55]) + piece[place + 1 :]
                other.sendall(piece)
        except OSError:
            pass
        self._close(one)
        self._close(other)

    def _close(self, one: socket.socket) -> None:
        self._open.discard(one)
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
        one.close()
