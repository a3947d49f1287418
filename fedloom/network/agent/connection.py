"""An agent's connection to its coordinator: httpx, outbound only, every request signed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from pydantic import BaseModel

from fedloom import faults
from fedloom.errors import FedloomError
from fedloom.network.protocol.compression import packed
from fedloom.network.protocol.identity import Signer
from fedloom.network.protocol.tensors import Parcel

NOTHING = hashlib.sha256(b"").hexdigest()
TIMEOUT = httpx.Timeout(60.0, connect=10.0, read=60.0)


class Unreachable(FedloomError):
    """The coordinator does not answer."""


class Denied(FedloomError):
    """The coordinator refuses a request, with a code."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class Link:
    """Signed requests, for one thread."""

    pack = False  # whether tensors are compressed

    def __init__(self, url: str, signer: Signer, verify: Any, pack: bool = False) -> None:
        self.url, self.signer, self.pack = url.rstrip("/"), signer, pack
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
        """A reply's JSON; a proxy's page in its place is as if nobody were there."""
        content = response.read()
        try:
            if response.status_code != 200:
                raise ValueError(f"status {response.status_code}")
            return dict(json.loads(content))
        except (ValueError, TypeError):
            raise Unreachable(f"What answers at {self.url} is no fedloom coordinator at the moment.") from None

    @contextmanager
    def stream(self, path: str) -> Iterator[httpx.Response]:
        """A reply whose body is read in pieces."""
        with self._send("GET", path) as response, _in_words(self.url):
            yield response

    @contextmanager
    def _send(self, method: str, path: str, message: BaseModel | Parcel | None = None) -> Iterator[httpx.Response]:
        """Send a request; a wrong clock or an old session is mended by what the coordinator says about its own."""
        response = self._try(method, path, message)
        for _ in range(3):
            if response.status_code < 400:
                break
            code, text = _reason(response)
            if code == "session":
                self.signer.session = json.loads(response.content)["session"]
            elif code == "clock":
                self.signer.offset = float(json.loads(response.content)["time"]) - faults.clock()
            elif code in ("body", "replayed"):
                pass  # damaged or doubled on its way: signed anew, it is another request
            elif response.status_code >= 500:
                raise Unreachable(f"The coordinator at {self.url} cannot work at the moment: {text}")
            else:
                raise Denied(response.status_code, code, text)
            response = self._try(method, path, message)
        if response.status_code >= 500:
            raise Unreachable(f"The coordinator at {self.url} cannot work at the moment: {_reason(response)[1]}")
        if response.status_code >= 400:
            raise Denied(response.status_code, *_reason(response))
        try:
            with _in_words(self.url):
                yield response
        finally:
            response.close()

    def _try(self, method: str, path: str, message: BaseModel | Parcel | None) -> httpx.Response:
        content: Any = None
        body, headers = NOTHING, {}
        if isinstance(message, Parcel):
            content, body = message.pieces(), message.sha256
            headers = {"content-type": "application/octet-stream"}
            if self.pack:
                content, headers["content-encoding"] = packed(content), "zstd"
            else:
                headers["content-length"] = str(message.size)
        elif message is not None:
            content = message.model_dump_json().encode()
            body, headers = hashlib.sha256(content).hexdigest(), {"content-type": "application/json"}
        headers |= self.signer.headers(method, path, body)
        with _in_words(self.url):
            request = self._client.build_request(method, self.url + path, content=content, headers=headers)
            response = self._client.send(request, stream=True)
            if response.status_code >= 400:
                response.read()
                response.close()
            return response


def _reason(response: httpx.Response) -> tuple[str, str]:
    try:
        told = json.loads(response.content)
        return str(told["code"]), str(told["message"])
    except (ValueError, KeyError, TypeError):
        return "unknown", f"it answers {response.status_code}"


@contextmanager
def _in_words(url: str) -> Iterator[None]:
    try:
        yield
    except (httpx.HTTPError, httpx.StreamError, OSError) as error:
        raise Unreachable(f"The coordinator at {url} cannot be reached: {error or type(error).__name__}") from error
