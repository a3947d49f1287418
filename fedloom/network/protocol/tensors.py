"""Parcels of tensors, as they cross the wire. Nothing is pickled, and no code is sent.

A *parcel* is a safetensors file whose metadata holds a JSON header and the order of the tensors. It is written in
pieces straight from the tensors' memory, so that sending a model needs no second copy. The safetensors library, which
is made for files from untrusted sources, reads it. With zstd, the receiver decides how much it decompresses.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import torch
import zstandard
from safetensors import SafetensorError, deserialize, safe_open
from torch import Tensor

from fedloom import tree
from fedloom.errors import FedloomError
from fedloom.tree import Groups

# of 2, scores of single examples leave a site if its policy names a metric that needs them; of 1, frozen parameters are
# in every message: its agents would use others here, and not notice
PROTOCOL = 3
CHUNK = 1 << 20
HEADER_LIMIT = 16 << 20  # bytes of JSON besides the tensors of one parcel
KINDS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.complex64: "C64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

_DTYPES = {name: kind for kind, name in KINDS.items()}
ParcelContent = tuple[dict[str, Any], dict[str, Tensor]]
LEVEL = 1  # weights are nearly noise: higher levels take longer and gain nothing
WINDOW = 8 << 20  # bytes of memory that a received stream may request

CompressionError = zstandard.ZstdError


class Readable(Protocol):
    """Something that returns up to `size` bytes at a time."""

    def read(self, size: int = -1, /) -> bytes: ...


def compressed(pieces: Iterable[bytes | memoryview]) -> Iterator[bytes]:
    """Compress a stream of bytes."""
    compressor = zstandard.ZstdCompressor(level=LEVEL).compressobj()
    for piece in pieces:
        if output := compressor.compress(piece):
            yield output
    yield compressor.flush()


def decompress_into(receive: Callable[[bytes], None]) -> Callable[[bytes], Any]:
    """Return a function that decompresses bytes and passes them on in small pieces, until `receive` raises."""

    class _Sink:
        def write(self, piece: bytes) -> int:
            receive(piece)
            return len(piece)

    sink: Any = _Sink()
    return zstandard.ZstdDecompressor(max_window_size=WINDOW).stream_writer(sink, closefd=False).write


def decompressed(source: Readable) -> Readable:
    """Return a stream that decompresses no more than you read."""
    raw: Any = source
    return zstandard.ZstdDecompressor(max_window_size=WINDOW).stream_reader(
        raw, read_size=1 << 16, read_across_frames=True, closefd=False
    )


class WireError(FedloomError):
    """A received message or file does not follow the protocol."""


@dataclass(frozen=True)
class Parcel:
    """A JSON header with named tensors, ready to be sent."""

    header: Mapping[str, Any]
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    @cached_property
    def _stored(self) -> dict[str, Tensor]:
        return {name: leaf.detach().cpu().contiguous() for name, leaf in self.tensors.items()}

    @cached_property
    def _start(self) -> bytes:
        """The start of the file: where each tensor is."""
        listed: dict[str, Any] = {
            "__metadata__": {"header": json.dumps(self.header), "order": json.dumps(list(self._stored))}
        }
        offset = 0
        for name, leaf in self._stored.items():
            size = leaf.numel() * leaf.element_size()
            place = [offset, offset + size]
            if leaf.dtype not in KINDS:
                raise FedloomError(f"'{name}' has the dtype {leaf.dtype}, which cannot be sent. Use dtype float32.")
            listed[name] = {"dtype": KINDS[leaf.dtype], "shape": list(leaf.shape), "data_offsets": place}
            offset += size
        text = json.dumps(listed).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    @cached_property
    def size(self) -> int:
        return len(self._start) + sum(leaf.numel() * leaf.element_size() for leaf in self._stored.values())

    @cached_property
    def sha256(self) -> str:
        digest = hashlib.sha256()
        for piece in self.pieces():
            digest.update(piece)
        return digest.hexdigest()

    def pieces(self) -> Iterator[bytes | memoryview]:
        """Yield the bytes in chunks."""
        yield self._start
        for leaf in self._stored.values():
            if leaf.numel():
                raw = leaf.reshape(-1).view(torch.uint8).numpy().data
                for begin in range(0, len(raw), CHUNK):
                    yield raw[begin : begin + CHUNK]

    @cached_property
    def whole(self) -> bytes:
        """All bytes at once, for small parcels that many agents receive."""
        return b"".join(self.pieces())

    @cached_property
    def compressed(self) -> bytes:
        """The same, compressed."""
        return b"".join(compressed([self.whole]))


def read_description(file: BinaryIO, limit: int) -> tuple[dict[str, Any], list[str]]:
    """Return a parcel's header and the names of its tensors, without the tensors, if they have at most `limit` bytes.

    Hostile JSON takes up to 50 times its size in memory, and tensors without values even more.
    """
    with _as_wire_error():
        size = int.from_bytes(file.read(8), "little")
        if size > limit:
            raise WireError(f"the description of the parcel's tensors may have {limit} bytes, and has {size}")
        listed = json.loads(file.read(size))
        return _described(listed.pop("__metadata__"), listed.keys())


def open_parcel(path: Path) -> ParcelContent:
    """Open a parcel in a file; its tensors are mapped into memory, not read."""
    with _as_wire_error(), safe_open(path, framework="pt") as file:
        header, order = _described(file.metadata() or {}, set(file.keys()))
        return header, {name: file.get_tensor(name) for name in order}


def load_parcel(path: Path) -> ParcelContent:
    """Read a parcel from a file. Mapped memory has another alignment, which may change the bits of later arithmetic."""
    header, leaves = open_parcel(path)
    return header, tree.clone(leaves)


def read_parcel(data: bytes | bytearray) -> ParcelContent:
    """Read a small parcel from memory; every tensor has its own memory."""
    with _as_wire_error():
        leaves = {name: _leaf(**entry) for name, entry in deserialize(bytes(data))}  # type: ignore[no-untyped-call]
        start = 8 + int.from_bytes(data[:8], "little")
        metadata = json.loads(data[8:start]).get("__metadata__") or {}
        header, order = _described(metadata, leaves.keys())
        return header, {name: leaves[name] for name in order}


def _leaf(dtype: str, shape: list[int], data: bytearray) -> Tensor:
    kind = _DTYPES[dtype]
    if not data:
        return torch.empty(shape, dtype=kind)  # the library has compared the shape with the number of bytes
    return torch.frombuffer(data, dtype=kind).reshape(shape)


def _described(metadata: Mapping[str, str], names: Set[str]) -> tuple[dict[str, Any], list[str]]:
    """Return a parcel's header and the names of its tensors in the order in which they were sent."""
    header, order = json.loads(metadata["header"]), json.loads(metadata["order"])
    if not isinstance(header, dict) or not isinstance(order, list):
        raise WireError("the parcel's header or order has the wrong type")
    if len(order) != len(names) or set(order) != names:
        raise WireError("the parcel's order does not list its tensors")
    return header, order


@contextmanager
def _as_wire_error() -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise WireError(f"the body is not a parcel of tensors: {type(error).__name__}") from None


def flatten(groups: Groups, above: str = "") -> dict[str, Tensor]:
    """Turn groups of trees into one tree with paths for names; an empty group becomes a path that ends in a slash.

    >>> list(flatten({"model": {"w": torch.ones(1)}, "none": {}}))
    ['model/w', 'none/']
    """
    found: dict[str, Tensor] = {}
    for group, leaves in groups.items():
        if not leaves:
            found[f"{above}{group}/"] = torch.zeros(0, dtype=torch.uint8)
        for name, leaf in leaves.items():
            found[f"{above}{group}/{name}"] = leaf
    return found


def unflatten(leaves: Mapping[str, Tensor]) -> Groups:
    """Turn paths back into groups, in the order in which they were sent."""
    groups: Groups = {}
    for path, leaf in leaves.items():
        group, slash, name = path.partition("/")
        if not slash:
            raise WireError(f"the tensor '{path[:80]}' has no group in its path")
        branch = groups.setdefault(group, {})
        if name:
            branch[name] = leaf
    return groups


def below(leaves: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the leaves whose paths begin with a prefix, and remove it from their names."""
    return {path[len(prefix) :]: leaf for path, leaf in leaves.items() if path.startswith(prefix)}
