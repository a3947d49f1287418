"""An agent's connection to its coordinator: httpx, outbound only, every request signed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from pydantic import BaseModel

from fedloom import faults
from fedloom.errors import StoreError
from fedloom.network.agent.unsigned_requests import Unreachable, reaching
from fedloom.network.protocol.rejection import Rejected
from fedloom.network.protocol.signatures import Signer
from fedloom.network.protocol.tensors import CHUNK, CompressionError, Parcel, Readable, compressed, decompressed
from fedloom.results.safe_text import plain

EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()
TIMEOUT = httpx.Timeout(60.0, connect=10.0, read=60.0)


class Connection:
    """Signed requests, for one thread."""

    compress = False  # whether tensors are compressed

    def __init__(self, url: str, signer: Signer, verify: Any, compress: bool = False) -> None:
        self.url, self.signer, self.compress = url.rstrip("/"), signer, compress
        limits = httpx.Limits(max_connections=4, keepalive_expiry=60.0)
        headers = {"user-agent": "fedloom", "accept-encoding": "identity"}
        self._client = httpx.Client(verify=verify, timeout=TIMEOUT, limits=limits, headers=headers)

    def close(self) -> None:
        self._client.close()

    def get(self, path: str) -> dict[str, Any]:
        with self._send("GET", path) as response:
            return self._read(response)

    def post(self, path: str, message: BaseModel | Parcel) -> dict[str, Any]:
        with self._send("POST", path, message) as response:
            return self._read(response)

    def _read(self, response: httpx.Response) -> dict[str, Any]:
        """Return a reply's JSON; anything else, such as a proxy's error page, counts as unreachable."""
        content = response.read()
        try:
            if response.status_code != 200:
                raise ValueError(f"status {response.status_code}")
            return dict(json.loads(content))
        except (ValueError, TypeError):
            raise Unreachable(f"{self.url} did not respond as a fedloom coordinator.") from None

    @contextmanager
    def stream(self, path: str) -> Iterator[httpx.Response]:
        """Send a GET request whose reply is read in pieces."""
        with self._send("GET", path) as response, reaching(self.url):
            yield response

    @contextmanager
    def _send(self, method: str, path: str, message: BaseModel | Parcel | None = None) -> Iterator[httpx.Response]:
        """Send a request. After a wrong clock or an old session, correct it as the coordinator says and try again."""
        for tries_left in (3, 2, 1, 0):
            response = self._try(method, path, message)
            if response.status_code < 400:
                break
            rejected = _rejected(response)
            if tries_left and rejected.code == "session":
                self.signer.session = json.loads(response.content)["session"]
            elif tries_left and rejected.code == "clock":
                self.signer.offset = float(json.loads(response.content)["time"]) - faults.clock()
            elif tries_left and rejected.code in ("body", "replayed"):
                pass  # damaged or doubled on the way: signed again, it is another request
            elif rejected.status >= 500:
                raise Unreachable(f"The coordinator at {self.url} cannot work at the moment: {rejected}")
            else:
                raise rejected
        try:
            with reaching(self.url):
                yield response
        finally:
            response.close()

    def _try(self, method: str, path: str, message: BaseModel | Parcel | None) -> httpx.Response:
        content: Any = None
        body, headers = EMPTY_SHA256, {}
        if isinstance(message, Parcel):
            content, body = message.pieces(), message.sha256
            headers = {"content-type": "application/octet-stream"}
            if self.compress:
                content, headers["content-encoding"] = compressed(content), "zstd"
            else:
                headers["content-length"] = str(message.size)
        elif message is not None:
            content = message.model_dump_json().encode()
            body, headers = hashlib.sha256(content).hexdigest(), {"content-type": "application/json"}
        headers |= self.signer.headers(method, path, body)
        with reaching(self.url):
            request = self._client.build_request(method, self.url + path, content=content, headers=headers)
            response = self._client.send(request, stream=True)
            if response.status_code >= 400:
                response.read()
                response.close()
            return response


class _RawStream:
    """The bytes as they were sent."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks, self._left = chunks, b""

    def read(self, size: int = -1, /) -> bytes:
        """Return up to `size` bytes; none at the end."""
        piece = self._left or next(self._chunks, b"")
        self._left = piece[size:]
        return piece[:size]


class ReplyReader:
    """The bytes of a reply. A compressed one is decompressed only as far as it is read."""

    def __init__(self, response: httpx.Response) -> None:
        self._raw = raw = _RawStream(response.iter_raw())
        self._source: Readable = decompressed(raw) if response.headers.get("content-encoding") == "zstd" else raw

    def some(self, most: int) -> bytes:
        """Return between 1 and `most` bytes."""
        try:
            piece = self._source.read(most)
        except CompressionError:
            raise Unreachable("The coordinator's message is not valid zstd data.") from None
        if not piece:
            raise Unreachable("The coordinator's message ended too early.")
        return piece

    def take(self, size: int) -> bytes:
        """Return the next `size` bytes."""
        pieces: list[bytes] = []
        while size > 0:
            pieces.append(self.some(min(size, CHUNK)))
            size -= len(pieces[-1])
        return b"".join(pieces)

    def end(self) -> None:
        """Check that nothing follows. A reply that is not read to its end costs its connection."""
        if self._raw.read(1):
            raise Unreachable("The coordinator's message is longer than it says.")

    def into(self, path: Path, size: int, sha256: str) -> None:
        """Write the next `size` bytes to a file if they have this SHA-256."""
        temporary = path.with_name(f"{path.name}.part")
        digest = hashlib.sha256()
        with _writing(path.parent), open(temporary, "wb") as file:
            while size > 0:
                piece = self.some(min(size, CHUNK))
                size -= len(piece)
                digest.update(piece)
                file.write(piece)
        if digest.hexdigest() != sha256:
            temporary.unlink()
            raise Unreachable("The coordinator's tensors were damaged on the way.")
        temporary.replace(path)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Raise `StoreError` if the disk fails, which must not pass for a broken connection."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"Tensors cannot be written to {folder}: {error}.") from error


def _rejected(response: httpx.Response) -> Rejected:
    """Return why the coordinator rejected a request."""
    try:
        reason = json.loads(response.content)
        return Rejected(plain(str(reason["code"])), plain(str(reason["message"])), response.status_code)
    except (ValueError, KeyError, TypeError):
        return Rejected("unknown", f"it answers {response.status_code}", response.status_code)
